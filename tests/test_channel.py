"""The wire: real sockets on loopback, with unknown clients, cuts and bulk data."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

import ddp_notebook.messages
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.processes import Address
from ddp_notebook.messages.ranks import Probe, Pull
from ddp_notebook.wire.bulk import PIECE_BYTES
from ddp_notebook.wire.keys import Keyring, unlock
from ddp_notebook.wire.link import DATA, Header
from tests.conftest import is_within, net_connections, wait_until
from tests.wires import LOOPBACK, numbered, proxy, wire

PEER = "local/0"


def framed(seq: int, message: Message) -> list[bytes]:
    """Return a message in the form of the wire."""
    first, *rest = message.encode()
    return [Header(DATA, seq, 0, 0).pack() + first, *rest]


@pytest.fixture(autouse=True)
def quick_retry(monkeypatch):
    """Shorten the retry of a piece that is requested before the rank is connected."""
    monkeypatch.setattr("ddp_notebook.wire.bulk._RETRY_S", 0.2)


def port(url: str) -> int:
    return int(url.rpartition(":")[2])


# ---- messages


def test_messages_of_several_threads_keep_their_order_both_ways():
    names = ["a", "b", "c", "d"]
    with wire() as w:
        rank = w.join()
        senders = [
            threading.Thread(target=lambda send=send, name=name: [send(one) for one in numbered(100, name)])
            for name in names
            for send in (rank.endpoint.send, lambda message: w.endpoint.send(message, PEER))
        ]

        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()

        for inbox in (w.inbox, rank.inbox):
            came = inbox.wait_for(400)
            for name in names:
                assert [one for one in came if isinstance(one, Pull) and one.name == name] == numbered(100, name)
            assert len(inbox) == 400


@pytest.mark.alone
def test_an_interrupted_send_delays_no_later_message():
    """The stop button interrupts a flood in a send, and the next message is the end of the cell."""

    class Interrupted:
        def send(self, _: bytes) -> None:
            raise KeyboardInterrupt

    with wire() as w:
        rank = w.join()
        rank.endpoint.send(Probe(request=0))
        w.inbox.wait_for(1)
        for number in range(1, 5):
            time.sleep(0.4)  # until the thread is idle and sleeps for a second
            wakes, rank.endpoint._wake_w = rank.endpoint._wake_w, Interrupted()  # type: ignore[assignment]
            with pytest.raises(KeyboardInterrupt):
                rank.endpoint.send(Probe(request=number))
            rank.endpoint._wake_w = wakes
            began = time.monotonic()
            rank.endpoint.send(Probe(request=number))
            w.inbox.wait_for(1 + 2 * number)
            assert is_within(time.monotonic() - began, 0.2)


def test_each_rank_gets_its_own_messages_and_is_named_in_replies():
    with wire() as w:
        first, second = w.join("local/0"), w.join("local/1")
        for rank in (first, second):
            rank.endpoint.send(Probe(request=0))
            w.inbox.wait_for(1)
            w.inbox.clear()
        w.endpoint.send(Probe(request=1), "local/0")
        for peer in ("local/0", "local/1"):
            w.endpoint.send(Probe(request=2), peer)

        assert first.inbox.wait_for(2) == [Probe(request=1), Probe(request=2)]
        assert second.inbox.wait_for(1) == [Probe(request=2)]
        second.endpoint.send(Probe(request=3))
        w.inbox.wait_for(1)
        assert w.inbox == [("local/1", 0, Probe(request=3))]


def test_what_is_sent_before_anyone_is_connected_arrives():
    with wire() as w:
        address = w.invite()
        for message in numbered(5):
            w.endpoint.send(message, PEER)

        assert w.join_at(address).inbox.wait_for(5) == numbered(5)


def test_a_message_carries_the_epoch_of_its_time():
    with wire() as w:
        rank = w.join()
        rank.endpoint.send(Probe(request=0))
        w.inbox.wait_for(1)
        w.endpoint.send(Probe(request=1), PEER)
        w.endpoint.epoch = 2
        w.endpoint.send(Probe(request=2), PEER)
        rank.inbox.wait_for(2)
        rank.endpoint.epoch = 2
        rank.endpoint.send(Probe(request=3))
        w.inbox.wait_for(2)

        assert rank.inbox == [("", 0, Probe(request=1)), ("", 2, Probe(request=2))]
        assert w.inbox == [(PEER, 0, Probe(request=0)), (PEER, 2, Probe(request=3))]


# ---- strangers


@contextlib.contextmanager
def raw_client(
    url: str, address: Address | None, identity: str = PEER
) -> Iterator[tuple[Any, Callable[[], list[str]]]]:
    """Return a ZeroMQ client without our protocol, and a function that lists the events of its connection."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.setsockopt(zmq.IDENTITY, identity.encode())
        if address is not None:
            unlock(client, address)
        monitor = client.get_monitor_socket()
        seen: list[str] = []
        client.connect(url)

        def read() -> list[str]:
            while monitor.poll(0):
                seen.append(str(zmq.Event(recv_monitor_message(monitor)["event"]).name))
            return seen

        try:
            yield client, read
        finally:
            client.disable_monitor()
            monitor.close(linger=0)


