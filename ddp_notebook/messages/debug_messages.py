"""Messages for debuggers in which ranks have stopped. Their commands are `InputRequest` and `InputReply`.

notebook -> rank
----------------
HoldTimeouts     a debugger waits for a command: time limits are held until further notice
FailureQuestion  request the failure of the last cell, which `%ddp_debug` opens

rank -> notebook
----------------
TimeoutsHeld     reply to `HoldTimeouts`: operations whose time limit cannot be held
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ddp_notebook.messages.encoding import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldTimeouts(Message):
    """Hold the time limits of operations while a debugger waits for a command. `on=False` ends that."""

    on: bool
    cell: int  # cell in which the debugger has stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutsHeld(Message, shown=True):
    """Reply to `HoldTimeouts` with `on`."""

    cell: int  # as in `HoldTimeouts`
    unheld: list[str] = field(default_factory=list)  # operations whose limit is not held: "all_reduce #3 (2 s)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureQuestion(Message):
    """Request `Checked` about the failure of the last cell: "error" and "lines", both empty without a failure.

    "lines" describe a failure whose frames were not kept. Without lines a debugger can open the frames.
    """

    request: int
