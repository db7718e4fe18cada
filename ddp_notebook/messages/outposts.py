"""Messages between an outpost, which a job or a launcher has started on a host, and the notebook that it calls.

Arrived  a host server has begun
Stream   bytes between that and its owner, see `messages.framing`
Warned   its job is to end
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_notebook.messages.encoding import Message
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived(Message):
    """A host server was started. The first message of an outpost."""

    host: str  # the name that the machine has for itself
    address: str  # by which others reach it
    pid: int  # of the host server
    task: int  # number among the tasks that were started together; -1: nobody has told
    tasks: int  # how many these are; 0: nobody has told


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned(Message):
    """A signal has come to a task by which its job says that its time is nearly over."""

    signal: str  # its name


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream(Message):
    """Bytes of the stream between a host server and its owner; none at its end."""

    data: bytes
