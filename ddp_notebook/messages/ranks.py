"""Messages between the notebook and its ranks.

    notebook -> rank                               rank -> notebook
    ----------------                               ----------------
    Form       take this place in a group          Hello        I exist: process, host, versions
    Engine     become an ipyparallel engine        Formed       I am in the group of that epoch (or why not)
    Register   there is a controller               Registered   it was told of this engine
    RunCell    run this code                       Ready        my shell can run a cell
    Interrupt  stop that cell                      Display      something that a cell displayed
    Pull       send this variable                  CellDone     the cell ended
    Peek       evaluate this expression
    Push       set these variables                 Pulled       the value, or where to get it
    InputReply what was typed                      Pushed       they are set (or why not)
    Comm       a message to or from a widget       InputRequest input() waits for a line
    Probe      how are you?                        Vitals       resident memory, device memory, what runs
    Lost       these ranks died: no collectives    Checked      what is to agree between ranks
    Check      what is to agree between ranks?     Recorded     what it has recorded
    ClockProbe what does your clock say?           ClockReply   its clock, behind all that it has recorded
    Taken      these displays were shown           ChildStopped a child process of the rank is stopped

More are in `script_abort`, `faults`, `files`, `resize_messages` and `survive_messages`. A kernel shows texts of those
that are `shown`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.record_options import RecordOptions
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

TAKEN_EVERY = 4  # messages; a rank may always send so many ahead, see `Taken`


# ---- notebook -> rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Form(Message):
    """Take this place in the process group of `epoch`. Re-forming is the same message with a later epoch."""

    epoch: int
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int  # number of this host among the hosts: torchrun's GROUP_RANK
    group_world_size: int  # hosts
    backend: str  # "nccl" or "gloo"
    device: str  # "cpu", "cuda:0", ...
    store_host: str  # MASTER_ADDR: the TCPStore for the user's programs
    store_port: int  # MASTER_PORT
    store_at: str  # address of the session's store, see `wire.store`
    store_key: str = field(repr=False)
    store_prefix: str
    interface: str  # network interface for gloo and NCCL, "lo" on one machine
    threads: int  # of this process: an equal share of its host's cores
    form_timeout_s: float  # while the group forms: short, since one unreachable rank costs a multiple of it
    guard: bool = False  # compare what ranks call before the user's own collectives
    shares_gpu: bool = False  # with NCCL, which then takes each rank for a host of its own
    process: int = 0  # number of the process in the session; a process that replaces another gets a new number


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine(Message):
    """Become an ipyparallel engine, of the controller that this describes once there is one."""

    connection: dict[str, Any]  # what ipyparallel's connection files hold
    engine_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Register(Message):
    """There is a controller: the engine connects to it, and registers."""

    engine_id: int
    replaces: bool = False  # an engine that has died and is still registered under this id
    reached_at: dict[str, str] = field(default_factory=dict)  # by addresses of its, where the host has others for them


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCell(Message):
    """Run `code` on the rank's main thread, in the engine's own shell."""

    cell: int
    code: str
    execution_count: int  # the notebook's `In [n]`, so that tracebacks are equal text on all ranks
    file: str = ""  # the name that warnings and tracebacks show for the cell, the same on all ranks
    record: RecordOptions = field(default_factory=RecordOptions)
    folds: bool | None = (
        None  # merge lines of ranks, also in a notebook that attaches later; None: the session's setting
    )
    missing: list[int] = field(default_factory=list)  # the ranks of the group that do not run this cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt(Message):
    """Stop this cell. The signal from the host server is faster, but is lost on a cell that has not begun."""

    cell: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull(Message):
    """Send the variable `name` of the rank's namespace, without `force` only up to `wire.bulk.MOST_BYTES`.

    With `names` these variables together, or all if that is empty, whatever their size; `about` then is JSON.
    """

    request: int
    name: str
    force: bool = False
    names: list[str] | None = None
    safe: bool = False  # in the format of `wire.safe`, not as a pickle
    memory: str = ""  # the name that shared memory gets which holds the value; "": use none
    at_step: bool = False  # while a cell runs: after its next optimizer step, if the value can be copied there


@dataclass(frozen=True, slots=True, kw_only=True)
class Peek(Message):
    """Evaluate an expression after the next optimizer step of the cell that runs, or now if none does, and answer with
    `Pulled`, whose `about` is the value as text. `steps` is how many steps the cell had taken then."""

    request: int
    expression: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Push(Message):
    """Set variables from a pickled dict, which is in `data`, in shared memory, or in a transfer that was put before."""

    request: int
    transfer: int = 0
    data: bytes = b""
    memory: list[Any] = field(default_factory=list)  # see `Memory.place`
    nbytes: int = 0  # in `memory`
    of_rank: int = -1  # whose they are: samplers that share out data for it do so for this rank then; -1: nobody's


@dataclass(frozen=True, slots=True, kw_only=True)
class InputReply(Message):
    """What was typed for an `InputRequest`, or why nothing can be."""

    request: int
    text: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comm(Message, shown=True):
    """A message between a widget's two halves, on a rank and in the browser. Goes both ways: to the rank by the inbox,
    so that a cell that comes after it finds what it has changed."""

    msg_type: str  # "comm_open", "comm_msg" or "comm_close"
    content: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)  # in base64, since a line of an inbox holds no bytes
    asked_by: dict[str, Any] = field(default_factory=dict)  # header of the browser's message that this is, or answers
    number: int = 0  # counts the rank's widget messages, see `Taken`; 0 for messages to a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Message):
    """Answer with `Vitals`, from the agent's thread, whatever the main thread does."""

    request: int
    with_shortages: bool = False  # also look for resources that have run out, which takes about 1 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken(Message):
    """Acknowledge all messages of one kind up to this number: they were shown, see `rank.cell.outgoing`."""

    kind: str  # "Display", numbered by `place`, or "Comm"
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Message):
    """Ranks died: until the group is formed again, collectives raise these words instead of waiting."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(Message):
    """Answer with `Checked`: fingerprints of variables, samples of entries, or loaders that read everything."""

    request: int
    names: list[str] = field(default_factory=list)  # none: all that has to agree
    entries: list[str] = field(default_factory=list)
    whole: bool = False  # loaders


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockProbe(Message):
    """Answer with `ClockReply`, from the agent's thread."""

    request: int
    sent_ns: int  # of the notebook's clock
    flush: bool = False  # pass on first what was recorded


