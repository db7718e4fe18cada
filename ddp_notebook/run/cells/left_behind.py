"""Times of a cell in which ranks wait for ranks that have ended it: when to look, and when to end the cell."""

from __future__ import annotations

from ddp_notebook.run.groups.diagnosis import LeftBehind, Views, left_behind

_NEVER_S = float("inf")


class EndedRanks:
    """Decides whether a cell can still end by itself, although some of its ranks have ended it.

    Two looks must have the same result: a rank may be between two operations.

    Args:
        grace_s: seconds from then until the cell must be ended; None: never.
        interval_s: seconds between two looks.
        again_s: seconds until the second look, which confirms the first.
    """

    def __init__(self, grace_s: float | None, interval_s: float, again_s: float) -> None:
        self.look_at = _NEVER_S  # time of the next look
        self.is_certain = False  # ranks wait for ranks that have ended the cell
        self._found: dict[int, LeftBehind] = {}
        self._ends_at = _NEVER_S
        self._is_over = False
        self._grace_s = _NEVER_S if grace_s is None else grace_s
        self._interval_s = interval_s
        self._again_s = again_s

    @property
    def is_over(self) -> bool:
        """Return whether the cell must be ended now."""
        return self._is_over

    def is_due(self, now: float) -> bool:
        """Return whether it is time to look. The first call starts the interval."""
        if self.look_at == _NEVER_S:
            self.look_at = now + self._interval_s
        return now >= self.look_at

    def look(self, views: Views, now: float) -> None:
        """Handle the activity of all ranks.

        Args:
            now: time of the end of the look.
        """
        found = left_behind(views)
        before, self._found = self._found, found
        self.look_at = now + self._interval_s
        if not found or before != found:
            self.is_certain = False
            self._ends_at = _NEVER_S
            if found:
                self.look_at = now + self._again_s
            return
        self.is_certain = True
        may_end = any(left.may_end for left in found.values())
        self._ends_at = min(self._ends_at, now + self._grace_s) if may_end else _NEVER_S
        self.look_at = min(self.look_at, max(self._ends_at, now))
        self._is_over = now >= self._ends_at

    def ends_in_s(self, now: float) -> float | None:
        """Return the seconds until the cell is ended; None if it is not."""
        return max(0.0, self._ends_at - now) if self._ends_at < _NEVER_S else None

    def put_off(self, seconds: float) -> None:
        """Extend all times, because a host was unreachable."""
        self.look_at += seconds
        self._ends_at += seconds

    def reset(self) -> None:
        """Start again: no rank has ended the cell, or the cell is being ended."""
        self.look_at = self._ends_at = _NEVER_S
        self.is_certain = self._is_over = False
        self._found = {}
