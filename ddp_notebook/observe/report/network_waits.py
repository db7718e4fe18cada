"""Find out if ranks waited for the network between machines, or for another rank.

A collective waits for a rank until the last one has arrived. The rest is network time, if its ranks are on several
machines. Clock offsets between machines have an error, and a delay of a rank below this error cannot be detected. So
only times above both errors are attributed to the network.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_notebook.observe.steps.steps import StepTable
from ddp_notebook.observe.tables.matching import RowSource, match_collectives
from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.records.units import ms, size

_MOST_NAMED = 3  # hosts in a sentence
_MOSTLY = 0.5  # share of the time in which data moved


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTimes:
    """Times of collectives between machines, after the arrival of their last rank."""

    hosts: tuple[str, ...]  # machines of their ranks
    bytes_per_s: float  # total message size, divided by the time with at least one pending transfer
    transfer_ns: float  # duration of one transfer, median
    error_ns: int  # largest error between the times of two ranks

    def words(self) -> str:
        """Return the text that follows a share of the step."""
        if self.transfer_ns <= self.error_ns:
            return (
                "is communication that no compute hides. Waiting for the network and for a rank cannot be separated: "
                f"a collective takes {ms(self.transfer_ns)}, and the clock error is ±{ms(self.error_ns)}"
            )
        many = len(self.hosts) > _MOST_NAMED
        joined = f"{len(self.hosts)} hosts" if many else " and ".join(self.hosts)
        return (
            f"waits for the network between {joined}: all ranks had arrived, and {size(self.bytes_per_s)}/s were "
            "transferred"
        )


def network(recording: RowSource, found: StepTable) -> NetworkTimes | None:
    """Return the network times in these steps; None if all ranks are on one machine, or most data stayed within
    machines.

    Args:
        recording: the recorded tables.
        found: steps, at least one.

    Example:
        >>> from tests.observe.synthetic import simulate
        >>> from ddp_notebook.observe.steps.steps import measure
        >>> run = simulate(buckets=1, bucket_nbytes=1_000_000, transfer_ms=10)
        >>> network(run, measure(run)) is None
        True
        >>> run.hosts = ("gpu1", "gpu1", "gpu2", "gpu2")
        >>> print(network(run, measure(run)).words())
        waits for the network between gpu1 and gpu2: all ranks had arrived, and 100 MB/s were transferred
    """
    hosts = np.array(recording.hosts)
    if not len(hosts):
        return None
    begin, end = found.start_ns.min(), found.end_ns.max()
    calls = recording.rows("call")
    calls = select(calls, (calls["issue_ns"] >= begin) & (calls["issue_ns"] < end))
    matched = match_collectives(recording, calls)
    if not len(matched):
        return None
    rows, first = calls[matched.index], matched.first[:-1]
    _, of_rank = np.unique(hosts[rows["rank"]], return_inverse=True)
    joins = np.maximum.reduceat(of_rank, first) > np.minimum.reduceat(of_rank, first)
    begins, ends = matched.all_arrived_ns, matched.ended_ns
    if not joins.any() or (moving := _union(begins[joins], ends[joins])) < max(1, _MOSTLY * _union(begins, ends)):
        return None
    nbytes = np.maximum.reduceat(np.maximum(rows["nbytes_in"], rows["nbytes_out"]), first)
    ranks = np.unique(rows["rank"][joins[matched.of]]).tolist()
    return NetworkTimes(
        hosts=tuple(dict.fromkeys(recording.hosts[rank] for rank in ranks)),
        bytes_per_s=float(nbytes[joins].sum()) / moving * 1e9,
        transfer_ns=float(np.median((ends - begins)[joins])),
        error_ns=2 * max(recording.clock_error_ns(rank) for rank in ranks),
    )


def _union(begins: np.ndarray, ends: np.ndarray) -> int:
    """Return the total time covered by intervals, which are ordered by their begin."""
    until = np.maximum.accumulate(ends)
    return int((until - np.maximum(begins, np.concatenate((begins[:1], until[:-1])))).clip(0).sum())
