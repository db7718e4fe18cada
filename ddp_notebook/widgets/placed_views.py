"""The views that a notebook can show: a widget, a static picture, or the HTML of `html.view`."""

from __future__ import annotations

import base64
import html
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

from ddp_notebook.observe.tables.recorded import RecordedTables

if TYPE_CHECKING:
    from ddp_notebook.widgets.monitor import Monitor
    from ddp_notebook.widgets.publisher import Publisher

_NO_PICTURE = "The picture of this monitor appears when a cell has ended."
_log = logging.getLogger(__name__)


class View(Protocol):
    """View of one cell, or of all cells (None)."""

    cell: int | None
    is_live: bool  # shows new rows as they arrive

    @property
    def publisher(self) -> Publisher | None:
        """Return the publisher of this view; None if no data arrives any more."""

    def look(self, now_s: float) -> None:
        """Redraw if necessary. Called often, in the main thread."""

    def freeze(self, recording: RecordedTables, cell: int | None) -> None:
        """Leave an output that works in the saved notebook and without a kernel."""


class WidgetView:
    """View that shows the monitor widget.

    Args:
        monitor: The widget.
        cell: Cell that the widget shows; None for all cells.
        publisher: Publisher that sends rows as they arrive; None if no rows arrive.
        has_picture: Add a picture for the saved notebook, which `keep_picture` draws.
    """

    def __init__(
        self, monitor: Monitor, cell: int | None, publisher: Publisher | None, *, has_picture: bool = False
    ) -> None:
        from IPython.display import display

        self.cell = cell
        self.is_live = publisher is not None
        self.publisher = publisher
        self.monitor = monitor
        # Not `display(monitor)`: ipywidgets 7, as in Colab, shows a widget itself, without the display's id.
        shown = monitor._repr_mimebundle_()
        data = shown[0] if isinstance(shown, tuple) else shown
        self.handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]
        self._picture = None
        if has_picture:  # display it now: nothing can be added to the cell later
            data = _behind(monitor.key, {"text/plain": _NO_PICTURE})
            self._picture = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]
        self.shown_s = time.monotonic()

    def look(self, _: float) -> None:
        """Do nothing: the publisher sends new data."""

    def keep_picture(self, recording: RecordedTables) -> None:
        """Draw the picture for the saved notebook, because a widget shows nothing without its kernel."""
        if self._picture is not None:
            self._picture.update(_behind(self.monitor.key, _static(recording, self.cell)), raw=True)

    def drop_picture(self) -> None:
        """Clear the picture, because another output replaces it."""
        picture, self._picture = self._picture, None
        if picture is not None:
            picture.update({"text/plain": "", "text/html": ""}, raw=True)

    def freeze(self, recording: RecordedTables, cell: int | None) -> None:
        """Replace the widget by a picture and a text."""
        try:
            if self.handle is not None:
                self.handle.update(_static(recording, cell), raw=True)
            self.drop_picture()
        finally:
            self.monitor.close()


class StillView:
    """Static picture for notebooks without a front end. Drawn once now and once when the session ends."""

    is_live = False
    publisher = None

    def __init__(self, recording: RecordedTables, cell: int | None) -> None:
        from IPython.display import display

        self.cell = cell
        self._handle = display(_static(recording, cell), raw=True, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]

    def look(self, _: float) -> None:
        """Do nothing."""

    def freeze(self, recording: RecordedTables, cell: int | None) -> None:
        """Draw the picture again."""
        if self._handle is not None:
            self._handle.update(_static(recording, cell), raw=True)


def _behind(key: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return a display that is visible only if the widget with this key is not on the page.

    JupyterLab shows "model not found" for a widget without its kernel. The rules hide that line too.
    """
    still = f'.ddpm-still[data-key="{key}"]'
    is_live = f':root:has(.ddpm[data-key="{key}"])'
    child = ".jp-OutputArea-child"
    rules = (
        f"{is_live} {still},{is_live} {child}:has({still}){{display:none}}"
        f"{child}:not(:has(.ddpm)):has(+ {child} {still}){{display:none}}"
        f"{still} img{{max-width:100%}}"
    )
    words = html.escape(data.get("text/plain") or "")
    shown = words
    if png := data.get("image/png"):
        shown = f'<img src="data:image/png;base64,{png}" alt="{words}">'
    page = f'<style>{rules}</style><div class="ddpm-still" data-key="{key}">{shown}</div>'
    return {**data, "text/html": page}


def _static(recording: RecordedTables, cell: int | None) -> dict[str, Any]:
    from ddp_notebook.widgets.still import saved_summary

    data: dict[str, Any] = {"text/plain": ""}
    try:
        data["text/plain"], draw = saved_summary.text_and_picture(recording, cell)
        data["image/png"] = base64.b64encode(draw()).decode()
    except Exception:  # a text alone, or no output, is better than an exception
        _log.exception("no picture of the run could be made")
    return data
