"""The course of one metric on all ranks, in bounded memory, to be drawn again and again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ddp_notebook.records.schema import Rows

SLOTS = 128  # points of a line

Values = npt.NDArray[np.float64]


class Course:
    """The mean of what each rank has logged in every `width` steps. When the slots are full, `width` doubles.

    Args:
        world_size: how many ranks there are.

    Example:
        >>> course = Course(world_size=1)
        >>> course.add(np.zeros(1000, int), np.arange(1000), np.arange(1000.0), cell=1)
        >>> course.width, course.steps.tolist()[:3], course.means[0, :3].tolist()
        (8, [3.5, 11.5, 19.5], [3.5, 11.5, 19.5])
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._clear(0)

    def _clear(self, cell: int) -> None:
        self.cell = cell
        self.width = 1
        self.first_wrong: dict[int, tuple[int, float]] = {}  # by rank: the first value that is not finite, and its step
        self.begin = np.full(self.world_size, np.nan)  # (R,) the first value of each rank, and the last
        self.end = np.full(self.world_size, np.nan)
        self.first_step, self.last_step = 0, -1
        self._origin = 0  # step at which the first slot begins
        self._sums: Values = np.zeros((self.world_size, SLOTS))
        self._counts: Values = np.zeros((self.world_size, SLOTS))

    def add(
        self,
        ranks: npt.NDArray[np.integer],
        steps: npt.NDArray[np.integer],
        values: Values,
        cell: int,
    ) -> None:
        """Take in what was logged in one cell. One that counts its steps anew begins a course of its own.

        Args:
            ranks, steps, values: (n,) in the order in which they came.
            cell: not before the one of the last call; what comes of an earlier one is left out.
        """
        if not len(steps) or cell < self.cell:
            return
        low, high = int(steps.min()), int(steps.max())
        if cell > self.cell:
            if low <= self.last_step:
                self._clear(cell)
            self.cell = cell
        if self.last_step < self.first_step:
            self.first_step = self._origin = low
        self._make_room(low, high)
        self.first_step, self.last_step = min(self.first_step, low), max(self.last_step, high)
        is_first = np.isnan(self.begin[ranks])
        self.begin[ranks[is_first][::-1]] = values[is_first][::-1]
        self.end[ranks] = values
        is_finite = np.isfinite(values)
        for at in np.flatnonzero(~is_finite).tolist():
            self.first_wrong.setdefault(int(ranks[at]), (int(steps[at]), float(values[at])))
        slots = (steps[is_finite] - self._origin) // self.width
        np.add.at(self._sums, (ranks[is_finite], slots), values[is_finite])
        np.add.at(self._counts, (ranks[is_finite], slots), 1)

    def _make_room(self, low: int, high: int) -> None:
        """Slots for these steps."""
        while low < self._origin or high >= self._origin + SLOTS * self.width:
            before = -(-max(0, self._origin - low) // self.width)  # slots that are missing at the front
            used = int(np.flatnonzero(self._counts.any(axis=0)).max(initial=-1)) + 1
            if before and before + used <= SLOTS:
                self._origin -= before * self.width
                for table in (self._sums, self._counts):
                    table[:] = np.roll(table, before, axis=1)
            else:
                self._double()

    def _double(self) -> None:
        self.width *= 2
        for table in (self._sums, self._counts):
            half = table[:, ::2] + table[:, 1::2]
            table[:] = 0
            table[:, : SLOTS // 2] = half

    def has(self, rank: int) -> bool:
        """Whether the rank has logged anything."""
        return rank in self.first_wrong or not np.isnan(self.end[rank])

    @property
    def _used(self) -> npt.NDArray[np.bool_]:
        """(SLOTS,) where a rank has a value."""
        return np.any(self._counts > 0, axis=0)

    @property
    def steps(self) -> Values:
        """(n,) the middle of the steps that each point stands for."""
        slots = np.flatnonzero(self._used).astype(np.float64)
        return self._origin + self.width * slots + (self.width - 1) / 2

    @property
    def means(self) -> Values:
        """(R, n) the mean of each rank; NaN where it has none."""
        with np.errstate(invalid="ignore"):
            means: Values = self._sums[:, self._used] / self._counts[:, self._used]
        return means


def add_rows(courses: dict[int, Course], rows: Rows, world_size: int, most: int) -> None:
    """Take in rows of `records.METRIC`.

    Args:
        courses: by the number of the metric's name, in the order in which they came first.
        most: metrics that are followed.
    """
    if not len(rows):
        return
    keys, firsts, of = np.unique(rows[["name", "cell"]], return_index=True, return_inverse=True)
    for at in np.argsort(firsts).tolist():
        name, cell = keys[at].tolist()
        if name not in courses:
            if len(courses) >= most:
                continue
            courses[name] = Course(world_size)
        mine = rows[of == at]
        courses[name].add(mine["rank"], mine["step"], mine["value"], cell)
