"""What a rank records, as tables: the vocabulary that a rank's recorder and the notebook's recording share.

A table is a NumPy structured array, one row per thing that happened. Times are nanoseconds of the rank's monotonic
clock (`time.monotonic_ns`), -1 where unknown. A column of type `TEXT` holds the number of a text, which the rank counts
from 1 as it meets new ones; 0 is the empty text. Ranks (`rank`, `peer`) are ranks of the session.

| table | a row is |
|---|---|
| `CALL` | one collective, send or receive on one rank |
| `VALUE` | what was in a tensor: the first elements, and the range of all or of a sample |
| `SPAN` | a stretch of a step: forward, backward, optimizer, input; what a stage of a pipeline does; a block; a cell |
| `METRIC` | one number that the user logged, or that was read from the cell's variables |
| `RESOURCE` | memory and load of a rank, its GPU and its host, once a second, of many idle ranks more rarely |
| `LAYOUT` | how a DDP model has its parameters in buckets, each time that changes |
| `LOADER` | the settings of a DataLoader, in its first epoch in a cell |
| `RPC` | one side of a remote call: what its caller saw of it, or its callee |
| `REFERENCE` | what has happened to a remote reference: made, forked, taken, deleted |
| `CONTEXT` | what has happened in a context of distributed autograd |

Numbers of remote calls, references, forks, contexts and messages are the session's: those of no two ranks are equal.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.void]  # (n,) of one of the dtypes below

TEXT = "<u4"
FIRST_BYTES = 128  # of the first elements of a tensor: 8 of complex128, 32 of float32
SAMPLE = 1024  # tensors up to so many elements are looked at as a whole
SAMPLE_OF_LARGE = 256  # elements of a larger tensor, in evenly spread stretches

# ---- codes

STATES = ("issued", "done", "failed", "unwaited")  # unwaited: nobody asked how it ended
ORIGINS = ("user", "ddp", "ddp hook", "fsdp", "dtensor", "functional", "pipeline", "optimizer", "checkpoint", "torch")
REDUCE_OPS = ("", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
SPANS = (
    *("cell", "forward", "backward", "optimizer", "input"),
    *("input gradient", "weight gradient"),  # the two halves of a backward, of schedules without bubbles
    *("pipeline", "block"),  # one `step` of a pipeline's schedule; code in `torch.profiler.record_function`
    "workers",  # a DataLoader with workers: their start, up to the first batch of an epoch, and their end
    "evaluation",  # a forward without gradients
    "checkpoint",  # `torch.save` or `torch.distributed.checkpoint.save`
    "future",  # the thread waits for a `torch.futures.Future`
)
# What the steps of a metric count. Step: of the training loop, or as the program gave it. Optimizer step: of several
# optimizers, each of whose steps counts.
STEP_UNITS = ("step", "value", "optimizer step")
SIDES = ("input", "output", "local gradient", "synchronised gradient")
RPC_SIDES = ("caller", "callee")
RPC_KINDS = ("rpc_sync", "rpc_async", "remote", "to_here", "torch")  # torch: what it asks for itself, such as types
REFERENCE_EVENTS = ("made", "forked", "taken", "deleted", "let go")  # let go: all of the rank, by `shutdown`
CONTEXT_EVENTS = ("context", "pair", "gradient", "backward", "step")
DTYPES = {  # NumPy types with the same bytes, by torch's names; NumPy has no bfloat16 and no float8
    "float32": "<f4",
    "float64": "<f8",
    "float16": "<f2",
    "bfloat16": "<u2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "bool": "|b1",
    "complex64": "<c8",
    "complex128": "<c16",
}

# ---- tables

CALL = np.dtype(
    [
        ("call", "<u8"),  # the rank's own count of calls
        ("rank", "<i4"),
        ("op", TEXT),  # as users call it: "all_reduce"
        ("api", TEXT),  # what the user's code has called: "all_gather_object", "backward"
        ("group", TEXT),  # JSON: {"name", "title", "ranks"}
        ("number", "<u4"),  # in its group; collectives, sends and receives each from 1
        ("reduce_op", "u1"),
        ("peer", "<i4"),  # the root, the source or the destination; -1: none
        ("tag", "<i4"),
        ("dtype", TEXT),
        ("shapes", TEXT),  # JSON: a list of shapes, of the input, or of the output where it has no input
        ("nbytes_in", "<i8"),
        ("nbytes_out", "<i8"),
        ("origin", "u1"),
        ("site", TEXT),  # the user's line: "cell line 7"
        ("module", TEXT),  # the model in DDP or module in FSDP that it was made for; what a pipeline's message carries
        ("bucket", "<i2"),  # of DDP's gradients; -1: none
        ("backward", "<u4"),  # the `span` of the backward that it was issued in; 0: none
        ("cell", "<u4"),
        ("step", "<u4"),  # optimizer steps of the cell before it
        ("issue_ns", "<i8"),
        ("start_ns", "<i8"),  # on the device, where that is not the time of its issue
        ("end_ns", "<i8"),
        ("blocked_ns", "<i8"),  # how long its caller waited for it
        ("state", "u1"),
        ("is_async", "?"),
        ("thread", "<u4"),  # 0: the main thread; others counted as they come
        ("left_out", "?"),  # its values, since its step was one of many: see `%ddp_record`
    ]
)

VALUE = np.dtype(
    [
        ("rank", "<i4"),
        ("call", "<u8"),  # of `CALL`; for a gradient the span of its backward
        ("side", "u1"),
        ("dtype", TEXT),
        ("name", TEXT),  # of a gradient: the parameter
        ("numel", "<i8"),  # elements, of all tensors of this side
        ("looked_at", "<i8"),  # how many of these were looked at
        ("low", "<f8"),  # minimum (of the modulus if complex); NaN if empty
        ("high", "<f8"),
        ("mean", "<f8"),
        ("nans", "<i8"),  # not a number, among those looked at
        ("infs", "<i8"),
        ("first_count", "u1"),
        ("first", "V128"),  # the first elements, in the bytes of their dtype
    ]
)

SPAN = np.dtype(
    [
        ("span", "<u4"),  # the rank's own count of spans
        ("rank", "<i4"),
        ("kind", "u1"),
        ("name", TEXT),  # of the model or the optimizer; of a cell its prompt: "In [8]"
        ("cell", "<u4"),
        ("step", "<u4"),  # optimizer steps of the cell before it
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("samples", "<i4"),  # in the batch; -1: unknown
        ("thread", "<u4"),
        ("pipeline", "<u4"),  # the `span` of the pipeline's step that it is an action of, or that it is; 0: none
        ("stage", "<i2"),  # of an action; of a pipeline's step: how many stages the pipeline has
        ("microbatch", "<i4"),  # the same of microbatches
        ("is_training", "?"),  # of a forward: the model was in training mode
    ]
)

METRIC = np.dtype(
    [
        ("rank", "<i4"),
        ("name", TEXT),
        ("cell", "<u4"),
        ("step", "<i8"),
        ("value", "<f8"),
        ("time_ns", "<i8"),
        ("is_given", "?"),  # the step, by the program; False: counted from 0 in each cell
        ("unit", "u1"),  # what `step` counts, an index of `STEP_UNITS`
    ]
)

RESOURCE = np.dtype(
    [
        ("rank", "<i4"),
        ("time_ns", "<i8"),
        ("rss_bytes", "<i8"),
        ("cpu_percent", "<f4"),  # of one core
        ("host_used_bytes", "<i8"),
        ("host_total_bytes", "<i8"),
        ("gpu_allocated_bytes", "<i8"),  # by tensors; -1: no GPU
        ("gpu_reserved_bytes", "<i8"),
        ("gpu_peak_bytes", "<i8"),
        ("gpu_percent", "<f4"),  # NaN: unknown
        ("cores", "<u2"),  # that the rank may use; 0: unknown
        ("page_faults", "<i8"),  # of the process so far, without those that had to read a disk; 0: not counted
        # Since the process began, from the scheduler's statistics; 0: not counted.
        ("ready_ns", "<i8"),  # the main thread was ready to run and had no core
        ("ran_ns", "<i8"),  # processor time of the process and of its children that live
        ("host_busy_ns", "<i8"),  # processor time of the host, all cores together
        ("host_cores", "<u2"),
    ]
)

LAYOUT = np.dtype(
    [
        ("rank", "<i4"),
        ("time_ns", "<i8"),
        ("model", TEXT),
        ("buckets", TEXT),  # JSON: a list of {"nbytes", "parameters"}, in the order of their synchronisation
        ("is_rebuilt", "?"),
    ]
)

LOADER = np.dtype(
    [
        ("rank", "<i4"),
        ("time_ns", "<i8"),  # begin of the first epoch in a cell
        ("name", TEXT),  # name of the loader, as in its spans
        ("cell", "<u4"),
        ("workers", "<u4"),
        ("is_persistent", "?"),  # its workers live on between two epochs
        ("batches", "<i8"),  # per epoch; -1: unknown
        ("prefetch", "<i4"),  # batches that each worker loads ahead; -1: none
    ]
)

RPC = np.dtype(
    [
        ("rank", "<i4"),  # that tells it
        ("side", "u1"),
        ("number", "<u8"),  # of the call, the same on both sides
        ("kind", "u1"),  # known to the caller, as all up to `nbytes_back`
        ("src", "<i4"),  # the caller; -1: see the other side
        ("dst", "<i4"),
        ("function", TEXT),  # as users call it
        ("site", TEXT),
        ("parent", "<u8"),  # the call that has made it; 0: none
        ("nbytes", "<i8"),  # of function and arguments; -1: unknown
        ("nbytes_back", "<i8"),  # of tensors in the result
        ("reference", "<u8"),  # that it has made, or whose value it fetches; 0: none
        ("error", TEXT),
        ("cell", "<u4"),  # of this side
        ("start_ns", "<i8"),  # sent, or begun
        ("end_ns", "<i8"),  # returned, or left by its function
        ("done_ns", "<i8"),  # the callee's future was set: of `async_execution`
        ("thread", "<u4"),
    ]
)

REFERENCE = np.dtype(
    [
        ("rank", "<i4"),
        ("event", "u1"),
        ("reference", "<u8"),
        ("fork", "<u8"),  # 0: the owner's own
        ("owner", "<i4"),
        ("parent", "<i4"),  # that has forked it; -1: none
        ("call", "<u8"),  # in which that was; 0: none
        ("name", TEXT),  # of the type that it holds
        ("cell", "<u4"),
        ("time_ns", "<i8"),
    ]
)

CONTEXT = np.dtype(
    [
        ("rank", "<i4"),
        ("event", "u1"),
        ("context", "<u8"),
        ("message", "<u8"),  # of a pair of send and recv
        ("src", "<i4"),  # of that pair, in forward
        ("dst", "<i4"),
        ("call", "<u8"),  # whose arguments or result it carries
        ("nbytes", "<i8"),
        ("name", TEXT),  # of the optimizer
        ("cell", "<u4"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
    ]
)

TABLES: dict[str, np.dtype[np.void]] = {
    "call": CALL,
    "value": VALUE,
    "span": SPAN,
    "metric": METRIC,
    "resource": RESOURCE,
    "layout": LAYOUT,
    "loader": LOADER,
    "rpc": RPC,
    "reference": REFERENCE,
    "context": CONTEXT,
}
LATER = ("loader", "rpc", "reference", "context")  # tables that files of before they were there do not have
EARLIER = {  # of files from before the last columns
    "call": (np.dtype(CALL.descr[:-1]),),
    "span": (np.dtype(SPAN.descr[:-1]), np.dtype(SPAN.descr[:-4])),
    "metric": (np.dtype(METRIC.descr[:-1]), np.dtype(METRIC.descr[:-2])),
    "resource": tuple(np.dtype(RESOURCE.descr[:-left_out]) for left_out in (4, 5, 6)),
}
TEXTS = {  # the columns of each table that hold numbers of texts
    "call": ("op", "api", "group", "dtype", "shapes", "site", "module"),
    "value": ("dtype", "name"),
    "span": ("name",),
    "metric": ("name",),
    "resource": (),
    "layout": ("model", "buckets"),
    "loader": ("name",),
    "rpc": ("function", "site", "error"),
    "reference": ("name",),
    "context": ("name",),
}
TIMES = {  # the columns that hold times of the rank's clock
    "call": ("issue_ns", "start_ns", "end_ns"),
    "value": (),
    "span": ("start_ns", "end_ns"),
    "metric": ("time_ns",),
    "resource": ("time_ns",),
    "layout": ("time_ns",),
    "loader": ("time_ns",),
    "rpc": ("start_ns", "end_ns", "done_ns"),
    "reference": ("time_ns",),
    "context": ("start_ns", "end_ns"),
}


def upgraded(table: str, rows: Rows) -> Rows:
    """Rows of this version from those of an earlier one: what it did not have is 0.

    Example:
        >>> upgraded("call", np.zeros(2, EARLIER["call"][0]))["left_out"].tolist()
        [False, False]
    """
    if rows.dtype not in EARLIER.get(table, ()):
        return rows
    found = np.zeros(len(rows), TABLES[table])
    for name in rows.dtype.names or ():
        found[name] = rows[name]
    return found


def first_values(row: Rows, dtype: str) -> npt.NDArray[np.generic]:
    """The first elements of a tensor, as NumPy has them: those of bfloat16 as float32.

    Args:
        row: one row of `VALUE`.
        dtype: of the tensor, without "torch.".

    Example:
        >>> row = np.zeros((), VALUE)
        >>> row["first_count"], row["first"] = 2, np.array([1.5, 2.0], "<f4").tobytes().ljust(FIRST_BYTES, b"\\0")
        >>> first_values(row, "float32").tolist()
        [1.5, 2.0]
    """
    return as_array(row["first"].tobytes(), dtype)[: int(row["first_count"])]


def as_array(data: bytes, dtype: str) -> npt.NDArray[np.generic]:
    """The elements of a torch tensor from its bytes: those of bfloat16 as float32, the bytes themselves if unknown."""
    array = np.frombuffer(data, DTYPES.get(dtype, "|u1"))
    if dtype == "bfloat16":  # the upper half of a float32
        return (array.astype("<u4") << 16).view("<f4")
    return array
