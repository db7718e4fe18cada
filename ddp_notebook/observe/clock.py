"""How far the ranks' clocks are from the notebook's, measured by messages that go there and back.

A rank reads its clock at some moment between the question and the answer, so taking the middle is off by at most half
of the round trip. The shortest round trip is the most precise; the others are not averaged in.

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
    offset_ns: int  # of the rank's clock over the notebook's
    error_ns: int  # half of the round trip


class Clock:
    """The offset of each rank's clock (`time.monotonic_ns` there) over the notebook's, as it was at any time.

    The best round trip of the last minute counts: the shortest, once each is charged with the drift that is possible
    since. Every ten seconds the best one is kept for good, and the offset is interpolated between those: two hosts'
    clocks may drift by 100 ms in an hour, and rows of an hour ago need the offset of an hour ago.

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
        """Take in one round trip.

        Args:
            sent_ns: when the question left, on the notebook's clock.
            rank_ns: the rank's clock when it answered.
            received_ns: when the answer came, on the notebook's clock.
            same_clock: the rank is on the notebook's host, with the same boot id.

        Raises:
            ValueError: the answer came before the question was sent.
        """
        if received_ns < sent_ns:
            raise ValueError(f"an answer of rank {rank} came at {received_ns} ns, before its question at {sent_ns} ns")
        middle_ns = (sent_ns + received_ns) // 2
        sample = Sample(rank_ns, rank_ns - middle_ns, -(-(received_ns - sent_ns) // 2))
        with self._lock:
            self._ranks.setdefault(rank, _Rank()).add(sample, same_clock)

    def part(self, rank: int) -> Clock:
        """The rank's process was replaced by one on another host: its clock is another. What was known of it."""
        former = Clock()
        with self._lock:
            if (known := self._ranks.pop(rank, None)) is not None:
                former._ranks[rank] = known
        return former

    def offset_ns(self, rank: int) -> int:
        """The rank's clock minus the notebook's, now; 0 where nothing is known."""
        with self._lock:
            known = self._ranks.get(rank)
            return 0 if known is None or known.is_shared else known.best().offset_ns

    def error_ns(self, rank: int) -> int | None:
        """By how much `offset_ns` may be wrong in either direction; None where nothing is known."""
        with self._lock:
            known = self._ranks.get(rank)
            return None if known is None else 0 if known.is_shared else known.best().error_ns

    def shifted(self) -> list[int]:
        """The ranks whose clock is not the notebook's."""
        with self._lock:
            return [rank for rank, known in self._ranks.items() if not known.is_shared]

    def to_notebook(self, rank: int, times_ns: Times) -> Times:
        """Times of a rank as times of the notebook's clock; negative ones (unknown) as they are.

        Args:
            times_ns: (n,)
        """
        with self._lock:
            known = self._ranks.get(rank)
            knots = [] if known is None or known.is_shared else known.knots_and_best()
        if not knots:
            return times_ns
        at_ns, offsets_ns = np.array([(knot.rank_ns, knot.offset_ns) for knot in knots], np.int64).T
        # Relative to one of them: an offset between two hosts has more digits than a float64.
        drift_ns = np.interp(times_ns - at_ns[-1], at_ns - at_ns[-1], offsets_ns - offsets_ns[-1])
        return np.where(times_ns < 0, times_ns, times_ns - offsets_ns[-1] - np.rint(drift_ns).astype(np.int64))

    # ---- in files

    def to_json(self) -> list[Any]:
        """What is known, for `from_json`."""
        with self._lock:
            return [
                [rank, known.is_shared, [list(knot) for knot in known.knots_and_best()]]
                for rank, known in self._ranks.items()
            ]

    @classmethod
    def from_json(cls, ranks: Iterable[Any]) -> Clock:
        """The clock whose `to_json` gave this."""
        clock = cls()
        for rank, is_shared, knots in ranks:
            known = clock._ranks[rank] = _Rank()
            for knot in knots:
                known.knots.append(Sample(*knot))
            known.add(known.knots[-1], is_shared)
        return clock


class _Rank:
    """What is known of one rank."""

    def __init__(self) -> None:
        self.is_shared = False
        self.samples: deque[Sample] = deque(maxlen=_MOST_SAMPLES)  # of the last minute
        self.knots: list[Sample] = []

    def add(self, sample: Sample, same_clock: bool) -> None:
        samples = self.samples
        if samples and sample.rank_ns < samples[-1].rank_ns:  # an answer that was overtaken
            return
        samples.append(sample)
        while samples[0].rank_ns < sample.rank_ns - _WINDOW_NS:
            samples.popleft()
        best = self.best()
        # CLOCK_MONOTONIC is one per host since its boot, so there is nothing to estimate: the offset is 0, and half a
        # round trip of error would only blur it. But a container may have a time namespace with a clock of its own
        # (time_namespaces(7)), with the same boot id: then 0 is not among what the round trips allow.
        self.is_shared = same_clock and abs(best.offset_ns) <= best.error_ns
        if not self.knots or best.rank_ns >= self.knots[-1].rank_ns + _KNOT_EVERY_NS:
            self.knots.append(best)
        if len(self.knots) > _MOST_KNOTS:
            del self.knots[1 : _MOST_KNOTS // 2 : 2]  # every second one is enough for times long ago

    def best(self) -> Sample:
        """The sample that says most about now, with the error that it has now."""
        now_ns = self.samples[-1].rank_ns

        def error_ns(sample: Sample) -> int:
            return sample.error_ns + round((now_ns - sample.rank_ns) * _DRIFT)

        found = min(self.samples, key=error_ns)
        return found._replace(error_ns=error_ns(found))

    def knots_and_best(self) -> list[Sample]:
        """In the order of time; the newest one comes last."""
        best = self.best()
        return [*(knot for knot in self.knots if knot.rank_ns < best.rank_ns), best]