@pytest.mark.parametrize("has_key", [False, True], ids=["without a key", "with a key of its own"])
@pytest.mark.parametrize("where", ["control", "bulk"])
def test_a_stranger_is_refused_while_a_rank_works(where, has_key):
    with wire() as w:
        invited = w.invite()
        own = Keyring().invite(PEER, control=invited.control, bulk=invited.bulk)
        keys = replace(own, server_key=invited.server_key) if has_key else None
        with raw_client(getattr(invited, where), keys) as (stranger, events):
            for number in range(1, 4):
                with contextlib.suppress(zmq.Again):  # already rejected: its messages cannot be sent
                    stranger.send_multipart(framed(number, Pull(request=666, name="x")), zmq.NOBLOCK)
            rank = w.join_at(invited)
            rank.endpoint.send(Probe(request=1))

            wait_until(lambda: any(event.startswith("HANDSHAKE_FAILED") for event in events()))
            assert w.inbox.wait_for(1) == [Probe(request=1)]
            data = os.urandom(3000)
            assert w.bulk.fetch(PEER, rank.bulk.hold(data), len(data)) == data
            assert "HANDSHAKE_SUCCEEDED" not in events()
            assert w.inbox.messages() == [Probe(request=1)]
            assert not stranger.poll(0)


def test_a_rank_sends_nothing_to_another_server():
    with wire() as real, wire() as other:
        address = real.invite()
        other.endpoint.expect(PEER)
        rank = other.join_at(replace(address, control=other.endpoint.url, bulk=other.bulk.url))
        rank.endpoint.send(Probe(request=1))
        with raw_client(other.endpoint.url, address) as (_, events):
            wait_until(lambda: any(event.startswith("HANDSHAKE_FAILED") for event in events()))

        assert not other.inbox


def test_messages_of_an_unexpected_key_holder_are_dropped():
    with wire() as w:
        address = w.invite("local/0")
        with raw_client(w.endpoint.url, address, "local/9") as (unexpected, events):
            unexpected.send_multipart(framed(1, Probe(request=9)))
            wait_until(lambda: "HANDSHAKE_SUCCEEDED" in events())
            w.join("local/1").endpoint.send(Probe(request=1))

            assert w.inbox.wait_for(1) == [Probe(request=1)]
            w.endpoint.send(Probe(request=2), "local/9")
            assert not unexpected.poll(100)


