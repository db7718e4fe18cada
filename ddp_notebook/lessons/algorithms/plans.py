"""Bytes and messages of each algorithm, computed from formulas: the sum of the chunk sizes that each step sends.

    n  bytes of all data     N  ranks     c_k  bytes of chunk k

| algorithm | sequential messages | bytes through the busiest rank, each direction, if N divides n |
|---|---|---|
| ring all_reduce | 2 (N - 1) | 2 (N - 1) / N n |
| halving and doubling (N a power of two) | 2 log2 N | 2 (N - 1) / N n |
| tree all_reduce | 2 ceil(log2 N) | ceil(log2 N) n |
| parameter server | 2 (N - 1) | (N - 1) n |
| naive all_reduce | N - 1 | (N - 1) n |
| ring all_gather, ring reduce_scatter | N - 1 | (N - 1) / N n |

The tree is a binary tree with the ranks as its leaves: at each level ranks meet in pairs, and the lower one goes on. It
is also called a binomial tree.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005; Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ddp_notebook.observe.views import Collective

Links = dict[tuple[int, int], int]  # (from, to) -> bytes

ALGORITHMS = (
    "ring all_reduce",
    "tree all_reduce",
    "halving and doubling",
    "parameter server",
    "naive all_reduce",
    "ring all_gather",
    "ring reduce_scatter",
)
REDUCES = tuple(name for name in ALGORITHMS if name not in ("ring all_gather", "ring reduce_scatter"))


class Cost(NamedTuple):
    """Cost of one algorithm: T = messages * alpha + nbytes * beta."""

    messages: int  # sequential messages
    nbytes: float  # bytes that the busiest rank sends or receives


def steps(algorithm: str, world_size: int) -> int:
    """Return the number of steps."""
    n = world_size
    core = 1 << (n.bit_length() - 1)
    return {
        "ring all_reduce": 2 * (n - 1),
        "tree all_reduce": 2 * levels(n),
        "halving and doubling": 2 * (core.bit_length() - 1) + 2 * (core != n),
        "parameter server": 2,
        "naive all_reduce": n - 1,
        "ring all_gather": n - 1,
        "ring reduce_scatter": n - 1,
    }[algorithm]


def moved(algorithm: str, sizes: Sequence[int]) -> Links:
    """Return the bytes over each link. `sizes` are the bytes of the chunks, one for each rank.

    Example:
        >>> moved("ring all_reduce", [4, 4, 4])
        {(0, 1): 16, (1, 2): 16, (2, 0): 16}
    """
    n, total = len(sizes), sum(sizes)
    ring = [(i, (i + 1) % n) for i in range(n)]
    match algorithm:
        case "ring all_reduce":
            found = {(i, j): 2 * total - sizes[(i + 1) % n] - sizes[(i + 2) % n] for i, j in ring}
        case "ring all_gather":  # all chunks except the one that came from the right neighbour
            found = {(i, j): total - sizes[(i + 1) % n] for i, j in ring}
        case "ring reduce_scatter":
            found = {(i, j): total - sizes[i] for i, j in ring}
        case "parameter server":
            found = {(i, 0): total for i in range(1, n)} | {(0, i): total for i in range(1, n)}
        case "naive all_reduce":
            found = {(i, j): total for i in range(n) for j in range(n) if i != j}
        case "tree all_reduce":
            up = {(i, i - (i & -i)): total for i in range(1, n)}
            found = up | {(j, i): total for i, j in up}
        case _:
            found = _halving(sizes)
    return {link: nbytes for link, nbytes in found.items() if nbytes}


def levels(world_size: int) -> int:
    """Return the number of levels of a binary tree with the ranks as leaves.

    Example:
        >>> [levels(n) for n in (2, 3, 4, 8)]
        [1, 2, 2, 3]
    """
    return (world_size - 1).bit_length()


def _halving(sizes: Sequence[int]) -> Links:
    """Return the links of recursive halving and doubling among the first 2^k ranks.

    Every other rank sends its data to a partner before, and receives the sum after.
    """
    n = len(sizes)
    core = 1 << (n.bit_length() - 1)
    blocks = halving_blocks(sizes)
    found: Links = {}
    for i in range(core):
        first, last, distance = 0, core, core // 2
        while distance:
            middle = first + distance
            kept = (first, middle) if i < middle else (middle, last)
            sent = (middle, last) if i < middle else (first, middle)
            # The half that is sent now. The kept half is sent in the other direction while doubling.
            found[i, i ^ distance] = sum(blocks[slice(*sent)]) + sum(blocks[slice(*kept)])
            (first, last), distance = kept, distance // 2
    for i in range(core, n):
        found[i, i - core] = found[i - core, i] = sum(sizes)
    return found


def halving_blocks(sizes: Sequence[int]) -> list[int]:
    """Merge the chunks of N ranks into blocks for 2^k ranks. The last block gets all remaining chunks."""
    core = 1 << (len(sizes).bit_length() - 1)
    return [*sizes[: core - 1], sum(sizes[core - 1 :])]


def busiest_link(links: Links) -> tuple[tuple[int, int], int] | None:
    """Return the link with the most bytes; None if nothing was moved."""
    return max(links.items(), key=lambda item: item[1], default=None)


def added(links: Links, sends: Iterable[Collective]) -> Links:
    """Add the bytes of recorded sends to the bytes over each link."""
    found = dict(links)
    for send in sends:
        if send.peer is not None:
            link = (send.rank, send.peer)
            found[link] = found.get(link, 0) + send.nbytes
    return dict(sorted(found.items()))


def through_ranks(links: Links) -> dict[int, int]:
    """Return the sum of the bytes into and out of each rank."""
    found: dict[int, int] = {}
    for link, nbytes in links.items():
        for rank in link:
            found[rank] = found.get(rank, 0) + nbytes
    return dict(sorted(found.items()))


def cost(algorithm: str, world_size: int, nbytes: float) -> Cost:
    """Return messages and bytes of the alpha-beta model, for data whose size is divisible by N.

    Source: Thakur et al. (above), section 4. The messages of the parameter server use its single port sequentially.
    """
    n, count = world_size, world_size - 1
    core = 1 << (n.bit_length() - 1)
    extra = core != n
    return {
        "ring all_reduce": Cost(2 * count, 2 * count / n * nbytes),
        "tree all_reduce": Cost(2 * levels(n), 2 * levels(n) * nbytes),
        "halving and doubling": Cost(
            2 * (core.bit_length() - 1) + 2 * extra, 2 * (core - 1) / core * nbytes + 2 * extra * nbytes
        ),
        "parameter server": Cost(2 * count, 2 * count * nbytes),
        "naive all_reduce": Cost(count, count * nbytes),
        "ring all_gather": Cost(count, count / n * nbytes),
        "ring reduce_scatter": Cost(count, count / n * nbytes),
    }[algorithm]


def rule(algorithm: str, world_size: int, step: int) -> str:
    """Return a sentence about a step. Steps are numbered from 0.

    Example:
        >>> rule("ring all_reduce", 4, 1)
        'rank 0 sends chunk 3 to rank 1, rank 1 sends chunk 0 to rank 2, and so on; the receiver adds it to its own'
    """
    n, total = world_size, steps(algorithm, world_size)
    match algorithm:
        case "ring all_reduce" if step < n - 1:
            return f"{_passed(n, -step)}; the receiver adds it to its own"
        case "ring all_reduce":
            return f"{_passed(n, 1 - (step - n + 1))}; it is complete, so the receiver keeps it"
        case "ring all_gather":
            return f"{_passed(n, -step)}; the receiver keeps it"
        case "ring reduce_scatter":
            return f"{_passed(n, -step - 1)}; the receiver adds it to its own"
        case "parameter server":
            return (
                "rank 0 sends the sum to every rank"
                if step
                else "every rank sends all its data to rank 0, which adds it up"
            )
        case "naive all_reduce":
            return f"rank 0 sends all its data to rank {(step + 1) % n}, and so on; the receiver adds it to its own"
        case "tree all_reduce" if step < total // 2:
            return f"up: {_pairs(n, 1 << step)}; the receiver adds it to its own"
        case "tree all_reduce":
            return f"down: {_pairs(n, 1 << (total - 1 - step), is_down=True)}"
    return _halving_rule(n, total, step)


def _passed(n: int, chunk: int) -> str:
    """Return who passes which chunk on, if rank 0 sends `chunk`."""
    words = f"rank 0 sends chunk {chunk % n} to rank 1"
    return words + (f", rank 1 sends chunk {(chunk + 1) % n} to rank {2 % n}" + ", and so on" * (n > 2))


def _pairs(n: int, distance: int, *, is_down: bool = False) -> str:
    """Return the messages of a level of the tree."""
    what = "the sum" if is_down else "all its data"
    pairs = [(i - distance, i) if is_down else (i, i - distance) for i in range(distance, n, 2 * distance)]
    first, *more = pairs
    return f"rank {first[0]} sends {what} to rank {first[1]}" + "".join(f", {src} to {dst}" for src, dst in more)


def _halving_rule(n: int, total: int, step: int) -> str:
    core = 1 << (n.bit_length() - 1)
    if core != n:
        if step == 0:
            return f"before: rank {core} and those above send all their data to rank i - {core}, which adds it"
        if step == total - 1:
            return f"after: rank i - {core} sends the sum to rank i"
        step, total = step - 1, total - 2
    distances = [core >> (level + 1) for level in range(core.bit_length() - 1)]
    if step < total // 2:
        return (
            f"halving: ranks at distance {distances[step]}, as 0 and {distances[step]}, swap half of their range; each "
            "adds and keeps the other half"
        )
    distance = distances[total - 1 - step]
    return f"doubling: ranks at distance {distance}, as 0 and {distance}, swap their whole ranges"
