"""Results of each collective, computed with NumPy, for comparison with the results of the ranks.

The input of a rank is one flat list of numbers. For an operation that sends chunks, it contains the chunks one after
another, one for each rank.

Source: https://docs.pytorch.org/docs/stable/distributed.html#collective-functions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ddp_notebook.errors import UsageError

Array = npt.NDArray[Any]
Values = dict[int, Array]  # by rank
T = TypeVar("T")

OPS = (
    "broadcast",
    "reduce",
    "all_reduce",
    "gather",
    "all_gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "send/recv",
    "isend/irecv",
)
REDUCE_OPS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR")
DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8")
WRONG = ("operation", "size", "dtype", "missing rank", "root")

POINT_TO_POINT = ("send/recv", "isend/irecv")
REDUCING = ("reduce", "all_reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter", *POINT_TO_POINT)
CHUNKED = ("scatter", "reduce_scatter", "all_to_all")  # the input has a chunk for each rank
MAY_BE_UNEVEN = ("all_to_all",)  # gloo rejects uneven chunks for the others

HAS_LISTS_TO_ALL = tuple(map(int, version("torch").split(".")[:2])) >= (2, 12)  # gloo rejects lists in earlier versions

_BITWISE = ("BAND", "BOR", "BXOR")
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)
_LEAVES = "barrier"
_CLOCKS_MS = 10  # largest difference between the clocks of two hosts
_REDUCE = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "AVG": np.add,  # divided at the end
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One collective, as called by all its ranks.

    Args:
        op: One of `OPS`.
        world_size: Number of ranks of the session.
        reduce_op: One of `REDUCE_OPS`, for operations that reduce.
        root: A rank of the session: source, destination, or sender of a message.
        peer: Receiver of a message.
        group: Ranks that take part; empty for all ranks.
        dtype: One of `DTYPES`.
        sizes: Elements of each rank's input, or of each chunk; for all_to_all also one number for each receiver.
    """

    op: str
    world_size: int
    reduce_op: str = "SUM"
    root: int = 0
    peer: int = 1
    group: tuple[int, ...] = ()
    dtype: str = "float32"
    sizes: tuple[int, ...] = (4,)
    ranks: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", self.group or tuple(range(self.world_size)))
        _check(self)

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Return the sizes of the chunks in one rank's input, one for each rank of the group."""
        return self.sizes if len(self.sizes) > 1 else self.sizes * len(self.ranks)

    @property
    def is_uneven(self) -> bool:
        return len(set(self.chunk_sizes)) > 1

    @property
    def is_single(self) -> bool:
        """Return whether this is an all_to_all of one tensor, and not of lists of tensors."""
        return self.op == "all_to_all" and (self.is_uneven or not HAS_LISTS_TO_ALL)

    @property
    def actors(self) -> tuple[int, ...]:
        """Return the ranks that call the collective."""
        return (self.root, self.peer) if self.op in POINT_TO_POINT else self.ranks

    def input_size(self, rank: int) -> int:
        """Return the number of elements of a rank's input."""
        if rank not in self.ranks:
            return 0
        if self.op == _LEAVES:
            return 1  # the delay of the rank in milliseconds
        if self.op in POINT_TO_POINT:
            return self.sizes[0] if rank in (self.root, self.peer) else 0
        if self.op == "scatter" and rank != self.root:
            return 0
        return sum(self.chunk_sizes) if self.op in CHUNKED else self.sizes[0]

    @property
    def line(self) -> str:
        """Return the call as code."""
        group = ", group=group" if self.group else ""
        op = f", op=dist.ReduceOp.{self.reduce_op}" if self.op in REDUCING else ""
        root, peer = self.root, self.peer
        if self.is_single:
            mine = f"[{', '.join(map(str, self.chunk_sizes))}]"
            split = f", output_split_sizes=[len(y) // size] * size, input_split_sizes={mine}" if self.is_uneven else ""
            return f"dist.all_to_all_single(y, x{split}{group})"
        return {
            "broadcast": f"dist.broadcast(x, src={root}{group})",
            "reduce": f"dist.reduce(x, dst={root}{op}{group})",
            "all_reduce": f"dist.all_reduce(x{op}{group})",
            "gather": f"dist.gather(x, out if rank == {root} else None, dst={root}{group})",
            "all_gather": f"dist.all_gather(out, x{group})",
            "scatter": f"dist.scatter(y, chunks if rank == {root} else None, src={root}{group})",
            "reduce_scatter": f"dist.reduce_scatter(y, chunks{op}{group})",
            "all_to_all": f"dist.all_to_all(out, chunks{group})",
            "barrier": f"dist.barrier({'group=group' if group else ''})",
            "send/recv": f"dist.send(x, dst={peer}) if rank == {root} else dist.recv(x, src={root})",
            "isend/irecv": f"work = dist.isend(x, dst={peer}) if rank == {root} else dist.irecv(x, src={root})",
        }[self.op]

    @property
    def formula(self) -> str:
        """Return the result as one equation."""
        root = self.root
        sign = {
            "SUM": "sum over r of {}",
            "PRODUCT": "product over r of {}",
            "MIN": "min over r of {}",
            "MAX": "max over r of {}",
            "AVG": "(sum over r of {}) / N",
            "BAND": "bitwise and over r of {}",
            "BOR": "bitwise or over r of {}",
            "BXOR": "bitwise xor over r of {}",
        }[self.reduce_op]
        return {
            "broadcast": f"out_k[i] = in_{root}[i]  for every rank k",
            "reduce": f"out_{root}[i] = {sign.format('in_r[i]')};  elsewhere not specified",
            "all_reduce": f"out_k[i] = {sign.format('in_r[i]')}  for every rank k",
            "gather": f"out_{root} = [in_0, in_1, ..., in_N-1];  elsewhere nothing",
            "all_gather": "out_k = [in_0, in_1, ..., in_N-1]  for every rank k",
            "scatter": f"out_k = chunk k of in_{root}",
            "reduce_scatter": f"out_k = {sign.format('chunk k of in_r')}",
            "all_to_all": "chunk r of out_k = chunk k of in_r",
            "barrier": "leave_k = max over r of arrive_r  for every rank k",
            "send/recv": f"out_{self.peer}[i] = in_{root}[i]",
            "isend/irecv": f"out_{self.peer}[i] = in_{root}[i], once wait() has returned",
        }[self.op]


