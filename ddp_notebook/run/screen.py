"""Output of ranks in the notebook: live, each line labelled with its rank."""

from __future__ import annotations

import sys
import time
from typing import Any

from ddp_notebook.events import Display
from ddp_notebook.run.cell import Shown

_PARTIAL_LINE_S = 0.2  # a line without its end is shown after so long
_FLUSH_S = 0.05  # what was shown reaches the front end within so long, and not more often


class Screen:
    """Shows what comes from the ranks. A line is shown whole, or as far as it is when no more comes for a while.

    All text goes out as text: nothing that a rank prints is taken as markup.
    """

    def __init__(self) -> None:
        self._partial: dict[tuple[int, str], tuple[str, float]] = {}  # (rank, stream) -> text, since when
        self._open: tuple[int, str] | None = None  # whose unfinished line is the last on the screen
        self._flushed = 0.0
        self._dirty = False

    def show(self, item: Shown) -> None:
        """Show a piece of text or a display."""
        if item.display is not None:
            self._show_display(item.rank, item.display)
            return
        key = (item.rank, item.stream)
        text, since = self._partial.pop(key, ("", time.monotonic()))
        text += item.text
        cut = max(text.rfind("\n"), text.rfind("\r")) + 1
        if cut:
            self._write(key, text[:cut])
        if text[cut:]:
            self._partial[key] = text[cut:], since if not cut else time.monotonic()

    def refresh(self) -> float | None:
        """Bring what was shown to the front end. Seconds until this is to be called again; None: not at all."""
        now = time.monotonic()
        for key, (text, since) in list(self._partial.items()):
            if now - since > _PARTIAL_LINE_S:
                del self._partial[key]
                self._write(key, text)
        if self._dirty and now - self._flushed >= _FLUSH_S:
            self._flush(now)
        return _FLUSH_S if self._dirty else _PARTIAL_LINE_S if self._partial else None

    def note(self, text: str) -> None:
        """Show a line of our own."""
        self.finish()
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def finish(self) -> None:
        """The cell is over: show all that is left, and end the last line."""
        for key, (text, _) in self._partial.items():
            self._write(key, text)
        self._partial.clear()
        if self._open is not None:
            self._close_line()
        if self._dirty:
            self._flush(time.monotonic())

    def _flush(self, now: float) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._dirty, self._flushed = False, now

    def _write(self, key: tuple[int, str], text: str) -> None:
        rank, stream = key
        label = f"[{rank}] "
        out = []
        if self._open == key:
            line, end, text = _first_line(text)
            out.append(line + end)
            self._open = None if end == "\n" else key
            if end == "\r" and text:
                out.append(label)
        elif self._open is not None:
            self._close_line()
        while text:
            line, end, text = _first_line(text)
            out.append(f"{label}{line}{end}")
            self._open = None if end == "\n" else key
        getattr(sys, stream).write("".join(out))
        self._dirty = True

    def _close_line(self) -> None:
        assert self._open is not None
        getattr(sys, self._open[1]).write("\n")
        self._open = None

    def _show_display(self, rank: int, display: Display) -> None:
        content = display.content
        data: dict[str, Any] = content.get("data") or {}
        if display.msg_type == "clear_output" or not data:
            return
        self.finish()
        plain = data.get("text/plain")
        display_id = (content.get("transient") or {}).get("display_id")
        if set(data) == {"text/plain"} and display_id is None:
            self._write((rank, "stdout"), f"{plain}\n")
            return
        from IPython.display import publish_display_data

        is_update = display.msg_type == "update_display_data"
        if not is_update:
            self._write((rank, "stdout"), f"{plain.partition(chr(10))[0] if plain else 'display'}\n")
            self._flush(time.monotonic())
        more: dict[str, Any] = {}
        if display_id is not None:
            more = {"transient": {"display_id": f"rank{rank}-{display_id}"}, "update": is_update}
        publish_display_data(data, content.get("metadata") or {}, **more)


def _first_line(text: str) -> tuple[str, str, str]:
    """The first line, its end ("\\n", "\\r" or nothing) and the rest."""
    ends = [at for at in (text.find("\n"), text.find("\r")) if at >= 0]
    if not ends:
        return text, "", ""
    return text[: min(ends)], text[min(ends)], text[min(ends) + 1 :]
