"""Messages between a host server and its owner.

Each reply is sent as soon as it is ready. A slow request does not delay the others.

    request              reply
    FactsRequest         FactsReply      cores, GPUs, versions, backends, start method of ranks
    PingRequest          DoneReply
    TrialRequest         DoneReply       this host can start a process (it was tried)
    StartRequest         StartReply      identity of the new process; for a store also its addresses
    SignalRequest        DoneReply       the signals were delivered, in this order
    LookRequest          LookReply       stopped state and stacks of processes that do not answer
    HoldTextRequest      DoneReply       text stays in the pipes of the ranks while hold is true
    EndRequest           EndReply        the processes and their descendants have ended
    SiteRequest          SiteReply       user, memory and folder, to compare hosts
    ClockRequest         ClockTimeReply  time of the host, and whether the server's environment is outdated
    ListenRequest        ListenReply     listen on the addresses of ranks, for connection tests by other hosts
    ConnectRequest       ConnectReply    try to connect to other hosts
    StopListeningRequest DoneReply
    FolderRequest        FolderReply     target folder for the files of the notebook's folder
    MarkRequest          DoneReply       create an empty marker file
    NamesRequest         NamesReply      names that exist in a folder
    StatRequest          StatReply       type, size, time and mode of files
    CompareRequest       CompareReply    whether files have the given digests
    WriteRequest         DoneReply       write parts of files
    DiscardRequest       DoneReply       remove markers and incomplete files

The reply to any request may be an `ErrorReply`, and to a request about files also a `FileErrorReply`.

    event                sent by the host server
    ProcessEnded         after the last text of the process
    ProcessStopped       a process was stopped or continued
    Notice               a line for the user

Input for ranks and their text have their own kinds of frames, see `messages.framing`.
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
    """The request succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply(Message):
    """The request failed on the host server."""

    error: str


# ---- processes


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsRequest(Message):
    """Request the facts of the host. The reply is sent when the server has imported torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsReply(Message):
    facts: dict[str, Any]  # see `launch.host.preload`


@dataclass(frozen=True, slots=True, kw_only=True)
class PingRequest(Message):
    """Check that the server answers. The reply is immediate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest(Message):
    """Test whether this many ranks can be started."""

    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest(Message):
    """Start a rank, the store or the controller."""

    process: int
    start: Start


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReply(Message):
    pid: int
    started: float  # with the pid, identifies the process
    port: int = 0  # TCP port of the store for user programs
    store_at: str = ""  # address of the session's store


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRequest(Message):
    processes: list[int]
    signals: list[int]
    value: int = 0  # value of a real-time signal


@dataclass(frozen=True, slots=True, kw_only=True)
class LookRequest(Message):
    processes: list[int]


class Seen(NamedTuple):
    """Observed state of one process."""

    is_stopped: bool
    stack: str = ""  # output of `faulthandler`, after a line for `held` if a debugger holds the process

    @classmethod
    def of(cls, is_stopped: bool, held: str) -> Seen:
        """Return the state of a process without a stack.

        Args:
            is_stopped: whether the process is stopped.
            held: description of the debugger that holds the process; "" if there is none.
        """
        return cls(is_stopped, f"{_HELD}{held}\n" if held else "")

    @property
    def held(self) -> str:
        """Describe the debugger that holds the process, see `processes.held`; "" if there is none."""
        first, _, _ = self.stack.partition("\n")
        return first.removeprefix(_HELD) if first.startswith(_HELD) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookReply(Message):
    seen: dict[int, Seen]  # process -> state


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldTextRequest(Message):
    hold: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRequest(Message):
    processes: list[int]
    grace_s: float
    orphans: bool = False  # also end orphaned descendants, whose rank is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class EndReply(Message):
    left: list[int]  # process ids of processes that could not be ended


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnded(Message):
    process: int
    status: int  # exit status, or the negative signal number
    why: str = ""  # a clause about a resource limit or the OOM killer


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
    directory: str  # directory of the notebook
    marker: str  # marker file that the notebook created in it; "" if it could not


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteReply(Message):
    user: str
    cuda: str
    free_mib: int
    has_directory: bool
    has_marker: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockRequest(Message):
    """Request the time of the host. The reply is immediate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockTimeReply(Message):
    time_ns: int
    is_outdated: bool  # files that define the environment changed after the server's start


class ListenPlace(NamedTuple):
    """Address and port range on which a host listens."""

    address: str
    first_port: int
    stop_port: int
    word: str  # text that the host sends to a connecting host


class ConnectTarget(NamedTuple):
    """Address of another host to connect to."""

    address: str
    port: int
    word: str  # text that the other host must send


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenRequest(Message):
    places: list[ListenPlace]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenReply(Message):
    ports: list[int]  # port for each place; 0 if the host cannot listen on it


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectRequest(Message):
    targets: list[ConnectTarget]
    within_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectReply(Message):
    tried: list[str]  # error message for each target; "" for success


@dataclass(frozen=True, slots=True, kw_only=True)
class StopListeningRequest(Message):
    """Close the ports of `ListenRequest`."""


# ---- files


class FoundFile(NamedTuple):
    """State of a file name on the host."""

    kind: str  # "file", "link", "other", or "behind": a parent folder is a link
    size: int  # bytes
    mtime_ns: int
    mode: int  # permission bits
    link: str = ""  # target of a link


class FilePart(NamedTuple):
    """Part of a file, or a link."""

    path: str
    nbytes: int = 0
    is_first: bool = True
    end: tuple[int, int] | None = None  # permissions and time, in the last part of a file
    link: str = ""  # target, if the file is a link
    discard: bool = False  # discard the parts of this file that were sent before


class FileDigest(NamedTuple):
    """File to compare, with its expected digest."""

    path: str
    digest: str
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileErrorReply(Message):
    """The operating system rejected a file operation."""

    path: str
    number: int  # errno
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderRequest(Message):
    path: str  # path of the notebook's folder
    marker: str  # marker file in that folder


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderReply(Message):
    folder: str
    is_shared: bool = False  # True if it is the notebook's own folder, because it contains the marker
    is_of: str | None = None  # contains files of this other folder, so unusable; "" if that folder is unknown


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
    names: list[str]  # those that exist


@dataclass(frozen=True, slots=True, kw_only=True)
class StatRequest(Message):
    folder: str
    paths: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatReply(Message):
    found: list[FoundFile | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest(Message):
    """Compare files with digests. A file with the same content gets the given modification time."""

    folder: str
    files: list[FileDigest]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareReply(Message):
    same: list[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest(Message):
    """Write parts of files. A file is written under a temporary name and renamed when it is complete."""

    folder: str
    parts: list[FilePart]
    data: bytes = field(repr=False)  # bytes of all parts, concatenated


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardRequest(Message):
    """Remove markers and incomplete files."""
