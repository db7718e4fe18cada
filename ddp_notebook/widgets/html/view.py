"""View of the monitor as HTML: redraws its display in the main thread when there is new data."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import replace
from typing import Any

from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.widgets.feed.feed import Feed
from ddp_notebook.widgets.feed.messages import FeedMessage
from ddp_notebook.widgets.html import page
from ddp_notebook.widgets.html.sources import PageState, Sources
from ddp_notebook.widgets.publisher import Publisher

PERIOD_S = 0.5  # between two redraws
_log = logging.getLogger(__name__)


class HtmlView:
    """Display that is updated with the current page.

    Args:
        recording: Recording of the session.
        cell: Cell to show; None for all cells.
        title: Title of the session.
        publisher: Publisher that notifies this view; None if no more data arrives.
        handle: Display to replace; None to create one.
    """

    def __init__(
        self,
        recording: RecordedTables,
        cell: int | None,
        title: str,
        publisher: Publisher | None,
        handle: Any = None,
    ) -> None:
        self.cell = cell
        self.is_live = publisher is not None
        self._note = ""
        self._recording = recording
        self._title = title
        self._publisher = publisher
        self._handle = handle
        self._key = secrets.token_hex(3)
        self._sources: Sources | None = None
        self._has_news = True
        self._drawn_s = 0.0
        self._drawn: dict[str, Any] = {}
        if publisher is None:
            self._show(self._final())
        else:
            publisher.add(self.on_news)
            self.look(time.monotonic())

    @property
    def publisher(self) -> Publisher | None:
        """The publisher that notifies this view of new data."""
        return self._publisher

    def look(self, now_s: float) -> None:
        """Draw the view again if there is new data and the last drawing was long enough ago."""
        if self._publisher is None or now_s < self._drawn_s + PERIOD_S:
            return
        if not self._has_news and self._publisher.behind_s() != 0.0:
            return
        self._has_news = False  # before the look, so that data which arrives during it triggers another redraw
        self._drawn_s = now_s
        shown = self._publisher.with_feed(self._look)
        words = f"{shown.title}, {shown.state}"
        self._show({"text/plain": words, "text/html": page.draw(shown, self._key)})

    def note(self, words: str) -> None:
        """Show a sentence below the view."""
        if words != self._note:
            self._note, self._has_news = words, True

    def freeze(self, recording: RecordedTables, cell: int | None) -> None:
        """Leave the final page, which works in the saved notebook and without a kernel."""
        if self._publisher is not None:
            self._publisher.remove(self.on_news)
            self._publisher = None
        self._recording, self.cell = recording, cell
        self._show(self._final())

    def on_news(self, _: FeedMessage) -> None:
        """Note that there is new data. Thread-safe."""
        self._has_news = True

    def _look(self, feed: Feed, _: int) -> PageState:
        assert self._publisher is not None
        if self._sources is None:
            self._sources = Sources(feed)
        shown = self._sources.look(self._publisher.head())
        return replace(shown, notes=[*shown.notes, self._note]) if self._note else shown

    def _final(self) -> dict[str, Any]:
        from ddp_notebook.widgets.still import saved_summary

        data = {**self._drawn}
        try:
            data["text/plain"] = saved_summary.text(self._recording, self.cell)
            data["text/html"] = page.of_recording(self._recording, self.cell, self._title, self._key)
        except Exception:  # the last drawing is better than no output
            _log.exception("the last state of the run could not be drawn")
        return data

    def _show(self, data: dict[str, Any]) -> None:
        if data == self._drawn:
            return
        self._drawn = data
        if self._handle is None:
            from IPython.display import display

            self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]
        else:
            self._handle.update(data, raw=True)
