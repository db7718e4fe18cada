"""Messages between the notebook and its ranks.

    notebook -> rank                               rank -> notebook
    ----------------                               ----------------
    Form       join a group with this rank         Hello        process, host and versions of a new rank
    Engine     become an ipyparallel engine        Formed       the rank joined the group, or an error
    Register   register at the controller          Registered   the controller knows this engine
    RunCell    run this code                       Ready        the rank can run a cell
    Interrupt  interrupt a cell                    Display      a display of a cell
    Pull       send a variable                     CellDone     a cell has ended
    Peek       evaluate an expression
    Push       set variables                       Pulled       a value, or a transfer to fetch it
    InputReply the line that the user typed        Pushed       the variables were set, or an error
    Comm       a widget message                    InputRequest input() waits for a line
    Probe      request the state of a rank         Vitals       memory, running cell and blocking operation
    Lost       ranks died: no collectives          Checked      values to compare between ranks
    Check      request values to compare           Recorded     recorded rows
    ClockProbe request the rank's clock            ClockReply   its clock, after all recorded rows
    Taken      displays were shown                 ChildStopped a child process of the rank is stopped

More messages are in `script_abort`, `debug_messages`, `faults`, `files`, `resize_messages`, `survive_messages`,
`completion_messages`, `mesh_messages` and `whos_messages`. A Jupyter kernel shows texts of messages that are declared
with `shown`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.record_options import RecordOptions
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

TAKEN_EVERY = 4  # number of messages that a rank may always send without an acknowledgement, see `Taken`


# ---- notebook -> rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Form(Message):
    """Join the process group of `epoch` with this rank number. A later epoch forms the group again."""

    epoch: int
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int  # number of this host among the hosts (GROUP_RANK of torchrun)
    group_world_size: int  # number of hosts
    backend: str  # "nccl" or "gloo"
    device: str  # "cpu", "cuda:0", ...
    store_host: str  # MASTER_ADDR: host of the TCPStore for user programs
    store_port: int  # MASTER_PORT
    store_at: str  # address of the session's store, see `wire.store`
    store_key: str = field(repr=False)
    store_prefix: str
    interface: str  # network interface for gloo and NCCL, "lo" on one machine
    threads: int  # threads of this process: an equal share of the cores of its host
    form_timeout_s: float  # timeout while the group forms; short, because one unreachable rank costs a multiple of it
    guard: bool = False  # ranks compare their calls before each collective of the user
    shares_gpu: bool = False  # several ranks use one GPU; NCCL then treats each rank as a separate host
    process: int = 0  # number of the process in the session; a replacement process gets a new number


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine(Message):
    """Become an ipyparallel engine. The engine connects when the controller runs."""

    connection: dict[str, Any]  # content of a connection file of ipyparallel
    engine_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Register(Message):
    """Connect the engine to the controller and register it."""

    engine_id: int
    replaces: bool = False  # True if a dead engine is still registered with this id
    reached_at: dict[str, str] = field(default_factory=dict)  # controller address -> its address as seen from this host


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCell(Message):
    """Run `code` on the main thread of the rank, in the engine's IPython shell."""

    cell: int
    code: str
    execution_count: int  # number of the notebook's `In [n]`, so that tracebacks have the same text on all ranks
    file: str = ""  # file name of the cell in warnings and tracebacks, the same on all ranks
    record: RecordOptions = field(default_factory=RecordOptions)
    folds: bool | None = (
        None  # merge identical lines of ranks, also in a notebook that attaches later; None: session setting
    )
    missing: list[int] = field(default_factory=list)  # ranks of the group that do not run this cell
    groups_made: int = 0  # least number of groups to count from, because earlier cells made groups on some ranks only
    may_stop: bool = False  # a debugger may stop ranks in it; the same on all its ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt(Message):
    """Interrupt a cell. The signal from the host server is faster, but has no effect before the cell starts."""

    cell: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull(Message):
    """Send a variable of the rank's namespace. Without `force` only up to `wire.bulk.MOST_BYTES`.

    With `names`, send these variables together (all variables if the list is empty), without a size limit.
    `Pulled.about` is JSON in this case.
    """

    request: int
    name: str
    force: bool = False
    names: list[str] | None = None
    safe: bool = False  # serialize with `wire.safe` instead of pickle
    memory: str = ""  # name for the shared memory that holds the value; "" to use none
    at_step: bool = False  # in a running cell: copy the value after the next optimizer step, if its type allows it