def test_an_unreadable_message_is_logged_and_blocks_no_peer(caplog):
    with wire() as w:
        address = w.invite("local/0")
        with raw_client(w.endpoint.url, address) as (broken, events):
            broken.send_multipart([Header(DATA, 1, 0, 0).pack() + b"garbage"])
            broken.send_multipart([Header(DATA, 2, 0, 0).pack()])
            wait_until(lambda: "HANDSHAKE_SUCCEEDED" in events())
            w.join("local/1").endpoint.send(Probe(request=1))

            assert w.inbox.wait_for(1) == [Probe(request=1)]
        assert "a message of local/0 was lost: [b'garbage']" in caplog.messages
        assert "a message of local/0 was lost: [b'']" in caplog.messages


@pytest.mark.processes
def test_an_end_reads_messages_of_all_kinds():
    """Independent of other imports of the process, except for messages of host servers, keepers and new streams."""
    known = (
        "import ddp_notebook.wire.endpoint; from ddp_notebook.messages.encoding import _KINDS; print(*sorted(_KINDS))"
    )
    folder = Path(ddp_notebook.messages.__file__).parent
    modules = [
        path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "hosts", "keeper", "first_messages")
    ]
    every = f"import {', '.join(f'ddp_notebook.messages.{name}' for name in modules)}; {known}"
    alone, all_of_them = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for code in (known, every)
    )
    assert alone == all_of_them


def test_both_sockets_listen_on_loopback_only():
    with wire() as w:
        ports = {port(w.endpoint.url), port(w.bulk.url)}
        listening = [c for c in net_connections(psutil.Process()) if c.status == psutil.CONN_LISTEN]

        assert {c.laddr.port for c in listening} >= ports
        assert {c.laddr.ip for c in listening} == {LOOPBACK}
        for number in ports:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", number))  # loopback too, but not our address


# ---- cuts


@pytest.mark.slow
def test_messages_arrive_once_and_in_order_across_a_cut():
    messages = numbered(200)
    with wire() as w, proxy(w.endpoint.url) as between:
        rank = w.join(through=between)
        pause = threading.Event()

        def say(send) -> None:
            for message in messages:
                send(message)
                pause.wait(0.005)  # over a second, so that the cut happens in between

        speakers = [
            threading.Thread(target=say, args=[rank.endpoint.send]),
            threading.Thread(target=say, args=[lambda message: w.endpoint.send(message, PEER)]),
        ]
        for speaker in speakers:
            speaker.start()
        w.inbox.wait_for(20)
        rank.inbox.wait_for(20)
        between.swallow()
        wait_until(lambda: min(between.swallowed.values()) > 2000)
        between.cut()
        wait_until(lambda: between.refused >= 3)
        between.mend()
        for speaker in speakers:
            speaker.join()

        assert w.inbox.wait_for(200) == messages
        assert rank.inbox.wait_for(200) == messages
        assert between.swallowed["out"] > 2000
        assert between.swallowed["in"] > 2000


def test_a_rank_that_reconnects_takes_its_identity_over():
    """The old connection is still open for the notebook, which was not notified that the other half is closed."""
    with wire() as w, proxy(w.endpoint.url) as between:
        rank = w.join(through=between)
        rank.endpoint.send(Probe(request=1))
        w.inbox.wait_for(1)

        between.cut_near()
        rank.endpoint.send(Probe(request=2))
        assert w.inbox.wait_for(2, timeout_s=2.0) == [Probe(request=1), Probe(request=2)]  # before a heartbeat fails
        w.endpoint.send(Probe(request=3), PEER)
        assert rank.inbox.wait_for(1, timeout_s=2.0) == [Probe(request=3)]


@pytest.mark.slow
def test_a_silent_peer_is_noticed_and_an_idle_one_is_not_silent():
    with wire() as w, proxy(w.endpoint.url) as between:
        rank = w.join(through=between)
        rank.endpoint.send(Probe(request=1))
        w.inbox.wait_for(1)
        wait_until(lambda: w.endpoint.silent_s(PEER) > 0.3)
        wait_until(lambda: w.endpoint.silent_s(PEER) < 0.2, what="a beat of the idle rank")

        between.cut()

        wait_until(lambda: w.endpoint.silent_s(PEER) > 1.2, what="the notebook notices the silence")
        wait_until(lambda: rank.endpoint.silent_s() > 1.2, what="the rank notices it too")
        between.mend()
        wait_until(lambda: w.endpoint.silent_s(PEER) < 0.5, what="heard again")


