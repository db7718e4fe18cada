"""Unfinished lines, in a display that is updated in place: progress bars, dots, text that clears itself."""

from __future__ import annotations

from collections.abc import Iterable

from ddp_notebook.run.output.labels import labelled
from ddp_notebook.run.output.rate_limiter import RateLimiter, new_id

UPDATE_S = 0.1  # interval of updates
_MOST_CHARS = 4000  # limit of characters of one update
MOST_CHARS_OF_RANK = 2000  # a longer line is shown after its end
Key = tuple[int, str]  # rank, stream


class Unfinished:
    """One display with the unfinished line of each rank, in the order of the ranks. Equal lines are folded.

    Its position is fixed when it first shows something. After all its lines have ended, a rank may start a new line in
    it, unless the rank has a line in it or output below it. Lines of other ranks get a new display, as do all lines
    when it is full. After a rank clears its output, its text appears in this display while it is short.

    Args:
        rate_limiter: shows the display.
    """

    def __init__(self, rate_limiter: RateLimiter) -> None:
        self._rate_limiter = rate_limiter
        self._above: list[tuple[int, str]] = []  # ended lines, as (rank, text)
        self._lines: dict[Key, str] = {}  # last line of each stream, unfinished or ended
        self._open: set[Key] = set()
        self._passed: set[int] = set()  # ranks that have output below the display
        self._later: set[Key] = set()  # streams written since their rank cleared its output
        # ranks that clear their output -> whether the next text replaces the old one
        self._clearing: dict[int, bool] = {}
        self._display_id = ""
        self._shown = ""
        self._updated_s = 0.0

    def set_line(self, rank: int, stream: str, text: str) -> None:
        """Set the text of an unfinished line."""
        key = (rank, stream)
        if not self._open and (rank in self._passed or any(other == rank for other, _ in self._lines)):
            if (shown := self._render(self._above, self._lines)) != self._shown:
                self._show(shown)
            self.close()
        if key in self._lines and key not in self._open:
            self._above.append((rank, self._lines[key]))
        self._lines[key] = text
        self._open.add(key)
        self._later.add(key)

    def end_line(self, rank: int, stream: str, text: str) -> bool:
        """Handle the end of a line. Return whether the display shows it, because it started in it or its rank clears
        its output.
        """
        key = (rank, stream)
        if rank in self._clearing:
            before = "" if self._clearing[rank] else self._lines.get(key, "") + "\n"
            text = (before + text).lstrip("\n")
            if len(text) > MOST_CHARS_OF_RANK:  # its rank no longer clears its output: the rest is ordinary text
                del self._clearing[rank]
                self._open.discard(key)
                return False
            self._clearing[rank] = False
            self._lines[key] = text
            self._open.add(key)
            self._later.add(key)
            return True
        if key not in self._open:
            return False
        self._open.discard(key)
        if len(text) > MOST_CHARS_OF_RANK:  # too long for this display
            del self._lines[key]
            return False
        self._lines[key] = text
        return True

    def clear(self, rank: int) -> None:
        """Replace the rank's text in this display with its next text."""
        if self._rate_limiter.can_update:
            self._clearing[rank] = True
            self._later = {key for key in self._later if key[0] != rank}

    def cleared(self) -> None:
        """Handle the removal of all output: show text again that ranks have written since they cleared it."""
        self._lines = {key: text for key, text in self._lines.items() if key in self._later}
        self._open &= self._lines.keys()
        self._above.clear()
        self._passed.clear()
        self._display_id, self._shown, self._updated_s = "", "", 0.0

    def refresh(self, now: float) -> float | None:
        """Show changes. Return the seconds until the next change may be shown; None: there is none."""
        if not (self._lines or self._above or self._shown):  # true in most cells
            return None
        text = self._render(self._above, self._lines)
        if text == self._shown:
            return None
        if (wait_s := self._updated_s + UPDATE_S - now) > 0:
            return wait_s
        self._updated_s = now if now != float("inf") else 0.0
        if self._above and len(text) > _MOST_CHARS // 2:
            self._turn_page()
            text = self._render([], self._lines)
        self._show(text)
        return None

    def pass_by(self, ranks: Iterable[int]) -> None:
        """Record that these ranks have other output below the display."""
        if self._shown:
            self._passed.update(ranks)

    def close(self) -> None:
        """Keep the display as it is. The next line gets a new one."""
        self._passed.clear()
        self._lines.clear()
        self._open.clear()
        self._above.clear()
        self._display_id = self._shown = ""

    def _turn_page(self) -> None:
        """Keep the ended lines in the display, and move the unfinished ones to a new display."""
        ended = {key: text for key, text in self._lines.items() if key not in self._open}
        self._show(self._render(self._above, ended))
        self._lines = {key: text for key, text in self._lines.items() if key in self._open}
        self._above.clear()
        self._display_id = self._shown = ""

    def _show(self, text: str) -> None:
        if not self._display_id:
            self._display_id = new_id()
            self._rate_limiter.show({"text/plain": text}, display_id=self._display_id)
        else:
            self._rate_limiter.update({"text/plain": text}, None, self._display_id)
        self._shown = text

    def _render(self, above: list[tuple[int, str]], lines: dict[Key, str]) -> str:
        groups: dict[str, list[int]] = {}
        texts = [*above, *((rank, text) for (rank, _), text in sorted(lines.items()))]
        for rank, text in texts:
            if text and rank not in groups.setdefault(text, []):
                groups[text].append(rank)
        shown: list[str] = []
        left = _MOST_CHARS
        for number, (text, ranks) in enumerate((text, ranks) for text, ranks in groups.items() if ranks):
            line = labelled(sorted(ranks), text)
            left -= len(line) + 1
            if left < 0 and shown:
                return "\n".join([*shown, f"… and {len(groups) - number} more"])
            shown.append(line[:_MOST_CHARS])
        return "\n".join(shown)