# ---- rank -> notebook


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """The first word of a rank's process: it exists and waits for its place."""

    process: int
    pid: int
    host: str
    python: str
    torch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed(Message):
    """The rank is in the group of `epoch`, or `error` says why not."""

    epoch: int
    error: str = ""
    lacks_others: bool = False  # the error: other ranks did not join in time
    notes: list[str] = field(default_factory=list)  # what could not be had again


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Message):
    """The rank's shell exists: it can run a cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered(Message):
    """The controller has registered this engine and removed the replaced one, or `error` contains the reason."""

    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStopped(Message, shown=True):
    """The rank waits in a cell for a child process that is stopped, or does so no longer."""

    cell: int
    words: str = ""  # names the child process and what lets it go on; "": there is no such wait any more


@dataclass(frozen=True, slots=True, kw_only=True)
class Display(Message, shown=True):
    """What a cell sent to iopub: display_data, execute_result, update_display_data, clear_output, or an error that does
    not end the cell, whose content is its `text`."""

    cell: int
    msg_type: str
    content: dict[str, Any]
    place: int  # number of the mark in the rank's text where it belongs


@dataclass(frozen=True, slots=True, kw_only=True)
class CellDone(Message, shown=True):
    """The cell ended on this rank. Its text ends where the marker comes through the rank's pipes."""

    cell: int
    status: str  # "ok", "error" or "interrupted"
    duration_s: float
    ename: str = ""
    evalue: str = ""
    traceback: list[str] = field(default_factory=list)
    payload: list[dict[str, Any]] = field(default_factory=list)  # pages shown by `x?`
    has_group: bool = True  # False: the cell has destroyed the default group and formed no other
    place: str = ""  # where it failed or was ended: "cell line 7, in all_reduce"
    operation: dict[str, Any] | None = None  # the `Operation` that it failed in, or was freed from
    was_freed: bool = False  # it failed because it could not go on without others, not by itself
    group: dict[str, Any] = field(default_factory=dict)  # the state of its groups
    trains_apart: bool = False  # an optimizer has stepped again and again, and nothing was sent to other ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled(Message, shown=True):
    """Answer to `Pull`: the value if it is small, else the transfer to fetch it from and the shared memory that holds
    it. Or why there is none."""

    request: int
    error: str = ""
    about: str = ""  # the value in one line, as it was on the rank: its device, range, ...
    transfer: int = 0
    nbytes: int = 0
    data: bytes = b""
    memory: list[Any] = field(default_factory=list)  # see `Memory.place`; empty: get it by the transfer
    steps: int = -1  # steps that the running cell had taken; -1: no cell ran
    waits_for_cell: str = ""  # the type because of which the value can be copied only when the cell has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed(Message, shown=True):
    """Answer to `Push`: the variables are set, or `error` says why none of them is."""

    request: int
    error: str = ""
    lacks_memory: bool = False  # the rank cannot open the shared memory: put the data into a transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRequest(Message, shown=True):
    """`input()` or `getpass()` of a cell waits for a line."""

    cell: int
    request: int  # counted by the rank
    prompt: str
    password: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals(Message, shown=True):
    """Answer to `Probe`."""

    request: int
    rss_bytes: int | None  # resident memory; None: the rank cannot read it
    device_bytes: int  # allocated and cached by torch on the rank's GPU, 0 on the CPU
    running_cell: int  # 0: idle
    running_s: float
    where: str = ""  # what the main thread is in: "cell line 3, in all_reduce"
    failed: str = ""  # the error of a cell that has failed, while its traceback is formatted: "ValueError: no"
    operation: dict[str, Any] | None = None  # the `Operation` that it waits in
    thread: str = ""  # where another thread waits in `operation` while the main one goes on
    group: dict[str, Any] = field(default_factory=dict)  # the state of its groups
    remote: dict[str, Any] = field(default_factory=dict)  # the remote calls that it waits for and serves
    child: dict[str, Any] = field(default_factory=dict)  # the child process that the main thread waits for
    shortages: list[str] = field(default_factory=list)  # if asked for: a sentence for each resource that has run out
    client_call_s: float = 0.0  # for how long a call of `session.client` has had the main thread; 0.0: none has it
    unread: str = ""  # the error that kept the rank from reading the fields from `where` to `child`


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked(Message):
    """Answer to `Check`."""

    request: int
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded(Message):
    """A batch of what was recorded, see `codec`."""

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReply(Message):
    """Answer to `ClockProbe`."""

    request: int
    sent_ns: int  # as asked
    rank_ns: int  # of the rank's clock
    boot: str  # the host's boot: processes of one boot have one clock
