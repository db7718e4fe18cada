"""A notebook that only looks cannot change the session: raw requests to the keeper.

The tables below are the specification. They list for each message whether it changes the session, and are not derived
from the code. A new or unlisted message fails `test_each_message_is_classified`.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_notebook import messages
from ddp_notebook.errors import SessionBrokenError
from ddp_notebook.launch.keep.channel import Channel
from ddp_notebook.launch.keep.exception_data import error_of
from ddp_notebook.launch.keep.keeper.journal import Journal
from ddp_notebook.launch.keep.keeper.notebooks import Notebooks
from ddp_notebook.launch.keep.keeper.queue import Queue
from ddp_notebook.launch.keep.keeper.request_handler import RequestHandler
from ddp_notebook.launch.placement import Placement
from ddp_notebook.launch.sync.sync import Synced
from ddp_notebook.messages.encoding import Message, to_json
from ddp_notebook.messages.first_messages import Admitted, AttachSession
from ddp_notebook.messages.framing import Numbered
from ddp_notebook.messages.hosts import DoneReply, PingRequest
from ddp_notebook.messages.keeper import (
    CancelRequest,
    CellShown,
    ClientFileRequest,
    DropTransfer,
    FailureReply,
    FetchRequest,
    FormRequest,
    GiveUpRequest,
    HoldText,
    LackNothing,
    LookAtRanksRequest,
    PlaceRequest,
    PutRequest,
    RegisteredRequest,
    ReplaceRequest,
    ReplaceStoreRequest,
    ResizeRequest,
    SendToRank,
    SignalRanksRequest,
    StatusRequest,
    StopRequest,
    SyncRequest,
    TellRanks,
    TroubleRequest,
    Waiting,
    WaitingJobs,
)
from ddp_notebook.messages.ranks import RunCell
from ddp_notebook.registry import entries, unix_sockets
from ddp_notebook.version import __version__
from ddp_notebook.wire.marks import CellEnd

SHOWN, CELL = (RunCell(cell=number, code="pass", execution_count=number) for number in (1, 2))
PLACEMENT = Placement(
    backend="gloo",
    hosts=("here",),
    machines=("here",),
    devices=("cpu",),
    names=("CPU",),
    cuda_visible_devices=None,
    threads=1,
)
WAITING = [Waiting(told=CELL, ranks=None, timeout_s=None)]

# Requests with a reply, with fields that they accept. They change the session:
CHANGE: list[Message] = [
    FormRequest(deadline=1e9),
    ReplaceRequest(ranks=[1], deadline=1e9),
    PlaceRequest(stay=[0], world_size=1, may_share=True),  # the first half of a resize
    ResizeRequest(stay=[0], placement=to_json(PLACEMENT), deadline=1e9),
    SignalRanksRequest(ranks=[1], numbers=[9], value=0),
    PutRequest(rank=0, data=b"x"),
    ClientFileRequest(),  # starts a controller
    RegisteredRequest(),
    GiveUpRequest(why="so", ranks=[0]),
    ReplaceStoreRequest(),
    SyncRequest(folder=".", overwrite=False, also=[], is_large=False),
    StopRequest(),
]
# Requests that only read. A `FetchRequest` fetches the answer to an earlier request of the same notebook.
READ: list[tuple[Message, set[str]]] = [  # and the methods of the cluster and the hosts that they call
    (LookAtRanksRequest(ranks=[0]), {"inspect"}),
    (FetchRequest(rank=0, transfer=1, nbytes=1), {"fetch"}),
    (TroubleRequest(), {"trouble"}),
    (StatusRequest(), {"status"}),
    (PingRequest(), set()),
]
# Messages without a reply. `SendToRank` carries a message to a rank, see below.
CHANGE_SILENTLY: list[Message] = [
    TellRanks(message=CELL, ranks=[0, 1]),
    HoldText(hold=True),
    WaitingJobs(waiting=WAITING),
    LackNothing(),
    CellShown(cell=1),
]
READ_SILENTLY: list[tuple[Message, set[str]]] = [
    (DropTransfer(rank=0, transfer=1), {"drop"}),  # abandons the answer for a `FetchRequest`
    (CancelRequest(number=1), set()),  # cancels a request of the same notebook
]
QUESTIONS = {"Probe", "ClockProbe", "Check", "Pull"}  # messages to a rank that change nothing there


ANSWERS = {
    **{name: [] for name in ("form", "replace", "resize")},
    **dict.fromkeys(("trouble", "status"), ""),
    "place": PLACEMENT,
    "inspect": {},
    "fetch": bytearray(1),
    "put": 1,
    "signal": True,
    "client_file": ("", 1),
    "sync": Synced(folder=Path(), folders={}, sent={}, lines=()),
}


class Spy:
    """Replaces the cluster, the hosts and the other parts of a keeper. Records all calls."""

    ranks = (0, 1)
    gone: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def note(*_: Any, **__: Any) -> Any:
            self.calls.append(name)
            return ANSWERS.get(name)

        return note


class Keeper:
    """The keeper, with raw connections of a driver notebook and of one that only looks."""

    def __init__(self) -> None:
        self.spy, self.notebooks = Spy(), Notebooks()
        self.journal, self.queue = Journal("ab12", limit_bytes=1000), Queue()
        spy: Any = self.spy
        self.asked = RequestHandler(
            *(spy, spy, self.journal, self.queue, self.notebooks, spy),
            changed=lambda: None,
            renumbered=spy.renumbered,
            end=spy.end,
        )
        self.asked.lacking = [1]
        self.journal.on_told(SHOWN, [0])  # a finished cell that was not shown yet
        self.journal.on_text(0, 1, CellEnd(1, 0.5).encode("ab12"))
        self.driver, self.looker = self._connect(drives=True), self._connect(drives=False)

    def _connect(self, *, drives: bool) -> Channel:
        keepers, notebooks = socket.socketpair()
        notebook = self.notebooks.add(keepers, os.getpid(), "a notebook")
        if drives:
            self.notebooks.give(notebook, take_over=False)
        threading.Thread(target=self.asked.serve, args=(notebook,)).start()
        return Channel(notebooks)

    def state(self) -> list[Any]:
        """Return all state that a request can change."""
        return [list(self.spy.calls), list(self.journal.cells), list(self.queue.waiting), list(self.asked.lacking)]

    def close(self) -> None:
        for channel in (self.driver, self.looker):
            channel.close()
        self.notebooks.close()


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper()
    yield keeper
    keeper.close()


def ask(channel: Channel, request: Message, number: int = 1) -> Message:
    """Send a request, and return its reply."""
    channel.send(request, number)
    while (came := channel.receive()) is not None:
        if isinstance(came, Numbered) and came.number == number:
            return came.message
    raise AssertionError(f"{request}: the keeper closed the connection")


def is_refused(reply: Message) -> bool:
    """Return whether the keeper refused a request because another notebook drives."""
    error = error_of(reply.failure) if isinstance(reply, FailureReply) else None
    return isinstance(error, SessionBrokenError) and "drives this session" in str(error)


def say(channel: Channel, message: Message) -> None:
    """Send a message without a reply, and wait until the keeper has handled it."""
    channel.send(message)
    assert ask(channel, PingRequest(), number=2) == DoneReply()  # messages are handled in their order


def name_of(message: Message) -> str:
    return type(message).__name__


def all_messages() -> dict[str, type[Message]]:
    """Return all messages between ranks and their notebook, by name."""
    names = ("faults", "files", "ranks", "resize_messages", "script_abort", "survive_messages")
    modules = [importlib.import_module(f"{messages.__name__}.{name}") for name in names]
    return {one.__name__: one for one in Message.__subclasses__() if sys.modules[one.__module__] in modules}


def made(message: type[Message]) -> Message:
    """Return a message of this type with empty fields."""
    fields: Any = dataclasses.fields(message)
    nothing = (dataclasses.MISSING, dataclasses.MISSING)
    needed = {one.name: one.type for one in fields if (one.default, one.default_factory) == nothing}
    return message(**{name: b"" if kind == "bytes" else 0 for name, kind in needed.items()})


def test_each_message_is_classified(keeper):
    with_reply = [*map(type, CHANGE), *(type(message) for message, _ in READ)]
    assert set(keeper.asked._requests) == set(with_reply)
    silent = [*map(type, CHANGE_SILENTLY), *(type(message) for message, _ in READ_SILENTLY), SendToRank]
    assert {*keeper.asked._notes, *keeper.asked._of_driver} == set(silent)


@pytest.mark.parametrize("request_", CHANGE, ids=name_of)
def test_a_request_that_changes_something_is_refused(keeper, request_):
    before = keeper.state()
    assert is_refused(ask(keeper.looker, request_))
    assert keeper.state() == before
    reply = ask(keeper.driver, request_)
    assert not isinstance(reply, FailureReply), reply
    assert keeper.state() != before, "the same request of the notebook that drives"


@pytest.mark.parametrize(("request_", "calls"), READ, ids=[name_of(message) for message, _ in READ])
def test_a_request_that_only_reads_is_answered(keeper, request_, calls):
    assert not isinstance(ask(keeper.looker, request_), FailureReply)
    assert set(keeper.spy.calls) == calls


@pytest.mark.parametrize("message", CHANGE_SILENTLY, ids=name_of)
def test_a_message_without_reply_that_changes_state_is_ignored(keeper, message):
    before = keeper.state()
    say(keeper.looker, message)
    assert keeper.state() == before
    say(keeper.driver, message)
    assert keeper.state() != before, "the same message of the notebook that drives"


@pytest.mark.parametrize(("message", "calls"), READ_SILENTLY, ids=[name_of(message) for message, _ in READ_SILENTLY])
def test_a_message_without_reply_that_only_reads_changes_nothing(keeper, message, calls):
    say(keeper.looker, message)
    assert set(keeper.spy.calls) <= calls


def test_of_all_messages_only_questions_reach_a_rank(keeper):
    types = all_messages()
    assert set(types) > QUESTIONS and len(types) > 30
    for name, message in types.items():
        keeper.spy.calls.clear()
        say(keeper.looker, SendToRank(rank=0, message=made(message)))
        assert keeper.spy.calls == ["send"] * (name in QUESTIONS), name


@pytest.mark.long
def test_a_keeper_of_real_ranks_refuses_them(notebook):
    """A raw connection attaches like a notebook that only looks, without the code of a notebook."""
    driver = notebook("%ddp_start 2 --keep 1")
    [entry] = entries.entries()

    def attach(**more: Any) -> Channel:
        stream = unix_sockets.connect(entry.door, 5.0)
        words: dict[str, Any] = {
            "version": __version__,
            "environment": sys.prefix,
            "about": "a raw connection",
            "looks": True,
        }
        unix_sockets.send_line(stream, AttachSession(secret=entry.about["secret"], **words, **more))
        assert unix_sockets.hear(stream, Admitted) == Admitted()
        return Channel(stream)

    for more in ({}, {"take_over": True}):  # looking has priority
        channel = attach(**more)
        for request in CHANGE:
            assert is_refused(ask(channel, request)), request
        for one in CHANGE_SILENTLY:
            say(channel, one)
        for message in all_messages().values():
            if message.__name__ not in QUESTIONS:
                say(channel, SendToRank(rank=0, message=made(message)))
        channel.close()
    assert driver.run("%on_all_ranks rank").stdout == "[0] 0\n[1] 1\n"
    assert driver.run("%ddp_jobs").stdout.startswith("no ")
