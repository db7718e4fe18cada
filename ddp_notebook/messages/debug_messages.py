"""Messages for debuggers in which ranks have stopped. Their commands are `InputRequest` and `InputReply`.

notebook -> rank
----------------
HoldTimeouts     a debugger waits for a command: time limits are held until further notice
FailureQuestion  request the failure of the last cell, which `%ddp_debug` opens
UseAdapter       start or stop debugpy for the front end's debugger
AdapterRequest   one message of the debug adapter protocol, to debugpy

rank -> notebook
----------------
TimeoutsHeld     reply to `HoldTimeouts`: operations whose time limit cannot be held
AdapterReady     reply to `UseAdapter` with `on`
AdapterMessage   one message of the debug adapter protocol, from debugpy: a response or an event
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


@dataclass(frozen=True, slots=True, kw_only=True)
class UseAdapter(Message):
    """Let debugpy follow the cells from now on, or no longer. It starts between two cells, and ends at once."""

    on: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReady(Message, shown=True):
    """Reply to `UseAdapter` with `on`."""

    error: str = ""  # why debugpy cannot start; "": it accepts requests


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRequest(Message):
    """One request of the debug adapter protocol.

    Source: https://microsoft.github.io/debug-adapter-protocol/specification
    """

    data: bytes  # JSON without a header
    cell_file: str = ""  # file of a cell in the request: it need not exist on the rank's host


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterMessage(Message):
    """One response or event of the debug adapter protocol."""

    data: bytes  # JSON without a header
