"""Which steps of a training loop have their values recorded: more of them than a screen shows would cost it time.

Whole steps are kept or left out, so that what is kept is a collective on all of its ranks, and all buckets of a step:
ranks count the same steps. Of the steps of a period one is kept; two in a row where several optimizers take turns, as
those of a GAN. The period comes from how fast this rank trains. It is a power of two, so where ranks do not have the
same one, what the longest keeps is kept by all, if all see such turns or none does.
"""

from __future__ import annotations

from ddp_notebook.stdlib import time

FIRST_STEPS = 16  # of a cell, which are all kept
FIRST_CALLS = 8  # of a line, likewise: what comes after the loop, or every hundredth step
PER_S = 2.5  # calls whose values are kept at most, if that allows a step: a thousandth of the time at 0.4 ms each, cold
_PERIOD_S = 2.0  # the longest one, however many calls its steps have: somebody may be looking
_SLOW_PERIOD_S, _SLOW_PERIOD = 4.0, 8  # of slow steps it is so many, or so long: else each fourth of 0.4 s is kept
_WINDOW = 16  # steps between two looks at the rate


class ValueSampling:
    """Decides for one rank.

    Example:
        >>> thinning = ValueSampling()
        >>> thinning.begin_cell()
        >>> thinning.keeps(0)
        True
    """

    def __init__(self) -> None:
        self.period = 1  # steps
        self.turns = 0  # how often another optimizer than before has stepped: counted where that is seen
        self.calls = 0  # since the last look; the event buffer counts them
        self.since_ns = 0  # time of the last look, or of the begin of the cell
        self._of_line: dict[tuple[int, int], int] = {}

    def begin_cell(self) -> None:
        """A cell begins, whose first steps are kept."""
        self.period, self.turns = 1, 0
        self._of_line.clear()
        self.since_ns, self.calls = time.monotonic_ns(), 0

    def keeps(self, step: int) -> bool:
        """Whether the values of this step's calls are kept. Asked once, as it begins."""
        if step and step % _WINDOW == 0:
            now_ns = time.monotonic_ns()
            self._choose_period((now_ns - self.since_ns) / 1e9)
            self.since_ns, self.calls = now_ns, 0
        return step < FIRST_STEPS or spread(step) % self.period < self._run()

    def keeps_of_line(self, line: tuple[int, int]) -> bool:
        """Whether a call is one of the first of its line, whose values are kept although its step's may not be. Asked
        for each call, kept or not: else a line of the loop would have its first ones at another time on each rank."""
        count = self._of_line.get(line, 0)
        self._of_line[line] = count + 1
        return count < FIRST_CALLS

    def _choose_period(self, seconds: float) -> None:
        """Choose the period by the calls and steps of the last window."""
        calls_per_s, steps_per_s = self.calls / max(seconds, 1e-6), _WINDOW / max(seconds, 1e-6)
        longest = max(_PERIOD_S * steps_per_s, min(_SLOW_PERIOD_S * steps_per_s, _SLOW_PERIOD))
        period = run = self._run()
        while run * calls_per_s > PER_S * period and 2 * period <= longest:
            period *= 2
        if period > self.period or 2 * period < self.period:  # else it would change back and forth at a limit
            self.period = period

    def _run(self) -> int:
        return 1 if self.turns < 3 else 2  # one, another one, and the first again


def spread(step: int) -> int:
    """Another order of the steps, in which one of each period comes first that is not the same in all: what a loop does
    in odd steps only, as each tenth that it counts from 1, is in some of those that are kept too.

    Example:
        >>> [step for step in range(16, 100) if spread(step) % 16 == 0]
        [16, 33, 49, 66, 82, 99]
    """
    return step ^ (step >> 5)
