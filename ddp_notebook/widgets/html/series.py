"""One metric on all ranks, in bounded memory, for repeated drawing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ddp_notebook.records.schema import STEP_UNITS, Rows

SLOTS = 64  # slots of a line, each with two points

Values = npt.NDArray[np.float64]


class Series:
    """Lowest and highest value that each rank has logged in every `width` steps of the newest run.

    If the slots are full, `width` doubles. A run is one cell, or several cells whose program passed step numbers that
    continue from one cell to the next.

    Args:
        world_size: Number of ranks.

    Example:
        >>> course = Series(world_size=1)
        >>> course.add(np.zeros(1000, int), np.arange(1000), np.arange(1000.0), cell=1)
        >>> course.width, course.points(0)[0].tolist()[:4]
        (16, [0.0, 15.0, 16.0, 31.0])
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._clear()

    def _clear(self) -> None:
        self.cells: set[int] = set()  # cells of the run
        self._is_given = True  # the program passed all step numbers of the run
        self._unit = 0  # unit of the steps, an index of `records.STEP_UNITS`
        self.width = 2  # steps per slot; a slot keeps both values if each step has one value
        self.logged = np.zeros(self.world_size, np.int64)  # (R,) number of values
        self.first_wrong: dict[int, tuple[int, float]] = {}  # first value of each rank that is not finite, and its step
        self.begin = np.full((self.world_size, 2), np.nan)  # (R, 2) step and value of the first point of each rank
        self.end_point = np.full((self.world_size, 2), np.nan)  # (R, 2) step and value of the last point of each rank
        self.first_step, self.last_step = 0, -1
        self._origin = 0  # step at which the first slot begins
        # (R, SLOTS, 2) step and value
        self._lowest = np.full((self.world_size, SLOTS, 2), np.nan)
        self._highest = np.full((self.world_size, SLOTS, 2), np.nan)
        self._sums: Values = np.zeros((self.world_size, SLOTS))
        self._counts: Values = np.zeros((self.world_size, SLOTS))

    @property
    def unit(self) -> str:
        """Return the unit of the steps, see `Metric.unit_of`."""
        return STEP_UNITS[self._unit]

    @property
    def end(self) -> Values:
        """(R,) the last value of each rank."""
        return self.end_point[:, 1]

    def add(
        self,
        ranks: npt.NDArray[np.integer],
        steps: npt.NDArray[np.integer],
        values: Values,
        cell: int,
        is_given: bool = False,
        unit: int = 0,
    ) -> None:
        """Add values that were logged in one cell. Rows of a cell of an earlier run are ignored.

        Args:
            ranks, steps, values: (n,) In the order of their arrival.
            cell: Number of the cell.
            is_given: The program passed all step numbers.
            unit: Unit of the steps, an index of `records.STEP_UNITS`.
        """
        if not len(steps) or (cell not in self.cells and cell < max(self.cells, default=0)):
            return
        low, high = int(steps.min()), int(steps.max())
        if cell not in self.cells and not (is_given and self._is_given and low > self.last_step):
            self._clear()
        self.cells.add(cell)
        self._is_given &= is_given
        self._unit = max(self._unit, unit)
        if self.last_step < self.first_step:
            self.first_step = self._origin = low
        self._make_room(low, high)
        self.first_step, self.last_step = min(self.first_step, low), max(self.last_step, high)
        np.add.at(self.logged, ranks, 1)
        points = np.stack((steps.astype(np.float64), values), axis=-1)
        is_first = np.isnan(self.begin[ranks, 0])
        self.begin[ranks[is_first][::-1]] = points[is_first][::-1]
        self.end_point[ranks] = points
        is_finite = np.isfinite(values)
        for at in np.flatnonzero(~is_finite).tolist():
            self.first_wrong.setdefault(int(ranks[at]), (int(steps[at]), float(values[at])))
        ranks, points = ranks[is_finite], points[is_finite]
        slots = (points[:, 0].astype(np.int64) - self._origin) // self.width
        np.add.at(self._sums, (ranks, slots), points[:, 1])
        np.add.at(self._counts, (ranks, slots), 1)
        # Sort the rows of each slot by value: the lowest comes first, the highest last.
        order = np.lexsort((points[:, 1], slots, ranks))
        places = np.stack((ranks, slots), axis=-1)[order]
        begins = np.flatnonzero(np.any(np.diff(places, axis=0, prepend=-1), axis=1)) if len(order) else order
        ends = np.append(begins[1:], len(order))[: len(begins)] - 1
        for table, chosen, sign in ((self._lowest, begins, -1.0), (self._highest, ends, 1.0)):
            place = tuple(places[chosen].T)
            new = points[order[chosen]]
            before = table[place]
            table[place] = np.where(_is_further(new, before, sign), new, before)

    def _make_room(self, low: int, high: int) -> None:
        """Extend the slots to cover these steps."""
        while low < self._origin or high >= self._origin + SLOTS * self.width:
            before = -(-max(0, self._origin - low) // self.width)  # slots that are missing at the front
            used = int(np.flatnonzero(self._counts.any(axis=0)).max(initial=-1)) + 1
            if before and before + used <= SLOTS:
                self._origin -= before * self.width
                for table in (self._sums, self._counts, self._lowest, self._highest):
                    table[:] = np.roll(table, before, axis=1)
            else:
                self._double()

    def _double(self) -> None:
        self.width *= 2
        for table in (self._sums, self._counts):
            half = table[:, ::2] + table[:, 1::2]
            table[:] = 0
            table[:, : SLOTS // 2] = half
        for table, sign in ((self._lowest, -1.0), (self._highest, 1.0)):
            one, other = table[:, ::2], table[:, 1::2]
            joined = np.where(_is_further(other, one, sign), other, one)
            table[:] = np.nan
            table[:, : SLOTS // 2] = joined

    def has(self, rank: int) -> bool:
        """Return whether the rank has logged anything."""
        return rank in self.first_wrong or not np.isnan(self.end[rank])

    def points(self, rank: int) -> tuple[Values, Values]:
        """Return the steps and the values of the drawn points of a rank: (n,) each, by step."""
        ends = np.stack((self.begin[rank], self.end_point[rank]))
        found = np.concatenate((self._lowest[rank], self._highest[rank], ends))
        found = np.unique(found[np.isfinite(found).all(axis=1)], axis=0)
        return found[:, 0], found[:, 1]

    @property
    def drawn(self) -> int:
        """Number of drawn points of all ranks together."""
        return sum(len(self.points(rank)[0]) for rank in range(self.world_size)) + len(self.first_wrong)

    @property
    def _used(self) -> npt.NDArray[np.bool_]:
        """Return (SLOTS,) flags of the slots in which a rank has a value."""
        return np.any(self._counts > 0, axis=0)

    @property
    def steps(self) -> Values:
        """Return (n,) the middle step of each slot that has a value."""
        slots = np.flatnonzero(self._used).astype(np.float64)
        return self._origin + self.width * slots + (self.width - 1) / 2

    @property
    def means(self) -> Values:
        """Return (R, n) the mean of each rank in these slots; NaN if it has no value."""
        with np.errstate(invalid="ignore"):
            means: Values = self._sums[:, self._used] / self._counts[:, self._used]
        return means

    @property
    def reach(self) -> tuple[Values, Values]:
        """Return (R, n) each: the lowest and the highest value of each rank in these slots; NaN if it has no value."""
        return self._lowest[:, self._used, 1], self._highest[:, self._used, 1]


def _is_further(new: Values, before: Values, sign: float) -> npt.NDArray[np.bool_]:
    """Return (..., 1) flags of the points that are above the point before, or below it if `sign` is -1, or first."""
    further = (sign * new[..., 1:] > sign * before[..., 1:]) | np.isnan(before[..., 1:])
    return further & ~np.isnan(new[..., 1:])


def add_rows(courses: dict[int, Series], rows: Rows, world_size: int, most: int) -> None:
    """Add rows of `records.METRIC`.

    Args:
        courses: Series by the number of the metric's name, in the order of their first rows.
        most: Limit for the number of metrics.
    """
    if not len(rows):
        return
    keys, firsts, of = np.unique(rows[["name", "cell"]], return_index=True, return_inverse=True)
    for at in np.argsort(firsts).tolist():
        name, cell = keys[at].tolist()
        if name not in courses:
            if len(courses) >= most:
                continue
            courses[name] = Series(world_size)
        mine = rows[of == at]
        courses[name].add(
            *(mine["rank"], mine["step"], mine["value"], cell),
            is_given=bool(mine["is_given"].all()),
            unit=int(mine["unit"].max()),
        )