@dataclass(frozen=True, slots=True, kw_only=True)
class Peek(Message):
    """Evaluate an expression after the next optimizer step of the running cell, or immediately if no cell runs.

    The reply is `Pulled`: `about` is the value as text, `steps` the number of optimizer steps of the cell at that time.
    """

    request: int
    expression: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Push(Message):
    """Set variables from a pickled dict in `data`, in shared memory or in an earlier transfer."""

    request: int
    transfer: int = 0
    data: bytes = b""
    memory: list[Any] = field(default_factory=list)  # see `SealedMemory.place`
    nbytes: int = 0  # size of the data in `memory`
    of_rank: int = -1  # source rank; distributed samplers are adapted to the receiving rank; -1: none


@dataclass(frozen=True, slots=True, kw_only=True)
class InputReply(Message):
    """Reply to `InputRequest`: the line that the user typed, or an error."""

    request: int
    text: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comm(Message, shown=True):
    """Message between the two halves of a widget, on a rank and in the browser. Sent in both directions.

    A rank gets it in its inbox, so that a later cell sees the changes.
    """

    msg_type: str  # "comm_open", "comm_msg" or "comm_close"
    content: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)  # base64, because a line of an inbox cannot hold bytes
    asked_by: dict[str, Any] = field(default_factory=dict)  # header of the browser message that it forwards or answers
    number: int = 0  # counter of the rank's widget messages, see `Taken`; 0 for messages to a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Message):
    """Request `Vitals`. The agent's thread answers even if the main thread is blocked."""

    request: int
    with_shortages: bool = False  # also check for exhausted resources, which takes about 1 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken(Message):
    """Acknowledge that all messages of one kind up to this number were shown, see `rank.cell.outgoing`."""

    kind: str  # "Display", numbered by `place`, or "Comm"
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Message):
    """Ranks died. Collectives raise an error with this text instead of blocking, until the group is formed again."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(Message):
    """Request `Checked`: fingerprints of variables, samples of entries, or a check of data loaders."""

    request: int
    names: list[str] = field(default_factory=list)  # empty: everything that has to be equal on all ranks
    entries: list[str] = field(default_factory=list)
    whole: bool = False  # for loaders: read all data


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockProbe(Message):
    """Request `ClockReply` from the agent's thread."""

    request: int
    sent_ns: int  # clock of the notebook
    flush: bool = False  # first send all recorded rows