def legal_reduce_ops(dtype: str) -> tuple[str, ...]:
    """Return the reduce operations that torch supports for a dtype.

    Example:
        >>> legal_reduce_ops("float32")
        ('SUM', 'PRODUCT', 'MIN', 'MAX', 'AVG')
        >>> "AVG" in legal_reduce_ops("int64")  # torch refuses to round
        False
    """
    if dtype.startswith("float"):
        return tuple(op for op in REDUCE_OPS if op not in _BITWISE)
    return tuple(op for op in REDUCE_OPS if op != "AVG")


def default_inputs(call: CollectiveCall) -> Values:
    """Return inputs that show which ranks have contributed to a result.

    For sums, rank r has multiples of 10^r, so that the digits of a sum show its contributors. For products, ranks have
    primes. For bitwise operations, each rank has its own bit. Otherwise, the order of the numbers differs between
    elements.

    Example:
        >>> default_inputs(CollectiveCall(op="all_reduce", world_size=3, sizes=(2,)))
        {0: array([1., 2.], dtype=float32), 1: array([10., 20.], dtype=float32), 2: array([100., 200.], dtype=float32)}
    """
    found = {}
    for rank in range(call.world_size):
        n = call.input_size(rank)
        found[rank] = np.array([_default(call, rank, at) for at in range(n)], call.dtype)
    return found


