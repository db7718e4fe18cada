"""Activity of one rank, as far as the notebook knows it: its operation, its line, its training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ddp_notebook.records.operation import Operation
from ddp_notebook.records.words import called_of, line_of
from ddp_notebook.run.groups.rpc_waits import OpenRemoteCalls

NOTHING_REMOTE = OpenRemoteCalls()
State = Literal["waiting", "running", "internal", "silent", "failed", "ended", "outside", "died"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFacts:
    """Counts of the training loop of a cell on one rank, see `rank.record.training.loaders`."""

    steps: int  # optimizer steps
    backwards: int = 0
    drawn: Mapping[str, int] = field(default_factory=dict)  # batches by loader
    passes: Mapping[str, Sequence[int]] = field(default_factory=dict)  # number of the last pass, and its batches
    ended: Sequence[str] = ()  # loaders whose last pass has ended

    @property
    def words(self) -> str:
        """Return the counts as text, such as `"2 optimizer steps with 3 batches"`."""
        batches = sum(self.drawn.values())
        parts = [
            counted(batches, "batch", "batches") if batches else "",
            counted(self.backwards, "backward pass", "backward passes") if self.backwards != self.steps else "",
        ]
        told = " and ".join(filter(None, parts))
        return counted(self.steps, "optimizer step", "optimizer steps") + (f" with {told}" if told else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreWaitView:
    """Wait of a rank at a store, see `rank.group.waiting.StoreWait`."""

    call: str  # function of the user: "store.get", "new_group"
    keys: tuple[str, ...] = ()
    what: str = ""
    is_of_session: bool = False
    since_s: float = 0.0
    limit_s: float = 0.0

    @classmethod
    def of_vitals(cls, told: Mapping[str, Any], place: str) -> StoreWaitView | None:
        """Create it from a rank's answer; None if the rank waits at no store, or for a function that is not named.

        Args:
            place: position of the main thread.
        """
        if not told:
            return None
        call = told["call"] or called_of(place).partition(" ")[0]
        return cls(**{**told, "call": call, "keys": tuple(told["keys"])}) if call else None

    def __str__(self) -> str:
        if self.keys:
            return f"in {self.call} for {_list_keys(self.keys)}"
        return f"in {self.call} for {self.what or 'other ranks'}"


def _list_keys(keys: Sequence[str]) -> str:
    return f"key{'s' * (len(keys) > 1)} {' and '.join(map(repr, keys))}"


def counted(number: int, one: str, many: str) -> str:
    """Return a number with its noun: `"1 batch"`, `"2 batches"`."""
    return f"{number} {one if number == 1 else many}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """Activity of one rank, as far as the notebook knows it."""

    rank: int
    # in an operation, in code, in code of this package, unresponsive, failed, done with the cell, not in the cell, dead
    state: State
    place: str = ""  # "cell line 7, in all_reduce"; for a dead rank the cause of death
    operation: Operation | None = None  # operation in which it waits
    host: str = ""  # its host, if the ranks are on several hosts
    thread: str = ""  # name of another thread if that one waits in `operation`; `state` is that of the main thread
    runs: Literal["cell", "script"] = "cell"
    remote: OpenRemoteCalls = NOTHING_REMOTE  # RPC calls that it waits for and serves
    child: str = ""  # command of the child process that the main thread waits for
    child_s: float = 0.0  # duration of that wait
    store: StoreWaitView | None = None  # wait of the main thread at a store
    counts: Mapping[str, Any] = field(default_factory=dict)  # numbers of its operations, by name of the group in torch
    background: str = ""  # code that may start operations although the rank has ended the cell
    is_heard: bool = True  # False: nothing is known about its code outside the cell
    may_serve: bool = False  # other ranks may call its functions by RPC
    loop: LoopFacts | None = None  # training loop of the cell

    @property
    def since_s(self) -> float:
        if self.operation is not None:
            return self.operation.since_s
        return self.remote.since_s or (0.0 if self.store is None else self.store.since_s)

    @property
    def doing(self) -> str:
        """Return its activity as text that follows `"rank 3: "`."""
        match self.state:
            case "waiting":
                assert self.operation is not None
                operation = self.operation
                size = operation.size if operation.shapes else ""
                inside = ", ".join(filter(None, [operation.meaning, operation.what, size, line_of(self.place)]))
                return f"waiting in {operation}" + (f" ({inside})" if inside else "")
            case "running" if self.store is not None:
                return f"waiting {self.store}" + (f" ({line_of(self.place)})" if self.place else "")
            case "running" | "internal":
                beside = f", and {self.thread} is waiting in {self.operation}" if self.thread else ""
                if self.state == "internal":
                    return f"{self.place}{beside}"
                return f"at {self.place or f'no line of the {self.runs}'}{beside}"
            case "silent":
                return f"no answer: {self.place}" if self.place else "no answer"
            case "failed":
                return f"has failed, and formats its traceback: {self.place}"
            case "ended":
                on = f"{self.background} goes on" if self.background else ""
                return "; ".join(filter(None, [f"ended the {self.runs}", self.remote.serving or on]))
            case "outside":
                return "not in this cell" if self.runs == "cell" else "not seen from here"
            case "died":
                return f"gone: {self.place}"


Views = Mapping[int, RankView]
