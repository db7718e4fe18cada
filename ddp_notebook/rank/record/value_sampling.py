"""Select the steps of a training loop whose tensor values are recorded. More than a screen can show would waste time.

Whole steps are kept or left out. So a collective is kept on all its ranks, and with it all buckets of a step, since
ranks count the same steps. One step of each period is kept; two consecutive ones if several optimizers alternate, as in
a GAN. The period depends on the rank's training speed, and is a power of two. If the periods of ranks differ, the steps
of the longest period are kept on all ranks. This requires that all ranks or none detect alternating optimizers.
"""

from __future__ import annotations

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import time

FIRST_STEPS = 16  # first steps of a cell, which are all kept
FIRST_CALLS = 8  # first calls of a line, which are all kept: code after the loop, or in every hundredth step
PER_S = 2.5  # maximum calls per second with values: 0.1 % of the time, at 0.4 ms each with cold caches
_PERIOD_S = 2.0  # longest period, for any number of calls: the display must stay live
_SLOW_PERIOD_S, _SLOW_PERIOD = 4.0, 8  # limits for slow steps; otherwise one of four 0.4 s steps would be kept
_WINDOW = 16  # steps between two measurements of the rate


class ValueSampling:
    """Sampling of one rank's steps.

    Example:
        >>> thinning = ValueSampling()
        >>> thinning.begin_cell()
        >>> thinning.keeps(0)
        True
    """

    def __init__(self) -> None:
        self.period = 1  # steps
        self.turns = 0  # number of changes between optimizers, which the optimizer hooks count
        self.calls = 0  # since the last measurement; the event buffer counts them
        self.since_ns = 0  # time of the last measurement, or of the start of the cell
        self._of_line: dict[tuple[int, int], int] = {}

    def begin_cell(self) -> None:
        """Reset for a new cell, whose first steps are kept."""
        self.period, self.turns = 1, 0
        self._of_line.clear()
        self.since_ns, self.calls = time.monotonic_ns(), 0

    def keeps(self, step: int) -> bool:
        """Return whether the values of a step's calls are kept. Called once, at the start of the step."""
        if step and step % _WINDOW == 0:
            now_ns = time.monotonic_ns()
            self._choose_period((now_ns - self.since_ns) / 1e9)
            self.since_ns, self.calls = now_ns, 0
        return step < FIRST_STEPS or spread(step) % self.period < self._run()

    def keeps_of_line(self, line: tuple[int, int]) -> bool:
        """Return whether a call is one of the first of its line. Its values are kept even in a step whose values are
        not.

        Called for each call. Otherwise the counts of a line in the loop would differ between ranks.
        """
        count = self._of_line.get(line, 0)
        self._of_line[line] = count + 1
        return count < FIRST_CALLS

    def _choose_period(self, seconds: float) -> None:
        """Choose the period from the calls and steps of the last window."""
        calls_per_s, steps_per_s = self.calls / max(seconds, 1e-6), _WINDOW / max(seconds, 1e-6)
        longest = max(_PERIOD_S * steps_per_s, min(_SLOW_PERIOD_S * steps_per_s, _SLOW_PERIOD))
        period = run = self._run()
        while run * calls_per_s > PER_S * period and 2 * period <= longest:
            period *= 2
        if period > self.period or 2 * period < self.period:  # hysteresis, against frequent changes at a limit
            self.period = period

    def _run(self) -> int:
        return 1 if self.turns < 3 else 2  # first optimizer, second optimizer, first again


def spread(step: int) -> int:
    """Permute the steps, so that the kept step of a period is not always its first one.

    Some kept steps then contain work that a loop does only in odd steps, such as each tenth step counted from 1.

    Example:
        >>> [step for step in range(16, 100) if spread(step) % 16 == 0]
        [16, 33, 49, 66, 82, 99]
    """
    return step ^ (step >> 5)
