"""Cost of collectives on a network, and a fit of its rate and latency to recorded transfers.

A message of s bytes takes `latency + s / rate`. With n ranks, a = latency, b = 1 / rate:

| operation | time |
|---|---|
| all_reduce, ring | 2 (n - 1) a + 2 (n - 1) / n s b |
| all_reduce, double binary tree | 2 ceil(log2 n) a + 2 s b |
| all_gather, reduce_scatter, ring; s is the whole | (n - 1) a + (n - 1) / n s b |
| broadcast, reduce, binomial tree | ceil(log2 n) (a + s b) |
| broadcast, reduce, scatter and all_gather | (ceil(log2 n) + n - 1) a + 2 (n - 1) / n s b |

On two levels, the ranks of a node first reduce and scatter inside. Then each of them reduces its share with those of
the other nodes, and the ranks of a node gather the shares.

Source: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, 2005,
https://doi.org/10.1177/1094342005051521 (ring, broadcast); Sanders, Speck, Traeff, Two-tree algorithms for full
bandwidth broadcast, reduction and scan, 2009, https://doi.org/10.1016/j.parco.2009.09.001 (double binary tree).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

ALL_REDUCE = ("all_reduce", "all_reduce_coalesced", "barrier", "monitored_barrier")
_GATHERS = ("all_gather", "all_gather_single", "all_gather_coalesced", "all_gather_single_coalesced")
_SCATTERS = ("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced")
_ROOTED = ("broadcast", "reduce")
OPERATIONS = (*ALL_REDUCE, *_GATHERS, *_SCATTERS, *_ROOTED)  # operations with a known cost

_LEAST_SPREAD = 4.0  # ratio between the bytes per message of transfers from which latency and rate can be separated


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Connection of a rank to the next one."""

    latency_ns: float  # per message
    ns_per_byte: float

    @property
    def gb_s(self) -> float:
        """Rate in 1e9 bytes per second."""
        return 1 / self.ns_per_byte if self.ns_per_byte else math.inf

    def ring(self, ranks: int, nbytes: float) -> float:
        """Return the time in ns of a reduce_scatter or an all_gather in a ring: half of an all_reduce.

        Args:
            ranks: number of ranks.
            nbytes: size of the whole.
        """
        return (ranks - 1) * self.latency_ns + (ranks - 1) / ranks * nbytes * self.ns_per_byte

    def tree(self, ranks: int, nbytes: float) -> float:
        """Return the time in ns of an all_reduce in a double binary tree."""
        return 2 * _depth(ranks) * self.latency_ns + 2 * nbytes * self.ns_per_byte * (ranks > 1)

    def rooted(self, ranks: int, nbytes: float) -> float:
        """Return the time in ns of a broadcast or reduce, with the shorter algorithm."""
        depth = _depth(ranks)
        binomial = depth * (self.latency_ns + nbytes * self.ns_per_byte)
        return min(binomial, depth * self.latency_ns + self.ring(ranks, 2 * nbytes))


def _depth(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Network on two levels.

    Example:
        >>> link = Link(latency_ns=1000, ns_per_byte=0.1)
        >>> network = Network(inside=link, between=link, per_node=None, has_trees=False)
        >>> network.cost_ns("all_reduce", 2, 10_000), network.cost_ns("all_reduce", 5, 10_000)
        (3000.0, 9600.0)
    """

    inside: Link
    between: Link
    per_node: int | None  # ranks of a node; None: one level, `inside`
    has_trees: bool  # all_reduce uses a tree where it is shorter, as NCCL does; gloo always uses a ring

    def cost_ns(self, op: str, ranks: int, nbytes: float) -> float:
        """Return the time of one collective in ns, from the arrival of the last rank.

        Args:
            op: one of `OPERATIONS`.
            ranks: number of ranks.
            nbytes: size of the input of a rank.
        """
        inside = min(ranks, self.per_node or ranks)
        nodes = math.ceil(ranks / inside)
        if op in _ROOTED:
            return self.between.rooted(nodes, nbytes) + self.inside.rooted(inside, nbytes)
        if op in _GATHERS:
            nbytes *= ranks
        halves = 2 if op in ALL_REDUCE else 1
        # each rank of a node sends its share to the other nodes over its own link
        between = halves * self.between.ring(nodes, nbytes / inside)
        within = halves * self.inside.ring(inside, nbytes)
        if self.has_trees and op in ALL_REDUCE:
            between = min(between, self.between.tree(nodes, nbytes / inside))
            within = min(within, self.inside.tree(inside, nbytes))
        return between + within


@dataclass(frozen=True, slots=True)
class Transfer:
    """All-reduces that followed each other without a pause, from the arrival of the last rank at the first one."""

    messages: int
    nbytes: int
    ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Link that explains the recorded transfers best."""

    link: Link
    count: int  # number of all-reduces
    has_latency: bool  # False: their sizes are too similar to separate the latency, which counts as 0


def fit(transfers: Iterable[Transfer], ranks: int) -> Fit | None:
    """Fit rate and latency of a ring to recorded transfers; None without transfers between ranks.

    The medians of equal transfers are fitted. Long transfers and frequent ones count more.

    Args:
        transfers: recorded transfers.
        ranks: number of ranks that took part.

    Example:
        >>> transfers = [Transfer(1, n, 2 * (1000 + n / 2 * 0.5)) for n in (100, 10_000, 1_000_000)]
        >>> found = fit(transfers, 2)
        >>> round(found.link.latency_ns), round(found.link.gb_s, 3), found.count
        (1000, 2.0, 3)
    """
    of_kind: dict[tuple[int, int], list[float]] = defaultdict(list)
    for one in transfers:
        of_kind[one.messages, one.nbytes].append(one.ns)
    medians = {kind: float(np.median(some)) for kind, some in of_kind.items()}
    medians = {kind: ns for kind, ns in medians.items() if ns > 0 and kind[1]}
    if not medians or ranks < 2:
        return None
    x = np.array([[2 * (ranks - 1) * n, 2 * (ranks - 1) / ranks * nbytes] for n, nbytes in medians], np.float64)
    y = np.array(list(medians.values()))
    weights = np.sqrt(np.array([len(of_kind[kind]) for kind in medians]) / y)
    per_message = x[:, 1] / x[:, 0]
    has_latency = bool(per_message.max() >= _LEAST_SPREAD * per_message.min())
    latency_ns = 0.0
    if has_latency:
        latency_ns, per_byte = np.linalg.lstsq(x * weights[:, None], y * weights, rcond=None)[0].tolist()
    if latency_ns <= 0 or not has_latency:
        latency_ns, per_byte = 0.0, _slope(x[:, 1], y, weights)
    elif per_byte < 0:
        latency_ns, per_byte = _slope(x[:, 0], y, weights), 0.0
    count = sum(n * len(of_kind[n, nbytes]) for n, nbytes in medians)
    return Fit(link=Link(latency_ns=latency_ns, ns_per_byte=per_byte), count=count, has_latency=has_latency)


def _slope(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> float:
    return float((weights**2 * x * y).sum() / (weights**2 * x * x).sum())
