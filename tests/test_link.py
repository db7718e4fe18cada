"""Numbering of messages: each is received once and in order, even if the transport loses or repeats frames."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ddp_notebook.messages.encoding import VERSION
from ddp_notebook.wire.link import BEAT, DATA, HEADER_BYTES, RESEND, RESEND_S, Header, Link, VersionError


def header(frames: Sequence[bytes]) -> Header:
    return Header.unpack(frames[0])


def send(link: Link, text: str, now: float = 0.0) -> list[bytes]:
    return link.data([text.encode()], epoch=1, now=now)


def test_header_survives_the_wire():
    sent = Header(DATA, 2**40, 2**33, 7)

    assert Header.unpack(sent.pack()) == sent


def test_messages_are_numbered_from_one_and_delivered_in_order():
    ours, theirs = Link(), Link()

    frames = [send(ours, text) for text in "abc"]

    assert [header(one).seq for one in frames] == [1, 2, 3]
    assert [header(one).epoch for one in frames] == [1, 1, 1]
    assert [theirs.heard(header(one), 0.0) for one in frames] == [True, True, True]


def test_what_is_sent_is_kept_until_it_is_acknowledged():
    ours, theirs = Link(), Link()
    frames = [send(ours, text) for text in "abc"]

    theirs.heard(header(frames[0]), 0.0)
    theirs.heard(header(frames[1]), 0.0)
    assert theirs.owes_ack == 2
    ours.heard(header(theirs.beat(0.0)), 0.0)

    assert theirs.owes_ack == 0
    assert ours.again(0.0) == [frames[2]]


def test_a_message_acknowledges_what_its_sender_has_received():
    ours, theirs = Link(), Link()
    theirs.heard(header(send(ours, "question")), 0.0)

    ours.heard(header(send(theirs, "answer")), 0.0)

    assert ours.again(0.0) == []
    assert theirs.owes_ack == 0


def test_a_gap_blocks_delivery_until_the_missing_message_arrives():
    ours, theirs = Link(), Link()
    frames = [send(ours, text) for text in "abc"]
    theirs.heard(header(frames[0]), 0.0)

    assert not theirs.heard(header(frames[2]), 0.0)
    assert theirs.is_gap(header(frames[2]))
    request = header(theirs.beat(0.0, RESEND))
    assert (request.kind, request.ack) == (RESEND, 1)
    assert not ours.heard(request, 0.0)

    assert ours.again(0.0) == [frames[1], frames[2]]  # go-back-N: messages that arrived too early are sent again too
    assert [theirs.heard(header(one), 0.0) for one in ours.again(0.0)] == [True, True]


def test_a_missing_message_is_requested_once_and_later_again():
    theirs = Link()

    assert [theirs.may_ask(now) for now in (10.0, 10.1, 10.9)] == [True, False, False]
    assert theirs.may_ask(10.0 + RESEND_S)
    theirs.heard(Header(DATA, 1, 0, 0), 11.1)
    assert theirs.may_ask(11.1), "another one is missing now"


def test_a_message_that_comes_twice_is_delivered_once():
    ours, theirs = Link(), Link()
    frames = send(ours, "once")

    assert theirs.heard(header(frames), 0.0)
    assert not theirs.heard(header(frames), 0.0)
    assert not theirs.is_gap(header(frames))


def test_an_old_acknowledgement_takes_nothing_back():
    ours, theirs = Link(), Link()
    frames = [send(ours, text) for text in "ab"]
    early = header(theirs.beat(0.0))
    for one in frames:
        theirs.heard(header(one), 0.0)
    ours.heard(header(theirs.beat(0.0)), 0.0)

    ours.heard(early, 0.0)

    assert ours.again(0.0) == []
    assert header(send(ours, "c")).seq == 3


def test_beats_carry_no_message():
    link = Link()

    assert not link.heard(Header(BEAT, 0, 0, 0), now=5.0)
    assert not link.is_gap(Header(BEAT, 9, 0, 0))
    assert (link.received, link.owes_ack) == (0, 0)


def test_a_link_records_the_last_contact_and_the_last_progress():
    ours, theirs = Link(), Link()

    send(ours, "a", now=1.0)
    send(ours, "b", now=2.0)
    assert ours.last_progress_s == 1.0, "the oldest message waits since then"
    theirs.heard(Header(DATA, 1, 0, 0), now=2.5)
    ours.heard(header(theirs.beat(2.5)), now=3.0)
    assert (ours.last_heard_s, ours.last_progress_s, ours.last_sent_s) == (3.0, 3.0, 2.0)
    ours.heard(Header(BEAT, 0, 1, 0), now=4.0)
    assert (ours.last_heard_s, ours.last_progress_s) == (4.0, 3.0)
    ours.again(now=5.0)
    assert (ours.last_progress_s, ours.last_sent_s) == (5.0, 5.0)


def test_a_peer_gets_missing_messages_immediately_after_a_cut():
    slow, cut = Link(), Link()
    for link in (slow, cut):
        send(link, "a", now=0.0)
        for second in range(1, 12):
            if link is slow:
                link.heard(Header(BEAT, 0, 0, 0), float(second))
            if second in (2, 5, 10):  # the delay doubles each time
                assert link.is_overdue(second)
                link.again(second)
    slow.heard(Header(BEAT, 0, 0, 0), now=12.0)
    cut.heard(Header(BEAT, 0, 0, 0), now=12.0)
    assert cut.is_overdue(12.0) and not slow.is_overdue(12.0)


@pytest.mark.parametrize(
    ("frame", "theirs"),
    [
        (bytes([VERSION + 1]) + Header(DATA, 1, 0, 0).pack()[1:], str(VERSION + 1)),
        (b"", "None"),
        (b"GET / HTTP/1.1", str(ord("G"))),
    ],
    ids=["next version", "empty", "no header"],
)
def test_another_version_is_named(frame, theirs):
    with pytest.raises(VersionError) as error:
        Header.unpack(frame)

    assert str(error.value) == f"the version of the wire protocol must be {VERSION}, got {theirs}"


class Transport:
    """One direction of a connection that loses and repeats frames in bursts, like a cut, and keeps their order."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._lossy = False
        self.frames: list[Sequence[bytes]] = []

    def put(self, frames: Sequence[bytes]) -> None:
        if self._chance.random() < 0.1:
            self._lossy = not self._lossy
        if self._lossy and self._chance.random() < 0.7:
            return
        self.frames += [frames] * self._chance.choice([1, 1, 1, 2, 3])


