"""Limits the data rate by leaving out whole steps, so that no step is shown in part.

A step is shown, on all ranks, if `every` divides its number. `every` is a power of two, so each step that is shown at a
coarser rate is also shown at a finer one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_COARSEST = 1 << 16
_SMOOTH_S = 2.0  # time constant of the mean rates


class DrawingBudget:
    """Selects the steps (or collectives, or rows of a metric) to show, within a limit of bytes per second.

    Args:
        bytes_per_s: Limit for all shown data.

    Example:
        >>> thinning = DrawingBudget(bytes_per_s=1000)
        >>> thinning.adapt(np.arange(8), nbytes=4000, seconds=1.0)
        >>> thinning.every, thinning.keep(np.arange(8, 17)).nonzero()[0].tolist()
        (4, [0, 4, 8])
    """

    def __init__(self, bytes_per_s: float, every: int = 1) -> None:
        self.bytes_per_s = bytes_per_s
        self._from = [np.iinfo(np.int64).min]  # first step of each rate
        self._every = [every]  # one of so many steps is shown
        self.coarsest = every  # the largest `every` so far
        self._rate: float | None = None  # bytes per second if all steps were shown

    @property
    def every(self) -> int:
        return self._every[-1]

    def keep(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return (n,) flags of the rows to show, by the numbers of their steps."""
        if len(self._every) == 1:
            return numbers % self._every[0] == 0 if self._every[0] > 1 else np.ones(len(numbers), bool)
        every = np.array(self._every)[np.searchsorted(self._from, numbers, "right") - 1]
        return numbers % every == 0

    def adapt(self, numbers: npt.NDArray[np.int64], nbytes: float, seconds: float) -> None:
        """Adapt the rate to the size of all rows since the last call, shown or not.

        Args:
            numbers: (n,) Steps of the rows. A new rate applies to later steps, and also to these if there are far too
                many.
            nbytes: Size of all rows.
            seconds: Time since the last call.
        """
        if not len(numbers):
            return
        now = nbytes / seconds
        share = min(1.0, seconds / _SMOOTH_S)
        before = self._rate
        self._rate = now if before is None else before + share * (now - before)
        wanted = self._rate / self.bytes_per_s
        every = self.every
        if wanted > every or wanted < every / 4:
            every = 1
            while every < wanted and every < _COARSEST:
                every *= 2
        if every != self.every:
            # React at once to a burst at its start: the mean rate would notice it too late.
            is_flood = nbytes / self.every > self.bytes_per_s / 2
            self._change(int(numbers.min() if is_flood and every > self.every else numbers.max() + 1), every)

    def _change(self, number: int, every: int) -> None:
        while len(self._from) > 1 and self._from[-1] >= number:
            self._from.pop()
            self._every.pop()
        self._from.append(number)
        self._every.append(every)
        self.coarsest = max(self.coarsest, every)
        del self._from[1:-16], self._every[1:-16]
