"""Code of the lessons on the ranks: collectives with given inputs, and algorithms made of isend and irecv.

Only ranks import this module, so it may import torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

Moves = list[dict[str, Any]]
Algorithm = Generator[Moves, None, None]

_MOST_VALUES = 4096  # for larger tensors a step returns only the first value of each chunk
_MOST_KEPT = 8


# ---- one collective


class Tensors(NamedTuple):
    """Variables of a lesson's line of code: `x` the input, `chunks` its pieces, `y` and `out` the output."""

    x: torch.Tensor
    y: torch.Tensor
    chunks: list[torch.Tensor]
    out: list[torch.Tensor]


def tensors(inputs: Sequence[float], chunk_sizes: Sequence[int], out_sizes: Sequence[int], dtype: str) -> Tensors:
    """Create the tensors on this rank's device.

    Args:
        inputs: Numbers of this rank.
        chunk_sizes: Sizes of the pieces of `x`.
        out_sizes: Sizes of the tensors of `out`; `y` has their total size.
    """
    device, kind = _device(), getattr(torch, dtype)
    x = torch.tensor(list(inputs), dtype=kind, device=device)
    out = [torch.zeros(size, dtype=kind, device=device) for size in out_sizes]
    y = torch.zeros(sum(out_sizes), dtype=kind, device=device)
    return Tensors(x, y, list(x.split(list(chunk_sizes))) if sum(chunk_sizes) == len(x) else [], out)


def collective(
    call: Callable[[Tensors, Any, int, int], Any],
    made: Tensors,
    result: str,
    ranks: Sequence[int],
    is_whole: bool,
) -> np.ndarray[Any, Any] | None:
    """Run one call, and return the result of this rank.

    Args:
        call: `(tensors, group, rank, size)`. If it returns an object with a `wait` method, that is called.
        made: The tensors.
        result: Name of the tensors with the result: "x", "y", "out" or "".
        ranks: Ranks of the group.
        is_whole: The group has all ranks.
    """
    group = None if is_whole else dist.new_group(list(ranks))
    rank = dist.get_rank()
    try:
        if rank not in ranks:
            return None
        work = call(made, group, rank, len(ranks))
        if hasattr(work, "wait"):
            work.wait()
        return _result(made, result)
    finally:
        if group is not None and rank in ranks:
            dist.destroy_process_group(group)


def _result(made: Tensors, result: str) -> np.ndarray[Any, Any]:
    found = {"x": [made.x], "y": [made.y], "out": made.out, "": []}[result]
    return torch.cat(found).cpu().numpy() if found else np.array([])


def barrier(call: Callable[[Tensors, Any, int, int], Any], made: Tensors, ranks: Sequence[int], is_whole: bool) -> Any:
    """Call a barrier after the delay in the input, in milliseconds.

    Returns:
        (2,) The times in ns of this rank's clock at which its delay started, and at which it left the barrier.
    """
    began_and_left_ns = np.zeros(2, np.int64)

    def late(made: Tensors, group: Any, rank: int, size: int) -> None:
        dist.barrier(group=group)  # all ranks start at about the same time
        began_and_left_ns[0] = time.monotonic_ns()
        time.sleep(float(made.x[0]) / 1000)
        call(made, group, rank, size)
        began_and_left_ns[1] = time.monotonic_ns()

    took_part = collective(late, made, "", ranks, is_whole) is not None
    return began_and_left_ns if took_part else None


# ---- algorithms


def ring_all_reduce(x: torch.Tensor, chunks: list[slice], rank: int, n: int) -> Algorithm:
    """Send each chunk round the ring twice: the first time to add it up, the second time to distribute the sum."""
    left, right = (rank - 1) % n, (rank + 1) % n
    for s in range(n - 1):
        yield exchange(x, [(right, chunks[(rank - s) % n])], [(left, chunks[(rank - s - 1) % n])], add=True)
    for s in range(n - 1):
        yield exchange(x, [(right, chunks[(rank + 1 - s) % n])], [(left, chunks[(rank - s) % n])])


