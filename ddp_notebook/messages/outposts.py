"""Messages between an outpost, which a job or a launcher started on a host, and the notebook that it connects to.

Arrived  a host server was started
Stream   bytes between the host server and its owner, see `messages.framing`
Warned   the job will end soon
ServerStopped  the host server was stopped or goes on
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_notebook.messages.encoding import Message
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived(Message):
    """The outpost has started a host server. First message of an outpost."""

    host: str  # host name of the machine
    address: str  # address at which other hosts reach it
    pid: int  # process id of the host server
    task: int  # number of the task among the tasks started together; -1 if unknown
    tasks: int  # number of these tasks; 0 if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned(Message):
    """The outpost received a signal which announces that the job's time is nearly over."""

    signal: str  # name of the signal


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStopped(Message):
    """The host server was stopped (SIGSTOP, SIGTSTP), or continues."""

    is_stopped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream(Message):
    """Bytes of the stream between a host server and its owner. Empty at the end of the stream."""

    data: bytes
