"""Messages between a host server and its owner.

A reply is on its way as soon as it is due; a request that takes a while does not hold up the others.

    request              reply
    FactsRequest         FactsReply      cores, GPUs, versions, backends, how ranks are started
    PingRequest          DoneReply
    TrialRequest         DoneReply       a process can be started here, which was tried
    StartRequest         StartReply      the identity of the new process; for a store also its addresses
    SignalRequest        DoneReply       once the signals are delivered, in this order
    LookRequest          LookReply       whether processes that do not answer are stopped, and their stacks
    HoldTextRequest      DoneReply       text stays in the ranks' pipes while hold is true
    EndRequest           EndReply        once the processes and all below them are gone
    SiteRequest          SiteReply       user, memory and folder, for a comparison of hosts
    ClockRequest         ClockTimeReply  the time there, and whether a new server would have another environment
    ListenRequest        ListenReply     listen where ranks will, for other hosts that try to connect
    ConnectRequest       ConnectReply    try to connect to other hosts
    StopListeningRequest DoneReply
    FolderRequest        FolderReply     where the files of the notebook's folder are to be
    MarkRequest          DoneReply       make an empty file
    NamesRequest         NamesReply      which of these names a folder has
    StatRequest          StatReply       what has the names of these files
    CompareRequest       CompareReply    whether files have these digests
    WriteRequest         DoneReply       parts of files
    DiscardRequest       DoneReply       remove marks, and files that are not whole

Any of them may be answered by an `ErrorReply`, and those about files by a `FileErrorReply`.

    event                of the host server
    ProcessEnded         after the last text of the process
    ProcessStopped       a process was stopped, or goes on
    Notice               a line for the user

Cells go to the inboxes of ranks, and text comes from them, as frames of their own, see `messages.framing`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.processes import Start
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

_HELD = "held: "


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneReply(Message):
    """It is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply(Message):
    """The host server could not do it."""

    error: str


# ---- processes


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsRequest(Message):
    """Answered when the server has imported torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsReply(Message):
    facts: dict[str, Any]  # see `launch.host.preload`


@dataclass(frozen=True, slots=True, kw_only=True)
class PingRequest(Message):
    """Answered at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest(Message):
    """Try what the start of these ranks needs."""

    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest(Message):
    """Start a rank, the store or the controller."""

    process: int
    start: Start


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReply(Message):
    pid: int
    started: float  # with the pid the identity of the process
    port: int = 0  # TCP port of the store for the user's programs
    store_at: str = ""  # address of the session's store


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRequest(Message):
    processes: list[int]
    signals: list[int]
    value: int = 0  # goes with a real-time signal


@dataclass(frozen=True, slots=True, kw_only=True)
class LookRequest(Message):
    processes: list[int]


class Seen(NamedTuple):
    """What was seen of one process."""

    is_stopped: bool
    stack: str = ""  # output of `faulthandler`, after a line for `held` if there is one

    @classmethod
    def of(cls, is_stopped: bool, held: str) -> Seen:
        """Return this without a stack.

        Args:
            held: the debugger that holds the process; "" if there is none.
        """
        return cls(is_stopped, f"{_HELD}{held}\n" if held else "")

    @property
    def held(self) -> str:
        """Describe the debugger that holds it, see `processes.held`; "" if there is none."""
        first, _, _ = self.stack.partition("\n")
        return first.removeprefix(_HELD) if first.startswith(_HELD) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookReply(Message):
    seen: dict[int, Seen]  # by process


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldTextRequest(Message):
    hold: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRequest(Message):
    processes: list[int]
    grace_s: float
    orphans: bool = False  # also descendants whose rank is not known any more


@dataclass(frozen=True, slots=True, kw_only=True)
class EndReply(Message):
    left: list[int]  # process ids of what could not be ended


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnded(Message):
    process: int
    status: int  # exit status; negative: signal
    why: str = ""  # a clause about a limit or the OOM killer


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStopped(Message):
    process: int
    is_stopped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Message):
    text: str


# ---- comparing hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRequest(Message):
    directory: str  # the notebook's
    marker: str  # a file that the notebook has made there; "": it could not


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteReply(Message):
    user: str
    cuda: str
    free_mib: int
    has_directory: bool
    has_marker: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockRequest(Message):
    """Answered at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockTimeReply(Message):
    time_ns: int
    is_outdated: bool  # files that shape the environment have changed since the server began


class ListenPlace(NamedTuple):
    """Where a host listens."""

    address: str
    first_port: int
    stop_port: int
    word: str  # that it sends to a host that connects


class ConnectTarget(NamedTuple):
    """Another host."""

    address: str
    port: int
    word: str  # that it sends


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenRequest(Message):
    places: list[ListenPlace]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenReply(Message):
    ports: list[int]  # by place; 0: this host cannot listen there


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectRequest(Message):
    targets: list[ConnectTarget]
    within_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectReply(Message):
    tried: list[str]  # by target: what went wrong; "": nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class StopListeningRequest(Message):
    """Close the ports of `ListenRequest`."""


# ---- files


class FoundFile(NamedTuple):
    """What has a file's name on the host."""

    kind: str  # "file", "link", "other", or "behind": a folder on the way to it is a link
    size: int  # bytes
    mtime_ns: int
    mode: int  # permissions
    link: str = ""  # where a link leads


class FilePart(NamedTuple):
    """A part of a file, or a link."""

    path: str
    nbytes: int = 0
    is_first: bool = True
    end: tuple[int, int] | None = None  # permissions and time of a file that is whole with this part
    link: str = ""  # where it leads, if it is one
    discard: bool = False  # what was sent of the file


class FileDigest(NamedTuple):
    """A file to compare."""

    path: str
    digest: str
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileErrorReply(Message):
    """The system refused something."""

    path: str
    number: int  # errno
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderRequest(Message):
    path: str  # of the notebook's folder
    marker: str  # a file in it


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderReply(Message):
    folder: str
    is_shared: bool = False  # it is the notebook's own, since it has the marker
    is_of: str | None = None  # it holds files of this other folder, so it cannot be used; "": of an unknown one


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkRequest(Message):
    folder: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesRequest(Message):
    folder: str
    names: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesReply(Message):
    names: list[str]  # those that are there


@dataclass(frozen=True, slots=True, kw_only=True)
class StatRequest(Message):
    folder: str
    paths: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatReply(Message):
    found: list[FoundFile | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest(Message):
    """A file with the same content gets the time that is given here."""

    folder: str
    files: list[FileDigest]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareReply(Message):
    same: list[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest(Message):
    """A file is written under another name and renamed when it is whole."""

    folder: str
    parts: list[FilePart]
    data: bytes = field(repr=False)  # their bytes follow each other


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardRequest(Message):
    """Remove marks, and files that are not whole."""
