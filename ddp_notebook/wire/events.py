"""The vocabulary that the notebook and its ranks share: every message, and its binary form.

A message is a frozen dataclass. On the wire it is one frame of JSON (its name and its small fields) followed
by one frame per `bytes` field, so that pickles and tensors are never copied into text. Both sides import this
module; it imports neither.

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

    outpost <-> notebook: Arrived  a host server has begun; Stream  bytes between it and its owner;
                          Warned   its job is to end

`VERSION` counts incompatible changes of this vocabulary and of the framing in `link`. A field more or less is one, also
with a default: `decode` refuses messages with other fields than its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import json
from ddp_notebook.wire.record_options import RecordOptions

VERSION = 5
TAKEN_EVERY = 4  # messages; a rank may always send so many ahead, see `Taken`


def _plain(value: Any) -> Any:
    """What JSON has no form for."""
    return value.to_json() if isinstance(value, RecordOptions) else str(value)


_to_json = json.JSONEncoder(default=_plain).encode  # made once: `json.dumps` with an option makes an encoder per call
_of_json = json.JSONDecoder().raw_decode  # `json.loads` guesses the encoding first
_AS_EVER = RecordOptions()  # mostly

# A kernel shows texts of these messages. Other messages have paths, whose surrogates mean bytes.
SHOWN = {"ChildStopped", "Display", "Comm", "CellDone", "InputRequest", "Vitals", "Pulled", "Pushed"}
_KINDS: dict[str, type[Message]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages."""

    def __init_subclass__(cls) -> None:
        _KINDS[cls.__name__] = cls

    def encode(self) -> list[bytes]:
        """Frames: JSON of the name and the small fields, then the `bytes` fields in order of declaration."""
        small: dict[str, Any] = {}
        buffers: list[bytes] = []
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, bytes):
                buffers.append(value)
            else:
                small[name] = value
        return [_to_json([type(self).__name__, small]).encode(), *buffers]


def decode(frames: Sequence[bytes | bytearray]) -> Message:
    """The message that `Message.encode` made these frames from.

    Raises:
        ValueError: the frames hold no message of this version.

    Example:
        >>> decode(Interrupt(cell=3).encode())
        Interrupt(cell=3)
    """
    try:
        (name, small), end = _of_json(text := str(frames[0], "utf-8"))
        if name in SHOWN and "\\ud" in text:  # JSON in ASCII has two of them for a character such as an emoji
            small = encodable(small)
        if end < len(text):
            raise ValueError("there is more behind it")
        kind = _KINDS[name]
        if len(small) < len(kind.__dataclass_fields__):
            missing = [name for name in kind.__dataclass_fields__ if name not in small]
            small.update(zip(missing, frames[1:], strict=True))
        if kind is RunCell:
            given = small["record"]
            small["record"] = _AS_EVER if given == {} else RecordOptions.from_json(given)
        return kind(**small)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        begin = frames[0][:80] if frames else b""
        raise ValueError(f"not a message of version {VERSION}: {begin!r}") from error


def encodable(value: Any) -> Any:
    """Return the JSON value with escapes in the place of surrogates. UTF-8 cannot encode them, so no kernel sends them.

    Example:
        >>> encodable({"evalue": "\\ud800", "traceback": ["\U0001f642"]}) == {
        ...     "evalue": "\\\\ud800",
        ...     "traceback": ["\U0001f642"],
        ... }
        True
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [encodable(one) for one in value]
    return {encodable(key): encodable(one) for key, one in value.items()} if isinstance(value, dict) else value


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
class Comm(Message):
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
class ChildStopped(Message):
    """The rank waits in a cell for a child process that is stopped, or does so no longer."""

    cell: int
    words: str = ""  # names the child process and what lets it go on; "": there is no such wait any more


@dataclass(frozen=True, slots=True, kw_only=True)
class Display(Message):
    """What a cell sent to iopub: display_data, execute_result, update_display_data, clear_output, or an error that does
    not end the cell, whose content is its `text`."""

    cell: int
    msg_type: str
    content: dict[str, Any]
    place: int  # number of the mark in the rank's text where it belongs


@dataclass(frozen=True, slots=True, kw_only=True)
class CellDone(Message):
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
class Pulled(Message):
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
class Pushed(Message):
    """Answer to `Push`: the variables are set, or `error` says why none of them is."""

    request: int
    error: str = ""
    lacks_memory: bool = False  # the rank cannot open the shared memory: put the data into a transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRequest(Message):
    """`input()` or `getpass()` of a cell waits for a line."""

    cell: int
    request: int  # counted by the rank
    prompt: str
    password: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals(Message):
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


# ---- notebook <-> outpost


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
