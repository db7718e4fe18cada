"""Lines that are still being written, in a display that changes in its place: bars, dots, text that clears itself."""

from __future__ import annotations

from collections.abc import Callable

from ddp_notebook.run.outlet import Outlet

_UPDATE_S = 0.1
_MOST_CHARS = 4000  # of one update
_MOST_CHARS_OF_RANK = 2000


class Live:
    """One display with the unfinished line of each rank; equal ones are folded.

    Its place is fixed when it first shows something; when all its lines have ended, the next ones get a new place.
    A rank that clears its output has all its later text here, until the cell ends.

    Args:
        outlet: where it is displayed.
        label: makes the label of a set of ranks.
    """

    def __init__(self, outlet: Outlet, label: Callable[[list[int]], str]) -> None:
        self._outlet = outlet
        self._label = label
        self._lines: dict[tuple[int, str], str] = {}  # (rank, stream) -> text
        self._open: set[tuple[int, str]] = set()
        self._clearing: dict[int, bool] = {}  # ranks that clear their output -> whether to, before the next text
        self._display_id = ""
        self._shown = ""
        self._updated_s = 0.0

    def set_line(self, rank: int, stream: str, text: str) -> None:
        """A line has no end yet, and this text."""
        self._lines[rank, stream] = text
        self._open.add((rank, stream))

    def end_line(self, rank: int, stream: str, text: str) -> bool:
        """A line has ended. Whether it is shown here, since it was begun here or its rank clears its output."""
        key = (rank, stream)
        if rank in self._clearing:
            before = "" if self._clearing[rank] else self._lines.get(key, "") + "\n"
            self._clearing[rank] = False
            self._lines[key] = (before + text).lstrip("\n")[-_MOST_CHARS_OF_RANK:]
            self._open.add(key)
            return True
        if key not in self._open:
            return False
        self._lines[key] = text
        self._open.discard(key)
        return True

    def clear(self, rank: int) -> None:
        """What the rank shows next replaces what it has shown here."""
        if self._outlet.can_update:
            self._clearing[rank] = True

    def refresh(self, now: float) -> float | None:
        """Show what has changed. Seconds until the next change may be shown; None: there is none."""
        text = self._render()
        if text == self._shown:
            return None
        if (wait_s := self._updated_s + _UPDATE_S - now) > 0:
            return wait_s
        self._updated_s = now if now != float("inf") else 0.0
        if not self._display_id:
            self._display_id = self._outlet.new_id()
            self._outlet.show({"text/plain": text}, display_id=self._display_id)
        else:
            self._outlet.update({"text/plain": text}, None, self._display_id)
        self._shown = text
        if not self._open:
            self.close()
        return None

    def close(self) -> None:
        """What is shown stays; the next line gets a new place."""
        self._lines.clear()
        self._open.clear()
        self._display_id = self._shown = ""

    def _render(self) -> str:
        groups: dict[str, list[int]] = {}
        for (rank, _), text in sorted(self._lines.items()):
            if text:
                groups.setdefault(text, []).append(rank)
        lines = []
        for text, ranks in groups.items():
            prefix = self._label(ranks)
            lines.append(prefix + text.replace("\n", "\n" + " " * len(prefix)))
        shown = "\n".join(lines)
        return shown if len(shown) <= _MOST_CHARS else shown[: _MOST_CHARS - 2] + "…"