def ring_reduce_scatter(x: torch.Tensor, chunks: list[slice], rank: int, n: int) -> Algorithm:
    """Run the first half of the ring, starting one chunk earlier, so that rank i ends with chunk i."""
    left, right = (rank - 1) % n, (rank + 1) % n
    for s in range(n - 1):
        yield exchange(x, [(right, chunks[(rank - s - 1) % n])], [(left, chunks[(rank - s - 2) % n])], add=True)


def ring_all_gather(x: torch.Tensor, chunks: list[slice], rank: int, n: int) -> Algorithm:
    """Send the chunk of each rank round the ring once."""
    left, right = (rank - 1) % n, (rank + 1) % n
    for s in range(n - 1):
        yield exchange(x, [(right, chunks[(rank - s) % n])], [(left, chunks[(rank - s - 1) % n])])


def tree_all_reduce(x: torch.Tensor, chunks: list[slice], rank: int, n: int) -> Algorithm:
    """Add up in a binary tree with the ranks as leaves, then send the sum back down."""
    whole, distances = slice(0, len(x)), [1 << level for level in range((n - 1).bit_length())]
    for is_down, distance in [*((False, one) for one in distances), *((True, one) for one in reversed(distances))]:
        is_high = rank % (2 * distance) == distance
        has_high = rank % (2 * distance) == 0 and rank + distance < n
        to_low, to_high = [(rank - distance, whole)] if is_high else [], [(rank + distance, whole)] if has_high else []
        yield exchange(x, to_high, to_low) if is_down else exchange(x, to_low, to_high, add=True)


def halving_and_doubling(x: torch.Tensor, chunks: list[slice], rank: int, n: int) -> Algorithm:
    """Run recursive halving, then recursive doubling, among the first 2^k ranks.

    Every other rank sends its data to a partner before, and receives the sum after.
    """
    core = 1 << (n.bit_length() - 1)
    whole = slice(0, len(x))
    starts = [*(chunk.start for chunk in chunks[:core]), len(x)]  # the last block contains the chunks beyond 2^k
    is_extra, has_extra = rank >= core, rank + core < n
    if core != n:
        yield exchange(
            x, [(rank - core, whole)] if is_extra else [], [(rank + core, whole)] if has_extra else [], add=True
        )
    first, last, distance = 0, core, core // 2
    done = []
    while distance:
        if is_extra:
            yield []
        else:
            middle = first + distance
            low, high = slice(starts[first], starts[middle]), slice(starts[middle], starts[last])
            kept, sent = (low, high) if rank < middle else (high, low)
            yield exchange(x, [(rank ^ distance, sent)], [(rank ^ distance, kept)], add=True)
            first, last = (first, middle) if rank < middle else (middle, last)
            done.append((rank ^ distance, kept, sent))
        distance //= 2
    for partner, kept, sent in reversed(done):
        yield exchange(x, [(partner, kept)], [(partner, sent)])
    if is_extra:
        for _ in range(core.bit_length() - 1):
            yield []
    if core != n:
        yield exchange(x, [(rank + core, whole)] if has_extra else [], [(rank - core, whole)] if is_extra else [])


def parameter_server(x: torch.Tensor, chunks: list[slice], rank: int, n: int) -> Algorithm:
    """Send all data to rank 0, which adds it up and sends the sum to every rank."""
    whole, others = slice(0, len(x)), range(1, n)
    if rank == 0:
        yield exchange(x, [], [(other, whole) for other in others], add=True)
        yield exchange(x, [(other, whole) for other in others], [])
    else:
        yield exchange(x, [(0, whole)], [], add=True)
        yield exchange(x, [], [(0, whole)])


def naive_all_reduce(x: torch.Tensor, chunks: list[slice], rank: int, n: int) -> Algorithm:
    """Send all data from every rank to every other rank."""
    whole, own = slice(0, len(x)), x.clone()
    for s in range(1, n):
        yield exchange(x, [((rank + s) % n, whole)], [((rank - s) % n, whole)], add=True, source=own)


