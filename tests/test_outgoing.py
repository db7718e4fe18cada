"""Displays and widget messages of a rank under back-pressure of the notebook. These tests need no ranks."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_notebook.launch.host.pipes import TextBuffer
from ddp_notebook.launch.receipts import Receipts
from ddp_notebook.messages import framing
from ddp_notebook.messages.ranks import Comm, Display, Probe, Taken
from ddp_notebook.rank.cell.outgoing import Outgoing
from ddp_notebook.rank.cell.widget_comms import RankComms
from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.message_handlers import Pump
from tests.conftest import wait_until

ALL = 1 << 40


class Sent(list[Any]):
    """The messages that a rank has sent, and its display marks."""

    def __init__(self, world_size: int = 16) -> None:
        super().__init__()
        self.marks: list[int] = []
        self.outgoing = Outgoing(self.append, self.marks.append, lambda: world_size)
        manager = SimpleNamespace(comm_msg=None, comm_close=None)
        self.comms = RankComms(manager, self.outgoing.send)

    def open(self, comm_id: str = "c", target: str = "jupyter.widget") -> None:
        content = {"comm_id": comm_id, "target_name": target, "data": {"state": {}}}
        assert self.comms.on_message("comm_open", content, {}, (), 1, {})

    def say(self, data: dict[str, Any], comm_id: str = "c", buffers: tuple[bytes, ...] = (), **more: Any) -> None:
        assert self.comms.on_message("comm_msg", {"comm_id": comm_id, "data": data}, {}, buffers, None, more)

    def set(self, comm_id: str = "c", **state: Any) -> None:
        self.say({"method": "update", "state": state, "buffer_paths": []}, comm_id)

    def values(self, name: str) -> list[Any]:
        return [
            one.content["data"]["state"][name]
            for one in self
            if isinstance(one, Comm) and name in one.content["data"].get("state", ())
        ]

    def take(self, kind: type = Comm, until: int = ALL) -> None:
        self.outgoing.on_taken(Taken(kind=kind.__name__, number=until))


def display(text: str, handle: str | None = None) -> tuple[Display, int, Any]:
    transient = {} if handle is None else {"display_id": handle}
    content = {"data": {"text/plain": text}, "transient": transient}
    msg_type = "display_data" if handle is None else "update_display_data"
    return Display(cell=1, msg_type=msg_type, content=content, place=0), len(text), handle


@pytest.fixture
def sent():
    return Sent()


@pytest.mark.slow
def test_only_the_newest_value_of_each_widget_key_is_queued(sent):
    sent.open()
    for n in range(10_000):
        sent.set(value=n)
        sent.set(**{f"other{n % 2}": n})
    sent.outgoing.flush()

    assert sent.values("value")[-1] == 9999
    assert (sent.values("other0")[-1], sent.values("other1")[-1]) == (9998, 9999)
    assert len(sent) < 200
    assert [one.number for one in sent] == list(range(1, len(sent) + 1))


def test_the_newest_value_is_sent_without_a_further_one(sent):
    sent.open()
    for n in range(3):
        sent.set(value=n)
    wait_until(lambda: sent.values("value") == [0, 2])


def test_custom_messages_and_buffers_are_all_sent_in_order(sent):
    sent.open()

    def talk() -> None:
        for n in range(50):
            sent.set(value=n)
            sent.set(value=n + 0.5)
            sent.say({"method": "custom", "content": n})
            sent.say({"method": "update", "state": {"png": None}, "buffer_paths": [["png"]]}, buffers=(b"%d" % n,))

    thread = threading.Thread(target=talk)
    thread.start()
    while thread.is_alive():
        sent.take()
        thread.join(0.001)
    said = [one.content["data"] for one in sent[1:]]

    assert [one["content"] for one in said if one["method"] == "custom"] == list(range(50))
    assert len([one for one in sent if one.buffers]) == 50
    last = -1.0
    for one in said:
        if one["method"] == "custom":
            assert last == one["content"] + 0.5, "a custom message comes after the value that was set before it"
        elif "value" in one["state"]:
            last = one["state"]["value"]


@pytest.mark.parametrize(
    "data",
    [
        {"method": "update", "state": {"msg_id": "x"}, "buffer_paths": []},
        {"method": "echo_update", "state": {"value": 1}, "buffer_paths": []},
        {"method": "update", "state": {"value": 1}, "buffer_paths": [], "more": 1},
        {"state": {"value": 1}},
        {"method": "update", "state": {"value": None}, "buffer_paths": [["value"]]},
    ],
)
def test_what_is_not_just_a_value_is_sent_each_time(sent, data):
    sent.open()
    for _ in range(5):
        sent.say(data)
    assert len(sent) == 6


def test_messages_of_a_comm_that_is_no_widget_are_sent_each_time(sent):
    sent.open(target="flood")
    for n in range(5):
        sent.set(value=n)
    assert sent.values("value") == [0, 1, 2, 3, 4]


def test_answers_to_the_browser_are_sent_each_time(sent):
    sent.open()
    for n in range(4):
        sent.say({"method": "update", "state": {"value": n}, "buffer_paths": []}, msg_id="of the browser")
    assert sent.values("value") == [0, 1, 2, 3]


def test_a_display_waits_until_earlier_ones_were_shown(sent):
    def flood() -> None:
        for n in range(1000):
            sent.outgoing.send(*display(f"{n}"))

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    time.sleep(0.1)
    ahead = len(sent)
    assert 4 < ahead <= 16, "it waits, with a few sent ahead"
    taken = 0
    while thread.is_alive():
        taken += 4
        sent.take(Display, taken)
        time.sleep(0.0001)
        assert len(sent) - taken <= 16
    assert [one.content["data"]["text/plain"] for one in sent] == [str(n) for n in range(1000)]
    assert sent.marks == [one.place for one in sent] == list(range(1, 1001))


def test_fewer_large_displays_are_sent_before_an_acknowledgement(sent):
    def flood() -> None:
        for _ in range(10):
            sent.outgoing.send(*display("x" * 1_200_000))

    threading.Thread(target=flood, daemon=True).start()
    wait_until(lambda: len(sent) == 4)
    time.sleep(0.05)
    assert len(sent) == 4
    sent.take(Display, 4)
    wait_until(lambda: len(sent) == 8)
    while len(sent) < 10:
        sent.take(Display)
        time.sleep(0.001)


def test_the_last_display_update_needs_no_acknowledgement(sent):
    for n in range(16):
        sent.outgoing.send(*display(f"plain {n}")) if n < 8 else None
    for n in range(1000):
        sent.outgoing.send(*display(f"update {n}", "handle"))
    assert len(sent) == 8, "the limit is reached"
    sent.outgoing.flush()
    assert sent[-1].content["data"]["text/plain"] == "update 999" and len(sent) == 9
    assert sent.marks == list(range(1, 10))


def test_an_interrupt_ends_the_wait_and_loses_no_value(sent):
    """An exception in the middle of the wait stands for the KeyboardInterrupt of the main thread."""
    sent.open()
    for _ in range(7):
        sent.say({"method": "custom"})
    sent.set(value=1)

    class Stop(Exception):
        pass

    def stop(_: float) -> None:
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddp_notebook.rank.cell.outgoing.time.sleep", stop)
        with pytest.raises(Stop):
            sent.say({"method": "custom"})
    sent.outgoing.flush()
    assert sent.values("value") == [1]


def test_a_display_without_a_written_mark_delays_no_other():
    sent = Sent()

    def broken(_: int) -> None:
        raise OSError(9, "Bad file descriptor")

    sent.outgoing = Outgoing(sent.append, broken, lambda: 16)
    for n in range(100):
        sent.outgoing.send(*display(f"{n}"))
    assert len(sent) == 100


def test_every_fourth_message_and_large_ones_are_acknowledged():
    told: list[Any] = []
    receipts = Receipts(lambda rank, taken: told.append((rank, taken.kind, taken.number)))
    for n in range(1, 9):
        receipts.took(0, display(f"{n}")[0].__class__(cell=1, msg_type="display_data", content={}, place=n))
        receipts.took(1, Comm(msg_type="comm_msg", content={}, number=n))
    assert told == [(0, "Display", 4), (1, "Comm", 4), (0, "Display", 8), (1, "Comm", 8)]
    receipts.took(0, Comm(msg_type="comm_msg", content={}, buffers=["x" * 100_000], number=1))
    assert told[-1] == (0, "Comm", 1)


def test_displays_are_acknowledged_when_taken_or_after_leave():
    took: list[int] = []
    run = CellRun(1, [0], lambda _: None)
    run.took = lambda _, one: took.append(one.place)
    displays = [Display(cell=1, msg_type="display_data", content={"data": {}}, place=n) for n in range(5)]
    for one in displays[:3]:
        run.on_display(0, one)
    assert took == []
    assert run.next_item(0.0) is not None and took == [0]
    run.leave()
    assert took == [0, 1, 2]
    run.on_display(0, displays[3])
    assert took == [0, 1, 2, 3]


def test_the_pump_keeps_the_order_after_a_failed_handler(caplog):
    seen: list[int] = []

    def handle(_: int, message: Probe) -> None:
        if message.request == 3:
            raise ValueError("bad")
        seen.append(message.request)

    pump = Pump({Probe: handle})
    for n in range(6):
        pump.handlers[Probe](0, Probe(request=n))
    pump.settle()
    assert seen == [0, 1, 2, 4, 5] and "was lost" in caplog.text
    pump.close()


def test_text_keeps_its_order_and_small_pieces_are_joined():
    texts = TextBuffer()
    for n in range(3000):
        texts.add(n % 2, 1 + n // 1000 % 2, b"%d " % n)
    assert texts.nbytes == sum(len(b"%d " % n) for n in range(3000))
    first = texts.pack(most_bytes=1)
    frames: list[Any] = list(framing.Unpacker().feed(first + texts.pack()))
    assert not texts and texts.nbytes == 0
    assert len(frames) == 6
    for process in (0, 1):
        own = b"".join(data for of, _, data in frames if of == process)
        assert own.split() == [b"%d" % n for n in range(process, 3000, 2)]
        assert [fd for of, fd, _ in frames if of == process] == [1, 2, 1]
