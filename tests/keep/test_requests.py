"""A notebook that only looks cannot change anything, whatever it sends: raw requests to the keeper's side.

The tables below are the rule. They say for each operation whether it changes something, and are not read from the
code: an operation that is new, or not listed here, fails `test_each_operation_is_classified`.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pkgutil
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ddp_notebook import messages
from ddp_notebook.errors import SessionBrokenError
from ddp_notebook.launch.keep.channel import Channel
from ddp_notebook.launch.keep.keeper.asked import Asked
from ddp_notebook.launch.keep.keeper.journal import Journal
from ddp_notebook.launch.keep.keeper.notebooks import Notebooks
from ddp_notebook.launch.keep.keeper.queue import Queue
from ddp_notebook.launch.keep.state import Waiting
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import RunCell
from ddp_notebook.registry import doors, entries
from ddp_notebook.version import __version__
from ddp_notebook.wire.marks import CellEnd

SHOWN, CELL = (RunCell(cell=number, code="pass", execution_count=number) for number in (1, 2))
WAITING = [Waiting(told=CELL, ranks=None, timeout_s=None)]

# Requests with an answer, with parameters that they accept. They change the session:
CHANGE: dict[str, dict[str, Any]] = {
    "form": {"deadline": 1e9},
    "replace": {"ranks": [1], "deadline": 1e9},
    "place": {"stay": [0], "world_size": 1, "may_share": True},  # the first half of a resize
    "resize": {"stay": [0], "placement": None, "deadline": 1e9},
    "signal": {"ranks": [1], "numbers": [9], "value": 0},
    "put": {"rank": 0, "data": b"x"},
    "client_file": {},  # starts a controller
    "check_registered": {},
    "give_up": {"why": "so", "ranks": [0]},
    "replace_stopped_store": {},
    "sync": {"folder": "."},
    "stop": {},
}
# They only read. `fetch` takes the answer to a question that this notebook has asked.
READ: dict[str, dict[str, Any]] = {
    "look": {"ranks": [0]},
    "fetch": {"rank": 0, "transfer": 1, "nbytes": 1},
    "trouble": {},
    "status": {},
    "ping": {},
}
# Requests without an answer. `send` and `tell` carry a message to ranks, see below.
CHANGE_SILENTLY: dict[str, list[Any]] = {
    "tell": [CELL, [0, 1]],
    "hold": [True],
    "queue": [WAITING],
    "supplied": [],
    "shown": [1],
}
READ_SILENTLY: dict[str, list[Any]] = {
    "drop": [0, 1],  # gives up what `fetch` would take
    "cancel": [1],  # gives up an own request
}
QUESTIONS = {"Probe", "ClockProbe", "Check", "Pull"}  # messages to a rank that change nothing there


class Spy:
    """The cluster, the hosts and the other parts of a keeper. Notes all calls."""

    ranks = (0, 1)
    gone: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def note(*_: Any, **__: Any) -> None:
            self.calls.append(name)

        return note


class Keeper:
    """The keeper's side, with one notebook that drives and one that only looks; both are raw connections."""

    def __init__(self) -> None:
        self.spy, self.notebooks = Spy(), Notebooks()
        self.journal, self.queue = Journal("ab12", limit_bytes=1000), Queue()
        spy: Any = self.spy
        self.asked = Asked(
            *(spy, spy, self.journal, self.queue, self.notebooks, spy),
            changed=lambda: None,
            renumbered=spy.renumbered,
            end=spy.end,
        )
        self.asked.lacking = [1]
        self.journal.on_told(SHOWN, [0])  # a cell that has ended, and was not shown yet
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
        """Everything that a request can change here."""
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


def ask(channel: Channel, op: str, parameters: dict[str, Any], number: int = 1) -> tuple[bool, Any]:
    """Send a request, and return its answer."""
    channel.send("do", number, op, parameters)
    while (message := channel.receive()) is not None:
        if message[:2] == ("reply", number):
            return message[2], message[3]
    raise AssertionError(f"{op}: the keeper closed the connection")