ALGORITHMS: dict[str, Callable[[torch.Tensor, list[slice], int, int], Algorithm]] = {
    "ring all_reduce": ring_all_reduce,
    "tree all_reduce": tree_all_reduce,
    "halving and doubling": halving_and_doubling,
    "parameter server": parameter_server,
    "naive all_reduce": naive_all_reduce,
    "ring all_gather": ring_all_gather,
    "ring reduce_scatter": ring_reduce_scatter,
}


def exchange(
    x: torch.Tensor,
    sends: Iterable[tuple[int, slice]],
    receives: Iterable[tuple[int, slice]],
    *,
    add: bool = False,
    source: torch.Tensor | None = None,
) -> Moves:
    """Send parts of x and receive others at the same time. Return the sent parts.

    Args:
        sends: Destinations and parts.
        receives: Sources and parts.
        add: Every receiver, including this rank, adds the received data instead of replacing its own.
        source: Tensor whose parts are sent; None for the current x.
    """
    outgoing = [(peer, part) for peer, part in sends if part.stop > part.start]  # empty parts are not sent
    incoming = [(peer, part) for peer, part in receives if part.stop > part.start]
    # Data in transfer must not change, so data is received into separate buffers.
    buffers = [torch.empty_like(x[part]) for _, part in incoming]
    operations = [dist.P2POp(dist.isend, (x if source is None else source)[part], peer) for peer, part in outgoing]
    operations += [dist.P2POp(dist.irecv, buffer, peer) for buffer, (peer, _) in zip(buffers, incoming, strict=True)]
    # One batch: with NCCL a send would block the receive after it, on both ranks.
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    if _link is not None:
        _link.occupy([x[part].nbytes for _, part in outgoing], [buffer.nbytes for buffer in buffers])
    for buffer, (_, part) in zip(buffers, incoming, strict=True):
        x[part] = x[part] + buffer if add else buffer
    return [
        {"to": peer, "start": part.start, "stop": part.stop, "add": add, "fresh": source is not None}
        for peer, part in outgoing
    ]


class Link(NamedTuple):
    """A simulated network link of this rank: each direction takes `alpha_s` a message, and carries `bytes_s`."""

    alpha_s: float
    bytes_s: float

    def occupy(self, sent: Sequence[int], received: Sequence[int]) -> None:
        """Sleep for as long as the messages of an exchange need. Both directions are used at the same time."""
        time.sleep(max(len(one) * self.alpha_s + sum(one) / self.bytes_s for one in (sent, received)))


_link: Link | None = None


class RunningAlgorithm(NamedTuple):
    """An unfinished algorithm on this rank."""

    x: torch.Tensor
    original: torch.Tensor
    chunks: list[slice]
    moves: Algorithm


_running: dict[str, RunningAlgorithm] = {}


def start(key: str, algorithm: str, inputs: Sequence[float] | int, sizes: Sequence[int], dtype: str) -> dict[str, Any]:
    """Start an algorithm without moving data.

    Args:
        key: Key of the algorithm for `step`.
        inputs: Numbers of this rank, or how many to create.
        sizes: Elements of the chunks, one for each rank.
    """
    rank, n, device = dist.get_rank(), dist.get_world_size(), _device()
    kind = getattr(torch, dtype)
    if isinstance(inputs, int):
        x = (torch.arange(inputs, device=device) % 9 + 1).to(kind) * 10 ** (rank % 4)
    else:
        x = torch.tensor(list(inputs), dtype=kind, device=device)
    ends = list(accumulate(sizes))
    chunks = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    if algorithm == "ring all_gather":  # at the start, a rank has only its own chunk
        mine = x[chunks[rank]].clone()
        x.zero_()
        x[chunks[rank]] = mine
    while len(_running) >= _MOST_KEPT:
        del _running[next(iter(_running))]
    _running[key] = RunningAlgorithm(x, x.clone(), chunks, ALGORITHMS[algorithm](x, chunks, rank, n))
    return _tell(key, [])