def test_messages_of_a_revoked_peer_are_dropped():
    with wire() as w:
        address = w.invite()
        rank = w.join_at(address)
        rank.endpoint.send(Probe(request=1))
        w.inbox.wait_for(1)

        w.keyring.revoke(PEER)
        w.endpoint.forget(PEER)
        rank.endpoint.send(Probe(request=2))
        w.endpoint.send(Probe(request=3), PEER)
        other = w.join("local/1")
        other.endpoint.send(Probe(request=4))
        assert w.inbox.wait_for(2) == [Probe(request=1), Probe(request=4)]
        with raw_client(w.endpoint.url, address) as (_, events):
            wait_until(lambda: any(event.startswith("HANDSHAKE_FAILED") for event in events()))
        assert w.inbox.messages() == [Probe(request=1), Probe(request=4)] and not rank.inbox


def test_who_was_never_expected_counts_as_silent():
    with wire() as w:
        assert w.endpoint.silent_s("local/7") == float("inf")


# ---- bulk


def test_bulk_data_arrives_equal():
    with wire() as w:
        rank = w.join()
        for nbytes in (0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 20_000_000):
            data = os.urandom(nbytes)
            assert w.bulk.fetch(PEER, rank.bulk.hold(data), nbytes) == data


def test_several_threads_fetch_from_ranks_one_after_another():
    with wire() as w:
        ranks = {peer: w.join(peer) for peer in ("local/0", "local/1")}
        data = {peer: os.urandom(2_500_000) for peer in ranks}
        came = {}

        def fetch(peer: str) -> None:
            came[peer] = w.bulk.fetch(peer, ranks[peer].bulk.hold(data[peer]), len(data[peer]))

        threads = [threading.Thread(target=fetch, args=[peer]) for peer in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert came == data


@pytest.mark.slow
def test_control_messages_do_not_wait_behind_bulk_data():
    data = bytes(100_000_000)
    with wire() as w:
        rank = w.join()
        enough = threading.Event()
        equal = []

        def fetch_again_and_again() -> None:
            while not enough.is_set():
                equal.append(w.bulk.fetch(PEER, rank.bulk.hold(data), len(data)) == data)

        fetcher = threading.Thread(target=fetch_again_and_again)
        fetcher.start()
        worst_s = 0.0
        for number in range(1, 51):
            began = time.monotonic()
            rank.endpoint.send(Probe(request=number))
            w.inbox.wait_for(number)
            w.endpoint.send(Probe(request=number), PEER)
            rank.inbox.wait_for(number)
            worst_s = max(worst_s, time.monotonic() - began)
        enough.set()
        fetcher.join()

        assert equal
        assert all(equal)
        assert is_within(worst_s, 0.5)


def test_a_fetch_is_given_up_when_its_check_raises():
    with wire() as w:
        data = os.urandom(3_000_000)
        w.invite("local/0")  # no rank connects
        checks = []

        def check() -> None:
            checks.append(time.monotonic())
            if len(checks) == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            w.bulk.fetch("local/0", 1, len(data), check)

        assert checks[2] - checks[0] < 1.0, "it is asked several times a second"
        living = w.join("local/1")
        assert w.bulk.fetch("local/1", living.bulk.hold(data), len(data)) == data


def test_closing_ends_a_fetch_that_nobody_answers():
    with wire() as w:
        w.invite()  # no rank connects
        failed: list[BaseException] = []

        def fetch() -> None:
            try:
                w.bulk.fetch(PEER, 1, 3_000_000, lambda: begun.set())
            except ConnectionAbortedError as error:
                failed.append(error)

        begun = threading.Event()
        fetcher = threading.Thread(target=fetch, daemon=True)
        fetcher.start()
        assert begun.wait(5)
        w.bulk.close()

        fetcher.join(timeout=5)
        assert [str(error) for error in failed] == [f"closed while 3000000 bytes were moved from or to {PEER}"]


@pytest.mark.slow
def test_a_fetch_goes_on_after_a_cut():
    data = os.urandom(20_000_000)
    with wire() as w, proxy(w.bulk.url) as between:
        rank = w.join_at(replace(w.invite(), bulk=between.url))
        fetched = []
        transfer = rank.bulk.hold(data)
        between.swallow_after("out", 3_000_000)
        fetcher = threading.Thread(target=lambda: fetched.append(w.bulk.fetch(PEER, transfer, len(data))))
        fetcher.start()

        wait_until(lambda: between.swallowed["out"] > 0)
        between.cut()
        between.mend()

        fetcher.join(timeout=10)
        assert fetched == [data]


def test_few_pieces_are_on_their_way_at_once(monkeypatch):
    """A rank that answers or reads slowly is not flooded."""
    for kind, name in ((b"G", "fetch"), (b"T", "put")):
        with wire() as w:
            data = os.urandom(8 * PIECE_BYTES)
            w.invite()  # it does not connect

            def give_up() -> None:
                raise KeyboardInterrupt

            sent: list[list[bytes]] = []
            monkeypatch.setattr(w.bulk, "_socket", Sent(w.bulk._socket, sent))
            with pytest.raises(KeyboardInterrupt):
                if name == "fetch":
                    w.bulk.fetch(PEER, 1, len(data), give_up)
                else:
                    w.bulk.put(PEER, data, give_up)

            assert [frames[1][:1] for frames in sent] == [kind] * 4 + [b"D"]


class Sent:
    """A socket that records its messages."""

    def __init__(self, of: zmq.Socket[bytes], sent: list[list[bytes]]) -> None:
        self._of, self._sent = of, sent

    def send_multipart(self, frames: list[bytes]) -> None:
        self._sent.append(frames)
        self._of.send_multipart(frames)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def test_what_is_put_arrives_equal_and_is_taken_once():
    with wire() as w:
        rank = w.join()
        for nbytes in (1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 20_000_000):
            data = os.urandom(nbytes)
            transfer = w.bulk.put(PEER, data)
            assert rank.bulk.take(transfer) == data
            with pytest.raises(LookupError, match="dropped"):
                rank.bulk.take(transfer)


@pytest.mark.slow
def test_a_put_goes_on_after_a_cut():
    data = os.urandom(20_000_000)
    with wire() as w, proxy(w.bulk.url) as between:
        rank = w.join_at(replace(w.invite(), bulk=between.url))
        transfers: list[int] = []
        between.swallow_after("in", 3_000_000)
        putter = threading.Thread(target=lambda: transfers.append(w.bulk.put(PEER, data)))
        putter.start()

        wait_until(lambda: between.swallowed["in"] > 0)
        between.cut()
        between.mend()

        putter.join(timeout=10)
        assert rank.bulk.take(transfers[0]) == data


def test_an_aborted_put_is_dropped_and_does_not_come_back():
    data = os.urandom(3 * PIECE_BYTES)
    with wire() as w:
        rank = w.join()
        checks = []

        def check() -> None:
            checks.append(len(rank.bulk._put))
            if checks[-1]:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            w.bulk.put(PEER, data, check)
        wait_until(lambda: not rank.bulk._put)
        rank.bulk._keep(rank.bulk._last_put, 0, len(data), data[:PIECE_BYTES])  # a piece that was sent twice

        assert not rank.bulk._put
        transfer = w.bulk.put(PEER, data)
        assert rank.bulk.take(transfer) == data


def test_a_drop_during_a_transfer_is_sent_after_the_transfer():
    data = os.urandom(3 * PIECE_BYTES)
    with wire() as w:
        ranks = {peer: w.join(peer) for peer in ("local/0", "local/1")}
        transfers = {peer: rank.bulk.hold(data) for peer, rank in ranks.items()}

        def check() -> None:  # during the transfer, whose thread holds the lock
            if ranks["local/1"].bulk._held and not dropped:
                w.bulk.drop("local/1", transfers["local/1"])
                dropped.append(True)

        dropped: list[bool] = []
        # The first transfer connects both: data to a missing peer is lost.
        assert w.bulk.fetch("local/1", transfers["local/1"], len(data)) == data
        transfers["local/1"] = ranks["local/1"].bulk.hold(data)
        assert w.bulk.fetch("local/0", transfers["local/0"], len(data), check) == data
        wait_until(lambda: not ranks["local/1"].bulk._held)
        assert dropped


# ---- the end


def test_closing_leaves_no_thread_and_no_open_file():
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with wire() as w:  # descriptors that zmq opens once for the process
        w.join()
    before, threads = open_files(), set(threading.enumerate())

    with wire() as w:
        rank = w.join()
        rank.endpoint.send(Probe(request=1))
        w.inbox.wait_for(1)
        assert {thread.name for thread in set(threading.enumerate()) - threads} == {"ddp-wire", "ddp-agent"}
        assert open_files() > before

    assert set(threading.enumerate()) == threads
    assert open_files() == before


def test_a_message_is_acknowledged_soon():
    with wire() as w:
        rank = w.join()
        link = rank.endpoint._links[b""]
        waited_s = []
        for number in range(4):  # at different moments between two heartbeats
            sent = time.monotonic()
            rank.endpoint.send(Probe(request=number))
            wait_until(lambda number=number: link.sent > number)
            wait_until(lambda: not link.unacknowledged)
            waited_s.append(time.monotonic() - sent)

        assert max(waited_s) < 0.5, "the module says at the latest after 0.2 s"


def test_after_a_cut_what_was_lost_is_sent_again_once():
    with wire() as w, proxy(w.endpoint.url) as between:
        rank = w.join(through=between)
        rank.endpoint.send(Probe(request=0))
        w.inbox.wait_for(1)
        between.swallow()
        for message in numbered(100, "x" * 1000):
            rank.endpoint.send(message)
        wait_until(lambda: between.swallowed["out"] > 100_000)
        between.cut()
        for message in numbered(100, "x" * 1000):
            rank.endpoint.send(message)
        wait_until(lambda: between.refused > 0)
        before = between.passed["out"]
        between.mend()

        w.inbox.wait_for(201)
        rank.endpoint.send(Probe(request=1))
        w.inbox.wait_for(202)

        assert between.passed["out"] - before < 5 * 200_000, "each message after the gap asked for all of them again"


@pytest.mark.slow
def test_received_messages_are_not_resent_forever():
    text = "x" * 100_000
    with wire() as w, proxy(w.endpoint.url) as between:
        rank = w.join(through=between)
        ends = rank.endpoint._links[b""], w.endpoint._links[PEER.encode()]
        rank.endpoint.send(Probe(request=0))
        w.inbox.wait_for(1)
        wait_until(lambda: not ends[0].unacknowledged)
        rank.endpoint.send(Pull(request=1, name=text))
        w.endpoint.send(Pull(request=1, name=text), PEER)
        w.inbox.wait_for(2)
        rank.inbox.wait_for(1)
        between.swallow()
        wait_until(lambda: not ends[0].owes_ack and not ends[1].owes_ack, what="acknowledged, and that is lost")
        between.cut()
        between.mend()

        wait_until(lambda: not ends[0].unacknowledged and not ends[1].unacknowledged, 4.0)


def test_sending_after_the_end_writes_to_no_reused_descriptor(tmp_path):
    with wire() as w:
        rank = w.join()
        fd = rank.endpoint._wake_w.fileno()
    with open(tmp_path / "mine", "w+b") as file:
        os.dup2(file.fileno(), fd)  # the next opened file may get this number
        try:
            rank.endpoint.send(Probe(request=1))
            rank.endpoint.close()
        finally:
            os.close(fd)
        assert (tmp_path / "mine").read_bytes() == b""
