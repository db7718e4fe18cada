"""The cell that runs a collective. It contains the line of code exactly as the lesson shows it."""

from __future__ import annotations

from ddp_notebook.lessons.collectives import theory
from ddp_notebook.lessons.collectives.theory import Array, CollectiveCall, Values

_RESULT_IN = {"gather": "out", "all_gather": "out", "scatter": "y", "reduce_scatter": "y"}


def lines(call: CollectiveCall, kind: str = "", wrong_rank: int = 0) -> list[str]:
    """Return the lines of the call, and of the wrong call of one rank."""
    right = [call.line] + ["work.wait()"] * (call.op == "isend/irecv")
    if not kind:
        return right
    wrong = {
        "operation": _other_operation(call),
        "size": ["# with one element more", *right],
        "dtype": [f"# with {_other_dtype(call.dtype)}", *right],
        "missing rank": ["pass  # does something else"],
        "root": _other_root(call, wrong_rank),
    }[kind]
    return [
        f"if rank == {wrong_rank}:",
        *(f"    {line}" for line in wrong),
        "else:",
        *(f"    {line}" for line in right),
    ]


def _other_operation(call: CollectiveCall) -> list[str]:
    group = ", group=group" if call.group else ""
    if call.op in theory.POINT_TO_POINT:
        return [f"dist.broadcast(x, src={call.root})"]
    if call.op == "broadcast":
        return [f"dist.all_reduce(x{group})"]
    return [f"dist.broadcast(x, src={call.ranks[0]}{group})"]


def _other_root(call: CollectiveCall, wrong_rank: int) -> list[str]:
    if call.op in theory.POINT_TO_POINT:
        others = [rank for rank in range(call.world_size) if rank not in (call.root, call.peer)] or [call.peer]
        if wrong_rank == call.root:
            return [f"dist.send(x, dst={others[0]})"] if others != [call.peer] else ["dist.recv(x, src=1 - rank)"]
        return [f"dist.recv(x, src={others[0]})"] if others != [call.peer] else ["dist.send(x, dst=1 - rank)"]
    other = next(rank for rank in call.ranks if rank != call.root)
    line = call.line.replace(f"src={call.root}", f"src={other}").replace(f"dst={call.root}", f"dst={other}")
    return [line.replace(f"rank == {call.root}", f"rank == {other}")]


def cell(call: CollectiveCall, inputs: Values, kind: str = "", wrong_rank: int = 0) -> str:
    """Return the code of the cell. It contains the line of code exactly as the lesson shows it."""
    guard = [f"if rank not in {list(call.actors)}: return"] if call.op in theory.POINT_TO_POINT else []
    body = [
        "x, y, chunks, out = tensors",
        *guard,
        *lines(call, kind, wrong_rank),
    ]
    sizes = {rank: _sizes(call, inputs[rank], rank, kind, wrong_rank) for rank in range(call.world_size)}
    dtypes = {wrong_rank: _other_dtype(call.dtype)} if kind == "dtype" else {}
    place = _RESULT_IN.get(call.op, "x")
    if call.op == "all_to_all":
        place = "y" if call.is_single else "out"
    run = (
        f"_lesson_ranks.barrier(_lesson_call, _lesson_tensors, {call.ranks}, {not call.group})"
        if call.op == "barrier" and not kind
        else f"_lesson_ranks.collective(_lesson_call, _lesson_tensors, {place!r}, {call.ranks}, {not call.group})"
    )
    return "\n".join(
        [
            "def _lesson_call(tensors, group, rank, size):",
            *(f"    {line}" for line in body),
            "from ddp_notebook.lessons import ranks as _lesson_ranks",
            f"_lesson_tensors = _lesson_ranks.tensors(*{sizes}[rank], {dtypes}.get(rank, {call.dtype!r}))",
            f"_lesson_told = {run}",
        ]
    )


def _sizes(
    call: CollectiveCall, values: Array, rank: int, kind: str, wrong_rank: int
) -> tuple[list[float], list[int], list[int]]:
    """Return the numbers of a rank, the sizes of its input chunks, and the sizes of its output tensors."""
    inputs = values.tolist()
    chunks = list(call.chunk_sizes) if call.op in theory.CHUNKED and inputs else []
    out = _output_sizes(call, rank)
    if rank == wrong_rank:
        if kind == "root" and call.op in ("gather", "scatter"):
            # The wrong rank uses another root, or itself, and needs the buffers for that.
            out = out or [call.sizes[0]] * len(call.ranks)
        if kind == "size":
            added = len(chunks) if chunks else 0 if call.op == "scatter" else 1
            return [*inputs, *[0.0] * added], [size + 1 for size in chunks], [size + 1 for size in out]
    return inputs, chunks, out


def _output_sizes(call: CollectiveCall, rank: int) -> list[int]:
    """Return the sizes of the output tensors of a rank; [] if the result is in its input, or if it has none."""
    if rank not in call.ranks:
        return []
    n, chunk_size = call.sizes[0], call.chunk_sizes[call.ranks.index(rank)]
    if call.op == "all_gather" or (call.op == "gather" and rank == call.root):
        return [n] * len(call.ranks)
    if call.op in ("scatter", "reduce_scatter"):
        return [chunk_size]
    return [chunk_size] * len(call.ranks) if call.op == "all_to_all" else []


def _other_dtype(dtype: str) -> str:
    return "int32" if dtype != "int32" else "float32"