def step(key: str) -> dict[str, Any]:
    """Run one step. Return the sent parts and the current data of this rank."""
    moves = next(_running[key].moves, None)
    return _tell(key, moves or [])


def rest(key: str) -> None:
    """Run all remaining steps."""
    for _ in _running[key].moves:
        pass


def whole(key: str) -> np.ndarray[Any, Any]:
    """Return all numbers of this rank."""
    return _running[key].x.cpu().numpy()


def real(key: str, algorithm: str) -> np.ndarray[Any, Any]:
    """Return the result of the torch.distributed call on the same inputs."""
    one = _running[key]
    x, rank = one.original.clone(), dist.get_rank()
    parts = [x[chunk] for chunk in one.chunks]
    is_even = len({len(part) for part in parts}) == 1
    if algorithm == "ring all_gather":
        if is_even:
            dist.all_gather(parts, parts[rank].clone())
        else:  # all_gather requires equal sizes; NCCL does the same for unequal sizes
            for source, part in enumerate(parts):
                if len(part):
                    dist.broadcast(part, src=source)
        return x.cpu().numpy()
    if algorithm == "ring reduce_scatter":
        mine = torch.empty_like(parts[rank])
        if is_even:
            dist.reduce_scatter(mine, parts)
            return mine.cpu().numpy()
        for owner, part in enumerate(parts):
            if len(part):
                dist.reduce(part, dst=owner)
        return parts[rank].cpu().numpy()
    dist.all_reduce(x)
    return x.cpu().numpy()


def _tell(key: str, moves: Moves) -> dict[str, Any]:
    one = _running[key]
    is_whole = len(one.x) <= _MOST_VALUES
    values = [one.x[chunk] if is_whole else one.x[chunk][:1] for chunk in one.chunks]
    return {"moves": moves, "values": [value.cpu().numpy() for value in values]}


# ---- times


def time_algorithms(
    algorithms: Sequence[str], sizes: Sequence[int], repeats: int, link: tuple[float, float] | None = None
) -> dict[tuple[str, int], list[float]]:
    """Return the seconds of each run on this rank, by algorithm and bytes. "all_reduce" is the call of torch.

    Args:
        link: Seconds per message and bytes per second of a simulated link of each rank; None for no simulation.
    """
    global _link
    _link = None if link is None else Link(*link)
    try:
        return _times(algorithms, sizes, repeats)
    finally:
        _link = None


def _times(algorithms: Sequence[str], sizes: Sequence[int], repeats: int) -> dict[tuple[str, int], list[float]]:
    rank, n, device = dist.get_rank(), dist.get_world_size(), _device()
    found: dict[tuple[str, int], list[float]] = {}
    for nbytes in sizes:
        x, chunks = _data(nbytes, n, device)
        for name in algorithms:
            times = found[name, nbytes] = []
            for _ in range(repeats + 1):
                y = x.clone()
                dist.barrier()
                began_s = time.perf_counter()
                if name in ALGORITHMS:
                    for _ in ALGORITHMS[name](y, chunks, rank, n):
                        pass
                else:
                    dist.all_reduce(y)
                _finish(device)
                times.append(time.perf_counter() - began_s)
            del times[0]  # the first run opens connections
    return found


def run_once(algorithm: str, nbytes: int) -> None:
    """Run an algorithm once on `nbytes` bytes, so that its sends can be counted."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x, chunks = _data(nbytes, n, _device())
    for _ in ALGORITHMS[algorithm](x, chunks, rank, n):
        pass


def _data(nbytes: int, n: int, device: torch.device) -> tuple[torch.Tensor, list[slice]]:
    x = torch.ones(max(nbytes // 4, 1), device=device)
    ends = [len(x) * (at + 1) // n for at in range(n)]
    return x, [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
