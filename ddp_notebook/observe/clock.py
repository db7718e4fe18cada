"""Offsets between the ranks' clocks and the notebook's clock, measured by round trips.

A rank reads its clock between the request and the answer. So the error of the midpoint is at most half of the round
trip. The shortest round trip is the most precise; the others are not averaged in.

Source: "minimum filter" of NTP, RFC 5905, section 10 (https://www.rfc-editor.org/rfc/rfc5905#section-10).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.int64]

_WINDOW_NS = 60_000_000_000
_DRIFT = 50e-6  # bound on the drift between two hosts' clocks: a common crystal has 20 to 50 ppm
_KNOT_EVERY_NS = 10_000_000_000
_MOST_KNOTS = 1024
_MOST_SAMPLES = 1024


class Sample(NamedTuple):
    """One round trip."""

    rank_ns: int
    offset_ns: int  # the rank's clock minus the notebook's
    error_ns: int  # half of the round trip


class Clock:
    """Offset of each rank's clock (`time.monotonic_ns` on the rank) from the notebook's clock, at any time.

    The offset comes from the best round trip of the last minute: the shortest one, after the possible drift since then
    is added to its error. Every ten seconds the best round trip is stored as a knot. Offsets of earlier times are
    interpolated between knots, because the clocks of two hosts may drift apart by 100 ms per hour.

    Example:
        >>> clock = Clock()
        >>> clock.add(1, sent_ns=1_000, rank_ns=501_100, received_ns=1_300)
        >>> clock.offset_ns(1), clock.error_ns(1)
        (499950, 150)
        >>> clock.to_notebook(1, np.array([501_100, -1])).tolist()
        [1150, -1]
    """

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._lock = threading.Lock()

    def add(self, rank: int, sent_ns: int, rank_ns: int, received_ns: int, *, same_clock: bool = False) -> None:
        """Add one round trip.

        Args:
            sent_ns: time of the request, on the notebook's clock.
            rank_ns: time of the answer, on the rank's clock.
            received_ns: arrival of the answer, on the notebook's clock.
            same_clock: the rank is on the notebook's host, with the same boot id.

        Raises:
            ValueError: the answer arrived before the request was sent.
        """
        if received_ns < sent_ns:
            raise ValueError(
                f"the reply of rank {rank} arrived at {received_ns} ns, before its request was sent at {sent_ns} ns"
            )
        middle_ns = (sent_ns + received_ns) // 2
        sample = Sample(rank_ns, rank_ns - middle_ns, -(-(received_ns - sent_ns) // 2))
        with self._lock:
            self._ranks.setdefault(rank, _Rank()).add(sample, same_clock)

    def part(self, rank: int) -> Clock:
        """Remove a rank whose new process is on another host, and return a clock with its former offsets."""
        former = Clock()
        with self._lock:
            if (known := self._ranks.pop(rank, None)) is not None:
                former._ranks[rank] = known
        return former

    def offset_ns(self, rank: int) -> int:
        """Return the rank's clock minus the notebook's, now; 0 if unknown."""
        with self._lock:
            known = self._ranks.get(rank)
            return 0 if known is None or known.is_shared else known.best().offset_ns

    def error_ns(self, rank: int) -> int | None:
        """Return the largest possible error of `offset_ns` in either direction; None if unknown."""
        with self._lock:
            known = self._ranks.get(rank)
            return None if known is None else 0 if known.is_shared else known.best().error_ns

    def shifted(self) -> list[int]:
        """Return the ranks whose clock differs from the notebook's."""
        with self._lock:
            return [rank for rank, known in self._ranks.items() if not known.is_shared]

    def to_notebook(self, rank: int, times_ns: Times) -> Times:
        """Convert times of a rank to the notebook's clock. Negative times (unknown) are not changed.

        Args:
            times_ns: (n,)
        """
        with self._lock:
            known = self._ranks.get(rank)
            knots = [] if known is None or known.is_shared else known.knots_and_best()
        if not knots:
            return times_ns
        at_ns, offsets_ns = np.array([(knot.rank_ns, knot.offset_ns) for knot in knots], np.int64).T
        # Relative to the last knot: an offset between two hosts has more digits than a float64.
        drift_ns = np.interp(times_ns - at_ns[-1], at_ns - at_ns[-1], offsets_ns - offsets_ns[-1])
        return np.where(times_ns < 0, times_ns, times_ns - offsets_ns[-1] - np.rint(drift_ns).astype(np.int64))

    # ---- in files

    def to_json(self) -> list[Any]:
        """Return the offsets, for `from_json`."""
        with self._lock:
            return [
                [rank, known.is_shared, [list(knot) for knot in known.knots_and_best()]]
                for rank, known in self._ranks.items()
            ]

    @classmethod
    def from_json(cls, ranks: Iterable[Any]) -> Clock:
        """Return the clock that `to_json` has stored."""
        clock = cls()
        for rank, is_shared, knots in ranks:
            known = clock._ranks[rank] = _Rank()
            for knot in knots:
                known.knots.append(Sample(*knot))
            known.add(known.knots[-1], is_shared)
        return clock


class _Rank:
    """Round trips of one rank."""

    def __init__(self) -> None:
        self.is_shared = False
        self.samples: deque[Sample] = deque(maxlen=_MOST_SAMPLES)  # from the last minute
        self.knots: list[Sample] = []

    def add(self, sample: Sample, same_clock: bool) -> None:
        samples = self.samples
        if samples and sample.rank_ns < samples[-1].rank_ns:  # a later answer has overtaken this one
            return
        samples.append(sample)
        while samples[0].rank_ns < sample.rank_ns - _WINDOW_NS:
            samples.popleft()
        best = self.best()
        # CLOCK_MONOTONIC is one per host since its boot, so the offset is 0, and half a round trip of error would only
        # reduce the precision. But a container may have a time namespace with its own clock and the same boot id
        # (time_namespaces(7)). Then 0 is not in the range that the round trips allow.
        self.is_shared = same_clock and abs(best.offset_ns) <= best.error_ns
        if not self.knots or best.rank_ns >= self.knots[-1].rank_ns + _KNOT_EVERY_NS:
            self.knots.append(best)
        if len(self.knots) > _MOST_KNOTS:
            del self.knots[1 : _MOST_KNOTS // 2 : 2]  # half of the old ones are enough

    def best(self) -> Sample:
        """Return the most precise sample for the present, with its present error."""
        now_ns = self.samples[-1].rank_ns

        def error_ns(sample: Sample) -> int:
            return sample.error_ns + round((now_ns - sample.rank_ns) * _DRIFT)

        found = min(self.samples, key=error_ns)
        return found._replace(error_ns=error_ns(found))

    def knots_and_best(self) -> list[Sample]:
        """Return the samples in order of time; the newest one is last."""
        best = self.best()
        return [*(knot for knot in self.knots if knot.rank_ns < best.rank_ns), best]
