"""Messages between a keeper, which owns the ranks of a kept session, and its notebooks.

A notebook starts a keeper and writes a `KeeperSpec` to its standard input.

    keeper -> notebook                             notebook -> keeper, without a reply
    ------------------                             -----------------------------------
    StartStage       a line about the start        SendToRank       message for the agent of a rank
    Welcome          state of the session          TellRanks        message for the inboxes of ranks
    StateChanged     hosts and processes           DropTransfer     a rank may release bulk data
    RanksRenumbered  more or fewer ranks           HoldText         text stays in the pipes of the ranks
    RunningCells     running and queued cells      WaitingJobs      queued jobs
    RankMessage      a message of a rank           LackNothing      new ranks have received their variables
    RankEnded        a rank has ended              CellShown        a cell's output was shown completely
    ControllerEnded  the controller has ended      CancelRequest    the reply is no longer needed
    AllSent          the journal was sent
    TakenOver        another notebook drives
    SessionEnded     the session has ended

    request              reply                     request              reply
    FormRequest          NotesReply                ClientFileRequest    ClientFileReply
    ReplaceRequest       NotesReply                RegisteredRequest    DoneReply
    PlaceRequest         PlaceReply                GiveUpRequest        DoneReply
    ResizeRequest        NotesReply                TroubleRequest       TextReply
    SignalRanksRequest   DeliveredReply            ReplaceStoreRequest  DoneReply
    LookAtRanksRequest   LookReply                 StatusRequest        TextReply
    FetchRequest         DataReply                 SyncRequest          SyncReply
    PutRequest           TransferReply             StopRequest          StoppedReply

`PingRequest`, `DoneReply`, `LookReply` and `Notice` are messages of host servers, see `messages.hosts`. The reply to
any request may be a `FailureReply`. Text of ranks has its own kind of frame, in which the process number is the rank,
see `messages.framing`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import RunCell
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

# ---- parts of messages


@dataclass(slots=True, kw_only=True)
class OfHost:
    """State of one host. Notebooks of kept sessions use it instead of a `launch.host.host.Host`."""

    name: str
    label: str
    hostname: str
    is_here: bool
    is_alive: bool
    unheard: str
    silent_s: float
    pid: int
    stopped: dict[int, float] = field(default_factory=dict)  # see `Host.stopped`

    @property
    def is_unreachable(self) -> bool:
        return bool(self.unheard)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfProcess:
    """State of one process of a session."""

    number: int
    kind: str
    host: str
    rank: int
    pid: int
    status: int | None
    lost: str
    tails: dict[int, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """State of a session: its hosts and processes."""

    epoch: int
    placement: dict[str, Any]  # a `launch.placement.Placement` as JSON
    hosts: list[OfHost]
    processes: list[OfProcess]  # current processes, without replaced ones
    is_running: bool
    is_stopped: bool
    words: str  # names of the hosts, for messages
    trouble: str = ""  # see `Cluster.pulse`
    silent: dict[int, float] = field(default_factory=dict)  # rank -> monotonic time of its last message
    unheard: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Queued job."""

    told: RunCell  # the cell number is assigned when the job starts
    ranks: list[int] | None  # None means all ranks
    timeout_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCell:
    """Running cell, for observing notebooks."""

    told: RunCell
    ranks: list[int]
    pending: list[int]  # ranks on which the cell still runs
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperFailure:
    """Exception of the keeper, to be raised again in the notebook."""

    kind: str  # name of the exception class
    words: str
    number: int | None = None  # errno
    path: str | None = None  # path of an OSError


# ---- keeper -> notebook


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperSpec(Message):
    """Specification of a new keeper, written to its standard input."""

    options: dict[str, Any] = field(repr=False)  # a `launch.options.StartOptions` as JSON
    cwd: str
    sys_path: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartStage(Message):
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """The first message to a notebook, after the stages of a start."""

    name: str
    number: int  # number of the notebook
    drives: bool
    driver: str  # description of the notebook that drives the session
    options: dict[str, Any]  # a `launch.options.StartOptions` as JSON
    synced: dict[str, Any] | None  # a `launch.sync.sync.Synced` as JSON
    state: SessionState
    mark_token: str
    folder: str
    cells: list[tuple[RunCell, list[int], float]]  # cells without shown output: cell, ranks, seconds since its start
    last_cell: int
    lacking: list[int]  # new ranks that may lack variables, because a notebook ended during a resize
    waiting: list[Waiting]  # jobs of the previous driver
    recorded: list[tuple[str, int]]  # see `launch.keep.recording_store`
    left: list[tuple[int, bytes]] = field(repr=False)  # see `launch.keep.recording_store`


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged(Message):
    state: SessionState


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRenumbered(Message):
    stayed: dict[int, int]  # new rank -> previous rank, for each rank that stayed


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCells(Message):
    running: list[RunningCell]
    waiting: list[Waiting]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMessage(Message):
    rank: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnded(Message):
    rank: int
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerEnded(Message):
    """The controller of ipyparallel has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllSent(Message):
    """The keeper has sent all output that was not shown before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenOver(Message):
    driver: str  # description of the notebook that drives now


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded(Message):
    why: str
    failure: KeeperFailure | None


# ---- notebook -> keeper, without a reply


@dataclass(frozen=True, slots=True, kw_only=True)
class SendToRank(Message):
    rank: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class TellRanks(Message):
    message: Message
    ranks: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropTransfer(Message):
    rank: int
    transfer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldText(Message):
    hold: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingJobs(Message):
    waiting: list[Waiting]


@dataclass(frozen=True, slots=True, kw_only=True)
class LackNothing(Message):
    """New ranks have the same variables as the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellShown(Message):
    cell: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest(Message):
    number: int  # number of the request


# ---- requests and replies


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReply(Message):
    failure: KeeperFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class FormRequest(Message):
    deadline: float  # monotonic time


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceRequest(Message):
    ranks: list[int]
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NotesReply(Message):
    notes: list[str]  # notes about state that ranks could not restore


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRequest(Message):
    stay: list[int]
    world_size: int
    may_share: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceReply(Message):
    placement: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRequest(Message):
    stay: list[int]
    placement: dict[str, Any]
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRanksRequest(Message):
    ranks: list[int]
    numbers: list[int]
    value: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredReply(Message):
    by_servers: bool  # see `Cluster.signal`


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAtRanksRequest(Message):
    ranks: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest(Message):
    rank: int
    transfer: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReply(Message):
    data: bytearray = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutRequest(Message):
    rank: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReply(Message):
    transfer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFileRequest(Message):
    """See `Cluster.client_file`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFileReply(Message):
    path: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredRequest(Message):
    """See `Cluster.check_registered`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUpRequest(Message):
    why: str
    ranks: list[int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TroubleRequest(Message):
    """See `Cluster.trouble`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceStoreRequest(Message):
    """See `Cluster.replace_stopped_store`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest(Message):
    """See `Hosts.status`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReply(Message):
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRequest(Message):
    """See `Hosts.sync`."""

    folder: str | None
    overwrite: bool
    also: list[str]
    is_large: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReply(Message):
    synced: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest(Message):
    """End the session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedReply(Message):
    """The session has ended."""