def _default(call: CollectiveCall, rank: int, at: int) -> float:
    if call.op == _LEAVES:
        return 40.0 * (rank % 4)
    if call.op in POINT_TO_POINT and rank == call.peer:
        return 0  # the receive buffer
    if call.op in REDUCING and call.reduce_op in _BITWISE:
        return (
            (1 << (rank % 7)) | (128 if at % 2 else 0) if call.reduce_op != "BAND" else 255 ^ (1 << ((rank + at) % 8))
        )
    if call.op in REDUCING and call.reduce_op == "PRODUCT":
        return _PRIMES[rank % 8] if at % 2 == 0 or call.dtype in ("uint8", "float16") else _PRIMES[rank % 8] + at
    if call.op in REDUCING and call.reduce_op in ("MIN", "MAX"):
        return (rank * 5 + at * 3) % 11
    if call.dtype in ("uint8", "float16"):
        return (rank + 1) * 10 + at
    return 10.0 ** (rank % 8) * (at % 9 + 1)


def expected(call: CollectiveCall, inputs: Mapping[int, Sequence[float] | Array]) -> Values:
    """Return the results of the ranks. Ranks whose result torch does not specify are left out: all but the root of a
    reduce.

    Example:
        >>> call = CollectiveCall(op="reduce_scatter", world_size=2, sizes=(1,))
        >>> expected(call, {0: [1, 2], 1: [10, 20]})
        {0: array([11.], dtype=float32), 1: array([22.], dtype=float32)}
    """
    mine = {rank: np.asarray(inputs[rank], call.dtype) for rank in call.ranks}
    values = list(mine.values())
    ranks, root = call.ranks, call.root
    match call.op:
        case "broadcast":
            return _on_each_rank(call, mine[root])
        case "reduce":
            return {root: _reduce(call, values)}
        case "all_reduce":
            return _on_each_rank(call, _reduce(call, values))
        case "gather":
            return dict.fromkeys(ranks, np.array([], call.dtype)) | {root: np.concatenate(values)}
        case "all_gather":
            return _on_each_rank(call, np.concatenate(values))
        case "scatter":
            return dict(zip(ranks, split(mine[root], call.chunk_sizes), strict=True))
        case "reduce_scatter":
            return dict(zip(ranks, split(_reduce(call, values), call.chunk_sizes), strict=True))
        case "all_to_all":
            chunks = [split(one, call.chunk_sizes) for one in values]
            return dict(zip(ranks, map(np.concatenate, zip(*chunks, strict=True)), strict=True))
        case "barrier":
            return _on_each_rank(call, max(values, key=lambda one: float(one[0])))
        case _:
            return {root: mine[root].copy(), call.peer: mine[root].copy()}


def _on_each_rank(call: CollectiveCall, result: T) -> dict[int, T]:
    """Return a copy of the same result for each rank of the group."""
    return {rank: copy(result) for rank in call.ranks}


def contributors(call: CollectiveCall) -> dict[int, list[tuple[int, ...]]]:
    """Return by rank the ranks whose data each element of the result contains: `[(0, 1), (0, 1)]`."""
    ranks, root = call.ranks, call.root
    n = call.sizes[0]
    match call.op:
        case "broadcast":
            return _on_each_rank(call, [(root,)] * n)
        case "reduce":
            # Other ranks hold intermediate results, which depend on the algorithm.
            return {rank: [ranks if rank == root else ()] * n for rank in ranks}
        case "all_reduce":
            return _on_each_rank(call, [ranks] * n)
        case "gather":
            return {rank: _in_turn(ranks, n) if rank == root else [] for rank in ranks}
        case "all_gather":
            return _on_each_rank(call, _in_turn(ranks, n))
        case "scatter":
            return {rank: [(root,)] * size for rank, size in zip(ranks, call.chunk_sizes, strict=True)}
        case "reduce_scatter":
            return {rank: [ranks] * size for rank, size in zip(ranks, call.chunk_sizes, strict=True)}
        case "all_to_all":
            return {rank: _in_turn(ranks, size) for rank, size in zip(ranks, call.chunk_sizes, strict=True)}
        case "barrier":
            return _on_each_rank(call, [ranks])
        case _:
            return {root: [(root,)] * n, call.peer: [(root,)] * n}


def _in_turn(ranks: Sequence[int], n: int) -> list[tuple[int, ...]]:
    """Return the contributors if the data of all ranks is concatenated, `n` elements each."""
    return [(src,) for src in ranks for _ in range(n)]