# ---- rank -> notebook


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """First message of a rank's process: it runs and waits for `Form`."""

    process: int
    pid: int
    host: str
    python: str
    torch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed(Message):
    """The rank has joined the group of `epoch`, or `error` contains the reason for the failure."""

    epoch: int
    error: str = ""
    lacks_others: bool = False  # the error was that other ranks did not join in time
    notes: list[str] = field(default_factory=list)  # notes about state that could not be restored


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Message):
    """The IPython shell of the rank exists, so the rank can run a cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered(Message):
    """The controller has registered this engine and removed the replaced one, or `error` contains the reason."""

    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStopped(Message, shown=True):
    """A cell of the rank waits for a stopped child process, or no longer waits."""

    cell: int
    words: str = ""  # the child process and how to continue it; "" when the wait is over


@dataclass(frozen=True, slots=True, kw_only=True)
class Display(Message, shown=True):
    """iopub message of a cell: display_data, execute_result, update_display_data or clear_output.

    Also an error that does not end the cell; its `text` is the content.
    """

    cell: int
    msg_type: str
    content: dict[str, Any]
    place: int  # number of the mark that gives the position in the rank's text


@dataclass(frozen=True, slots=True, kw_only=True)
class CellDone(Message, shown=True):
    """A cell has ended on this rank. The end mark in the rank's pipes shows where its text ends."""

    cell: int
    status: str  # "ok", "error" or "interrupted"
    duration_s: float
    ename: str = ""
    evalue: str = ""
    traceback: list[str] = field(default_factory=list)
    payload: list[dict[str, Any]] = field(default_factory=list)  # pager content of `x?`
    has_group: bool = True  # False: the cell destroyed the default group and formed no new one
    place: str = ""  # position of the error or interrupt: "cell line 7, in all_reduce"
    operation: dict[str, Any] | None = None  # the `Operation` that failed or was aborted
    was_freed: bool = False  # the operation was aborted because of other ranks; the cell itself has no error
    group: dict[str, Any] = field(default_factory=dict)  # state of the process groups
    groups_made: int = 0  # number of groups that torch has counted, if the cell has changed it
    # An optimizer stepped repeatedly, but the rank sent nothing to other ranks: how, a key of `records.words.APART`.
    trains_apart: str = ""
    findings: list[Any] = field(default_factory=list)  # facts about its training: name, step and details of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled(Message, shown=True):
    """Reply to `Pull`: a small value, or the transfer and the shared memory of a large one, or an error."""

    request: int
    error: str = ""
    about: str = ""  # one-line description of the value on the rank: device, range, ...
    transfer: int = 0
    nbytes: int = 0
    data: bytes = b""
    memory: list[Any] = field(default_factory=list)  # see `SealedMemory.place`; empty: use the transfer
    steps: int = -1  # optimizer steps of the running cell; -1 if no cell ran
    waits_for_cell: str = ""  # type that can be copied only after the end of the cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed(Message, shown=True):
    """Reply to `Push`: the variables were set, or `error` contains the reason why none was set."""

    request: int
    error: str = ""
    lacks_memory: bool = False  # the rank cannot open the shared memory: send the data as a transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRequest(Message, shown=True):
    """`input()` or `getpass()` of a cell waits for a line, or a debugger waits for a command."""

    cell: int
    request: int  # counter of the rank
    prompt: str
    password: bool
    stopped_at: str = ""  # position of a debugger: "cell line 3 in step"; "" for input()
    meshes: list[Any] = field(default_factory=list)  # coordinates of the rank, see `rank.variables.meshes`
    place: int = 0  # number of the mark that gives its position in the rank's text; 0: it overtakes text


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals(Message, shown=True):
    """Reply to `Probe`: state of a rank."""

    request: int
    rss_bytes: int | None  # resident memory; None if the rank cannot read it
    device_bytes: int  # memory that torch allocated or cached on the rank's GPU; 0 on the CPU
    running_cell: int  # 0 if idle
    running_s: float
    where: str = ""  # position of the main thread: "cell line 3, in all_reduce"
    failed: str = ""  # error of a failed cell while its traceback is formatted: "ValueError: no"
    operation: dict[str, Any] | None = None  # the `Operation` that the rank waits in
    thread: str = ""  # position of another thread that waits in `operation` while the main thread runs
    group: dict[str, Any] = field(default_factory=dict)  # state of the process groups
    remote: dict[str, Any] = field(default_factory=dict)  # remote calls that the rank waits for or serves
    child: dict[str, Any] = field(default_factory=dict)  # child process that the main thread waits for
    shortages: list[str] = field(default_factory=list)  # a sentence for each exhausted resource, if requested
    client_call_s: float = 0.0  # seconds for which a call of `session.client` has blocked the main thread; 0.0: none
    unread: str = ""  # error that prevented reading the fields from `where` to `child`
    phase: str = ""  # phase of the main thread in code of this package, one of `records.phases`
    background: str = ""  # user code that may start operations although no cell runs: "thread 'worker' at cell line 2"
    may_serve: bool = False  # other ranks may call functions of this rank by RPC
    store: dict[str, Any] = field(default_factory=dict)  # wait of the main thread at a store, see `StoreWait`
    last_cell: int = 0  # the running cell, or else the last one
    training: dict[str, Any] = field(default_factory=dict)  # counts of its training loops, see `LoopCounts`


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked(Message):
    """Reply to `Check` and `Inspect`."""

    request: int
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded(Message):
    """Batch of recorded rows, see `records.codec`."""

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReply(Message):
    """Reply to `ClockProbe`."""

    request: int
    sent_ns: int  # copied from the request
    rank_ns: int  # clock of the rank
    boot: str  # boot id of the host; processes of one boot share one clock