class Side:
    """Drives a link like an endpoint."""

    def __init__(self, inwards: Transport, out: Transport, texts: list[str]) -> None:
        self.link = Link()
        self.received: list[str] = []
        self.queued = list(texts)
        self._in, self._out = inwards, out

    @property
    def is_done(self) -> bool:
        return not self.queued and not self.link.unacknowledged

    def tick(self, now: float) -> None:
        if self.link.unacknowledged and now - self.link.last_progress_s > RESEND_S:
            self._send_again(now)
        if self.link.owes_ack or now - self.link.last_sent_s > 1.0:
            self._out.put(self.link.beat(now))

    def send(self, now: float) -> None:
        if self.queued:
            self._out.put(send(self.link, self.queued.pop(0), now))

    def read(self, now: float) -> None:
        if not self._in.frames:
            return
        frames = self._in.frames.pop(0)
        if self.link.heard(header(frames), now):
            self.received.append(frames[0][HEADER_BYTES:].decode())
        elif self.link.is_gap(header(frames)) and self.link.may_ask(now):
            self._out.put(self.link.beat(now, RESEND))
        elif header(frames).kind == RESEND:
            self._send_again(now)

    def _send_again(self, now: float) -> None:
        for frames in self.link.again(now):
            self._out.put(frames)


def talk(seed: int, texts: list[str]) -> tuple[Side, Side]:
    """Return two sides after they have sent each other these texts, or after 20,000 steps."""
    chance = random.Random(seed)
    out, back = Transport(chance), Transport(chance)
    sides = Side(back, out, texts), Side(out, back, texts)
    for step in range(20_000):
        now = step / 200
        side = chance.choice(sides)
        if step % 20 < 2:
            sides[step % 2].tick(now)
        elif chance.random() < 0.1:
            side.send(now)
        else:
            side.read(now)
        if all(one.is_done for one in sides):
            break
    return sides


def test_messages_arrive_once_and_in_order_over_a_bad_transport():
    texts = [f"{number}" for number in range(40)]

    for seed in range(60):
        assert [side.received for side in talk(seed, texts)] == [texts, texts], f"seed {seed}"


def test_a_repeated_message_is_acknowledged_again():
    ours, theirs = Link(), Link()
    frames = send(ours, "once")
    theirs.heard(header(frames), 0.0)
    theirs.beat(0.0)  # lost

    theirs.heard(header(frames), 1.0)

    assert theirs.owes_ack
    ours.heard(header(theirs.beat(1.0)), 1.0)
    assert ours.again(1.0) == []


@pytest.mark.slow
def test_two_sides_that_lost_their_acknowledgements_come_to_rest():
    texts = [f"{number}" for number in range(40)]

    for seed in range(60):
        assert all(side.is_done for side in talk(seed, texts)), f"seed {seed}: both send everything again, forever"