def split(values: Array, sizes: Sequence[int]) -> list[Array]:
    """Split a flat array into chunks of these sizes."""
    return [chunk.copy() for chunk in np.split(values, np.cumsum(sizes)[:-1])]


def agree(call: CollectiveCall, wanted: Array, found: Array) -> list[bool]:
    """Return for each element whether a result is as expected. Floats may differ by the rounding of another summation
    order.

    A barrier only guarantees that no rank leaves before the last one has arrived. On a busy machine a rank may leave
    later.
    """
    if len(wanted) != len(found):
        return [False] * max(len(wanted), len(found))
    first, second = np.asarray(wanted, np.float64), np.asarray(found, np.float64)
    if call.op == _LEAVES:
        return [bool(left_ms >= came_ms - _CLOCKS_MS) for came_ms, left_ms in zip(first, second, strict=True)]
    if call.dtype.startswith("float"):
        slack = 32 * float(np.finfo(call.dtype).eps)
        return [bool(same) for same in np.isclose(first, second, rtol=slack, atol=slack, equal_nan=True)]
    return [bool(same) for same in np.asarray(wanted) == np.asarray(found)]


def is_right(call: CollectiveCall, guess: Array, found: Array, wanted: Array) -> list[bool]:
    """Return for each element whether a prediction matches the result.

    For a barrier, it must match the expected value within 30 ms, because the result depends on the load of the machine.
    """
    if call.op == _LEAVES and len(guess) == len(wanted):
        return [bool(abs(left_ms - came_ms) <= 30) for left_ms, came_ms in zip(guess, wanted, strict=True)]
    return agree(call, found, guess)


def _reduce(call: CollectiveCall, parts: Sequence[Array]) -> Array:
    with np.errstate(over="ignore"):  # integers wrap, as on the ranks
        # In double precision, because gloo, NCCL and NumPy add in different orders.
        exact = call.dtype.startswith("float")
        found = parts[0].astype(np.float64 if exact else call.dtype)
        for part in parts[1:]:
            found = _REDUCE[call.reduce_op](found, part)
        return np.asarray(found / len(parts) if call.reduce_op == "AVG" else found).astype(call.dtype)


def _check(call: CollectiveCall) -> None:
    def must(holds: bool, words: str) -> None:
        if not holds:
            raise UsageError(words)

    must(call.op in OPS, f"op must be one of {', '.join(OPS)}, got {call.op!r}")
    must(call.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, got {call.dtype!r}")
    known = range(call.world_size)
    must(
        all(rank in known for rank in call.ranks) and len(set(call.ranks)) == len(call.ranks),
        f"group must be different ranks from 0 to {call.world_size - 1}, got {list(call.ranks)}",
    )
    must(len(call.ranks) > 1, "a group needs at least two ranks")
    must(call.group == tuple(sorted(call.group)), f"group must be in ascending order, got {list(call.group)}")
    must(call.reduce_op in REDUCE_OPS, f"reduce_op must be one of {', '.join(REDUCE_OPS)}, got {call.reduce_op!r}")
    if call.op in REDUCING:
        legal = legal_reduce_ops(call.dtype)
        must(
            call.reduce_op in legal,
            f"reduce_op for {call.dtype} must be one of {', '.join(legal)}, got {call.reduce_op}",
        )
    if call.op in ROOTED:
        must(call.root in call.ranks, f"root {call.root} is not in the group of ranks {list(call.ranks)}")
    if call.op in POINT_TO_POINT:
        must(call.peer in call.ranks, f"receiver {call.peer} is not in the group of ranks {list(call.ranks)}")
        must(call.peer != call.root, f"rank {call.root} cannot send to itself")
    must(
        all(size >= 0 for size in call.sizes) and sum(call.sizes) > 0,
        f"sizes must have a positive sum, got {list(call.sizes)}",
    )
    if len(call.sizes) > 1:
        must(
            call.op in MAY_BE_UNEVEN,
            f"{call.op} needs the same size on all ranks; only all_to_all supports different sizes",
        )
        must(
            len(call.sizes) == len(call.ranks),
            f"sizes must have one entry per rank of the group ({len(call.ranks)}), got {list(call.sizes)}",
        )
