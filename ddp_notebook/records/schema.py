"""Tables of recorded rows, shared by the recorder of a rank and the recording in the notebook.

A table is a NumPy structured array with one row per event. Times are nanoseconds of the rank's monotonic clock
(`time.monotonic_ns`), -1 if unknown. A `TEXT` column contains the number of a text. A rank numbers new texts from 1; 0
is the empty text. Ranks (`rank`, `peer`) are ranks of the session.

| table | row |
|---|---|
| `CALL` | one collective, send or receive on one rank |
| `VALUE` | tensor contents: the first elements, and the range of all elements or of a sample |
| `SPAN` | a time span: forward, backward, optimizer, input, pipeline action, user block, cell |
| `METRIC` | one number that the user logged, or that was read from variables of the cell |
| `RESOURCE` | memory and load of a rank, its GPU and its host; once per second, less often with many idle ranks |
| `LAYOUT` | assignment of a DDP model's parameters to buckets, whenever it changes |
| `LOADER` | settings of a DataLoader, at its first epoch in a cell |
| `INDICES` | indices of the samples in one batch of a DataLoader, as its sampler gave them |
| `RPC` | one side of a remote call: caller or callee |
| `REFERENCE` | an event of a remote reference: made, forked, taken, deleted |
| `CONTEXT` | an event in a context of distributed autograd |

Numbers of remote calls, references, forks, contexts and messages are unique in the session.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

Rows = npt.NDArray[np.void]  # shape (n,), one of the dtypes below

TEXT = "<u4"
FIRST_BYTES = 128  # size of the recorded first elements: 8 of complex128, 32 of float32
SAMPLE = 1024  # tensors up to this number of elements are read completely
SAMPLE_OF_LARGE = 256  # number of elements read from a larger tensor, in evenly distributed ranges

# ---- codes

STATES = ("issued", "done", "failed", "unwaited")  # unwaited: the program never waited for the result
ORIGINS = ("user", "ddp", "ddp hook", "fsdp", "dtensor", "functional", "pipeline", "optimizer", "checkpoint", "torch")
REDUCE_OPS = ("", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
SPANS = (
    *("cell", "forward", "backward", "optimizer", "input"),
    *("input gradient", "weight gradient"),  # the two parts of a backward in pipeline schedules without bubbles
    *("pipeline", "block"),  # one `step` of a pipeline schedule; code in `torch.profiler.record_function`
    "workers",  # workers of a DataLoader: from their start to the first batch of an epoch, and their shutdown
    "evaluation",  # forward without gradients
    "checkpoint",  # `torch.save` or `torch.distributed.checkpoint.save`
    "future",  # a thread waits for a `torch.futures.Future`
)
# Unit of a metric's step. "step": of the training loop, or given by the program. "optimizer step": with several
# optimizers, each optimizer step counts.
STEP_UNITS = ("step", "value", "optimizer step")
SIDES = ("input", "output", "local gradient", "synchronised gradient")
RPC_SIDES = ("caller", "callee")
RPC_KINDS = ("rpc_sync", "rpc_async", "remote", "to_here", "torch")  # torch: internal calls, such as requests for types
REFERENCE_EVENTS = ("made", "forked", "taken", "deleted", "let go")  # the last one: deleted by `shutdown`
CONTEXT_EVENTS = ("context", "pair", "gradient", "backward", "step")
DTYPES = {  # torch dtype -> NumPy type with the same bytes; NumPy has no bfloat16 and no float8
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
        ("call", "<u8"),  # counter of calls on the rank
        ("rank", "<i4"),
        ("op", TEXT),  # name in the user's API: "all_reduce"
        ("api", TEXT),  # function that the user's code called: "all_gather_object", "backward"
        ("group", TEXT),  # JSON: {"name", "title", "ranks"}
        ("number", "<u4"),  # counter in the group; collectives, sends and receives count separately from 1
        ("reduce_op", "u1"),
        ("peer", "<i4"),  # root, source or destination; -1: none
        ("tag", "<i4"),
        ("dtype", TEXT),
        ("shapes", TEXT),  # JSON: list of shapes of the inputs, or of the outputs for an operation without inputs
        ("nbytes_in", "<i8"),
        ("nbytes_out", "<i8"),
        ("origin", "u1"),
        ("site", TEXT),  # line of the user's code: "cell line 7"
        ("module", TEXT),  # DDP model or FSDP module; for pipeline messages, their contents
        ("bucket", "<i2"),  # bucket of DDP gradients; -1: none
        ("backward", "<u4"),  # `span` of the backward in which it was issued; 0: none
        ("cell", "<u4"),
        ("step", "<u4"),  # earlier optimizer steps of the cell
        ("issue_ns", "<i8"),
        ("start_ns", "<i8"),  # start on the device; equals `issue_ns` on the CPU
        ("end_ns", "<i8"),
        ("blocked_ns", "<i8"),  # time that the caller was blocked
        ("state", "u1"),
        ("is_async", "?"),
        ("thread", "<u4"),  # 0: main thread; other threads are numbered in the order of appearance
        ("left_out", "?"),  # True: values not recorded, because the step was not sampled (see `%ddp_record`)
    ]
)

VALUE = np.dtype(
    [
        ("rank", "<i4"),
        ("call", "<u8"),  # call number in `CALL`; for a gradient, the span of its backward
        ("side", "u1"),
        ("dtype", TEXT),
        ("name", TEXT),  # for a gradient: name of the parameter
        ("numel", "<i8"),  # elements of all tensors of this side
        ("looked_at", "<i8"),  # number of elements that were read
        ("low", "<f8"),  # minimum (of the absolute value if complex); NaN if empty
        ("high", "<f8"),
        ("mean", "<f8"),
        ("nans", "<i8"),  # NaNs among the elements that were read
        ("infs", "<i8"),
        ("first_count", "u1"),
        ("first", "V128"),  # first elements, as bytes of their dtype
    ]
)

SPAN = np.dtype(
    [
        ("span", "<u4"),  # counter of spans on the rank
        ("rank", "<i4"),
        ("kind", "u1"),
        ("name", TEXT),  # model or optimizer; for a cell its prompt: "In [8]"
        ("cell", "<u4"),
        ("step", "<u4"),  # earlier optimizer steps of the cell
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("samples", "<i4"),  # batch size; -1: unknown
        ("thread", "<u4"),
        ("pipeline", "<u4"),  # `span` of the pipeline step that contains this action, or that this row is; 0: none
        ("stage", "<i2"),  # stage of an action; number of stages for a pipeline step
        ("microbatch", "<i4"),  # microbatch of an action; number of microbatches for a pipeline step
        ("is_training", "?"),  # for a forward: whether the model was in training mode
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
        ("is_given", "?"),  # True if the program gave the step; False if it is counted from 0 in each cell
        ("unit", "u1"),  # unit of `step`, an index of `STEP_UNITS`
    ]
)

RESOURCE = np.dtype(
    [
        ("rank", "<i4"),
        ("time_ns", "<i8"),
        ("rss_bytes", "<i8"),
        ("cpu_percent", "<f4"),  # 100 is one core
        ("host_used_bytes", "<i8"),
        ("host_total_bytes", "<i8"),
        ("gpu_allocated_bytes", "<i8"),  # memory of tensors; -1: no GPU
        ("gpu_reserved_bytes", "<i8"),
        ("gpu_peak_bytes", "<i8"),
        ("gpu_percent", "<f4"),  # NaN: unknown
        ("cores", "<u2"),  # number of cores that the rank may use; 0: unknown
        ("page_faults", "<i8"),  # minor page faults of the process so far; 0: not counted
        # Totals since the start of the process, from scheduler statistics; 0: not counted.
        ("ready_ns", "<i8"),  # time in which the main thread was ready to run but had no core
        ("ran_ns", "<i8"),  # CPU time of the process and its living child processes
        ("host_busy_ns", "<i8"),  # CPU time of the host, sum of all cores
        ("host_cores", "<u2"),
    ]
)

LAYOUT = np.dtype(
    [
        ("rank", "<i4"),
        ("time_ns", "<i8"),
        ("model", TEXT),
        ("buckets", TEXT),  # JSON: list of {"nbytes", "parameters"}, in the order of synchronisation
        ("is_rebuilt", "?"),
    ]
)

LOADER = np.dtype(
    [
        ("rank", "<i4"),
        ("time_ns", "<i8"),  # start of the first epoch in a cell
        ("name", TEXT),  # name of the loader, as in its spans
        ("cell", "<u4"),
        ("workers", "<u4"),
        ("is_persistent", "?"),  # True if workers persist between epochs
        ("batches", "<i8"),  # batches per epoch; -1: unknown
        ("prefetch", "<i4"),  # batches that each worker loads in advance; -1: none
    ]
)

INDICES = np.dtype(
    [
        ("rank", "<i4"),
        ("time_ns", "<i8"),  # time at which the program got the batch
        ("name", TEXT),  # name of the loader, as in its spans
        ("cell", "<u4"),
        ("step", "<u4"),  # earlier optimizer steps of the cell
        ("count", "<u4"),  # number of samples
        ("first", "<i8"),
        ("last", "<i8"),
        ("stride", "<i8"),  # difference of consecutive indices; 0: they differ, or there is one sample
    ]
)

RPC = np.dtype(
    [
        ("rank", "<i4"),  # rank that recorded this row
        ("side", "u1"),
        ("number", "<u8"),  # number of the call, equal on both sides
        ("kind", "u1"),  # this column and those up to `nbytes_back` are set by the caller
        ("src", "<i4"),  # caller; -1: see the row of the other side
        ("dst", "<i4"),
        ("function", TEXT),  # name in the user's API
        ("site", TEXT),
        ("parent", "<u8"),  # call in which this call was made; 0: none
        ("nbytes", "<i8"),  # size of function and arguments; -1: unknown
        ("nbytes_back", "<i8"),  # size of tensors in the result
        ("reference", "<u8"),  # reference that the call created, or whose value it fetches; 0: none
        ("error", TEXT),
        ("cell", "<u4"),  # cell that runs on this side
        ("start_ns", "<i8"),  # time of sending, or start of the function
        ("end_ns", "<i8"),  # time of the reply, or end of the function
        ("done_ns", "<i8"),  # completion of the callee's future, for `async_execution`
        ("thread", "<u4"),
    ]
)

REFERENCE = np.dtype(
    [
        ("rank", "<i4"),
        ("event", "u1"),
        ("reference", "<u8"),
        ("fork", "<u8"),  # 0: the owner's own reference
        ("owner", "<i4"),
        ("parent", "<i4"),  # rank that forked it; -1: none
        ("call", "<u8"),  # call in which it was forked; 0: none
        ("name", TEXT),  # type of the value
        ("cell", "<u4"),
        ("time_ns", "<i8"),
    ]
)

CONTEXT = np.dtype(
    [
        ("rank", "<i4"),
        ("event", "u1"),
        ("context", "<u8"),
        ("message", "<u8"),  # number of the message, for a pair of send and recv
        ("src", "<i4"),  # sender in the forward pass
        ("dst", "<i4"),
        ("call", "<u8"),  # call whose arguments or result the message carries
        ("nbytes", "<i8"),
        ("name", TEXT),  # name of the optimizer
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
    "indices": INDICES,
    "rpc": RPC,
    "reference": REFERENCE,
    "context": CONTEXT,
}
LATER = ("loader", "indices", "rpc", "reference", "context")  # tables that files of earlier versions lack
EARLIER = {  # dtypes of files of earlier versions, without the last columns
    "call": (np.dtype(CALL.descr[:-1]),),
    "span": (np.dtype(SPAN.descr[:-1]), np.dtype(SPAN.descr[:-4])),
    "metric": (np.dtype(METRIC.descr[:-1]), np.dtype(METRIC.descr[:-2])),
    "resource": tuple(np.dtype(RESOURCE.descr[:-left_out]) for left_out in (4, 5, 6)),
}
TEXTS = {  # `TEXT` columns of each table
    "call": ("op", "api", "group", "dtype", "shapes", "site", "module"),
    "value": ("dtype", "name"),
    "span": ("name",),
    "metric": ("name",),
    "resource": (),
    "layout": ("model", "buckets"),
    "loader": ("name",),
    "indices": ("name",),
    "rpc": ("function", "site", "error"),
    "reference": ("name",),
    "context": ("name",),
}
TIMES = {  # columns with times of the rank's clock
    "call": ("issue_ns", "start_ns", "end_ns"),
    "value": (),
    "span": ("start_ns", "end_ns"),
    "metric": ("time_ns",),
    "resource": ("time_ns",),
    "layout": ("time_ns",),
    "loader": ("time_ns",),
    "indices": ("time_ns",),
    "rpc": ("start_ns", "end_ns", "done_ns"),
    "reference": ("time_ns",),
    "context": ("start_ns", "end_ns"),
}


def upgraded(table: str, rows: Rows) -> Rows:
    """Convert rows of an earlier version to this version. New columns are 0.

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
    """Return the recorded first elements of a tensor as a NumPy array; bfloat16 as float32.

    Args:
        row: one row of `VALUE`.
        dtype: dtype of the tensor, without "torch.".

    Example:
        >>> row = np.zeros((), VALUE)
        >>> row["first_count"], row["first"] = 2, np.array([1.5, 2.0], "<f4").tobytes().ljust(FIRST_BYTES, b"\\0")
        >>> first_values(row, "float32").tolist()
        [1.5, 2.0]
    """
    return as_array(row["first"].tobytes(), dtype)[: int(row["first_count"])]


def as_array(data: bytes, dtype: str) -> npt.NDArray[np.generic]:
    """Convert the bytes of a torch tensor to a NumPy array: bfloat16 as float32, unknown dtypes as bytes."""
    array = np.frombuffer(data, DTYPES.get(dtype, "|u1"))
    if dtype == "bfloat16":  # bfloat16 is the upper half of a float32
        return (array.astype("<u4") << 16).view("<f4")
    return array