def say(channel: Channel, *message: Any) -> None:
    """Send a request without an answer, and wait until the keeper has handled it."""
    channel.send(*message)
    assert ask(channel, "ping", {}, number=2) == (True, None)  # requests are handled in their order


def operations(prefix: str) -> set[str]:
    """The operations that the keeper knows."""
    return {name.removeprefix(prefix) for name in vars(Asked) if name.startswith(prefix)}


def all_messages() -> dict[str, type[Message]]:
    """All messages, by their names."""
    for module in pkgutil.iter_modules(messages.__path__, messages.__name__ + "."):
        importlib.import_module(module.name)
    return {one.__name__: one for one in Message.__subclasses__()}


def made(message: type[Message]) -> Message:
    """A message of this type, without meaning."""
    fields: Any = dataclasses.fields(message)
    nothing = (dataclasses.MISSING, dataclasses.MISSING)
    return message(**{one.name: 0 for one in fields if (one.default, one.default_factory) == nothing})


def test_each_operation_is_classified():
    assert operations("_do_") == {*CHANGE, *READ}
    assert operations("_on_") <= {*CHANGE_SILENTLY, *READ_SILENTLY}


@pytest.mark.parametrize("op", CHANGE)
def test_a_request_that_changes_something_is_refused(keeper, op):
    before = keeper.state()
    is_done, error = ask(keeper.looker, op, CHANGE[op])
    assert not is_done and isinstance(error, SessionBrokenError) and "drives this session" in str(error)
    assert keeper.state() == before
    is_done, answer = ask(keeper.driver, op, CHANGE[op])
    assert is_done and keeper.state() != before, f"the same request of the notebook that drives: {answer}"


@pytest.mark.parametrize("op", READ)
def test_a_request_that_only_reads_is_answered(keeper, op):
    assert ask(keeper.looker, op, READ[op]) == (True, None)
    assert set(keeper.spy.calls) <= {op}


@pytest.mark.parametrize("op", CHANGE_SILENTLY)
def test_a_request_without_an_answer_that_changes_something_is_ignored(keeper, op):
    before = keeper.state()
    say(keeper.looker, op, *CHANGE_SILENTLY[op])
    assert keeper.state() == before
    say(keeper.driver, op, *CHANGE_SILENTLY[op])
    assert keeper.state() != before, "the same request of the notebook that drives"


@pytest.mark.parametrize("op", READ_SILENTLY)
def test_a_request_without_an_answer_that_only_reads_changes_nothing(keeper, op):
    say(keeper.looker, op, *READ_SILENTLY[op])
    assert set(keeper.spy.calls) <= {op}


def test_of_all_messages_only_questions_reach_a_rank(keeper):
    types = all_messages()
    assert set(types) > QUESTIONS and len(types) > 30
    for name, message in types.items():
        keeper.spy.calls.clear()
        say(keeper.looker, "send", 0, made(message))
        assert keeper.spy.calls == ["send"] * (name in QUESTIONS), name


@pytest.mark.long
def test_a_keeper_of_real_ranks_refuses_them(notebook):
    """A connection that attaches as a notebook that looks, without a notebook's code."""
    driver = notebook("%ddp_start 2 --keep 1")
    [entry] = entries.entries()

    def attach(**more: Any) -> Channel:
        stream = doors.connect(entry.door, 5.0)
        words = {"version": __version__, "environment": sys.prefix, "about": "a raw connection", "looks": True}
        doors.say(stream, want="attach", secret=entry.about["secret"], **words, **more)
        assert doors.hear(stream) == {"ok": True}
        return Channel(stream)

    for more in ({}, {"take_over": True}):  # looking wins
        channel = attach(**more)
        for op, parameters in CHANGE.items():
            is_done, error = ask(channel, op, parameters)
            assert not is_done and isinstance(error, SessionBrokenError), op
        for op in CHANGE_SILENTLY:
            say(channel, op, *CHANGE_SILENTLY[op])
        for message in all_messages().values():
            if message.__name__ not in QUESTIONS:
                say(channel, "send", 0, made(message))
        channel.close()
    assert driver.run("%on_all_ranks rank").stdout == "[0] 0\n[1] 1\n"
    assert driver.run("%ddp_jobs").stdout.startswith("no ")
