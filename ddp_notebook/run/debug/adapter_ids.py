"""Numbers of threads, frames and variables in the front end, for those of the ranks' debuggers."""

from __future__ import annotations

import itertools

_FIRST = 1 << 30  # the kernel's own debugger uses smaller numbers; the protocol allows up to 2**31 - 1


class AdapterIds:
    """Numbers for the front end, unique among all ranks.

    Example:
        >>> ids = AdapterIds()
        >>> number = ids.add("thread", 3, 1)
        >>> ids.find(number), ids.add("thread", 3, 1) == number, ids.find(1)
        ((3, 1), True, None)
    """

    def __init__(self) -> None:
        self._next = itertools.count(_FIRST)
        self._numbers: dict[tuple[str, int, int], int] = {}
        self._found: dict[int, tuple[int, int]] = {}

    def add(self, kind: str, rank: int, number: int) -> int:
        """Return the number in the front end.

        Args:
            kind: "thread", "frame", "variables", or "group" for all variables of a rank.
            number: the number on the rank, from 1; 0 for a group.
        """
        key = kind, rank, number
        if key not in self._numbers:
            self._numbers[key] = new = next(self._next)
            self._found[new] = rank, number
        return self._numbers[key]

    def find(self, number: object) -> tuple[int, int] | None:
        """Return the rank and the number there; None if it belongs to no rank."""
        return self._found.get(number) if isinstance(number, int) else None

    def forget(self, rank: int, *, threads: bool = False) -> None:
        """Forget the frames and variables of a rank: it runs on.

        Args:
            threads: forget its threads, too: it has a new process.
        """
        for key in [key for key in self._numbers if key[1] == rank and (threads or key[0] in ("frame", "variables"))]:
            del self._found[self._numbers.pop(key)]
