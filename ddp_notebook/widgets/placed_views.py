"""What stands at one place of a notebook: a widget, a picture where nobody looks, or the HTML of `html.view`."""

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

_NO_PICTURE = "The picture of this monitor comes when a cell has ended."
_log = logging.getLogger(__name__)


class View(Protocol):
    """A view of one cell, or of all (None)."""

    cell: int | None
    is_live: bool  # it shows rows as they come

    @property
    def publisher(self) -> Publisher | None:
        """Sends it what is new; None: nothing comes."""

    def look(self, now_s: float) -> None:
        """To be called often, in the main thread."""

    def freeze(self, recording: RecordedTables, cell: int | None) -> None:
        """Leave what stands in the saved notebook, and without a kernel."""


class WidgetView:
    """A monitor on the page.

    Args:
        monitor: the widget.
        cell: the one that it shows; None: all.
        publisher: sends it rows as they come; None: none come.
        has_picture: a picture stands behind the widget in the saved notebook; `keep_picture` draws it.
    """

    def __init__(
        self, monitor: Monitor, cell: int | None, publisher: Publisher | None, *, has_picture: bool = False
    ) -> None:
        from IPython.display import display

        self.cell = cell
        self.is_live = publisher is not None
        self.publisher = publisher
        self.monitor = monitor
        # Not `display(monitor)`: ipywidgets 7, as Colab has it, shows a widget itself, without the display's id.
        shown = monitor._repr_mimebundle_()
        data = shown[0] if isinstance(shown, tuple) else shown
        self.handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]
        self._picture = None
        if has_picture:  # now: later nothing can be added to the cell
            data = _behind(monitor.key, {"text/plain": _NO_PICTURE})
            self._picture = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]
        self.shown_s = time.monotonic()

    def look(self, _: float) -> None:
        """Its publisher tells it what is new."""

    def keep_picture(self, recording: RecordedTables) -> None:
        """Draw the picture that the saved notebook has: the widget is nothing without its kernel."""
        if self._picture is not None:
            self._picture.update(_behind(self.monitor.key, _static(recording, self.cell)), raw=True)

    def drop_picture(self) -> None:
        """Something else takes its place."""
        picture, self._picture = self._picture, None
        if picture is not None:
            picture.update({"text/plain": "", "text/html": ""}, raw=True)

    def freeze(self, recording: RecordedTables, cell: int | None) -> None:
        """Leave a picture and a text in its place."""
        try:
            if self.handle is not None:
                self.handle.update(_static(recording, cell), raw=True)
            self.drop_picture()
        finally:
            self.monitor.close()


class StillView:
    """A picture where there is no front end: of what is there now, and of everything when the session ends."""

    is_live = False
    publisher = None

    def __init__(self, recording: RecordedTables, cell: int | None) -> None:
        from IPython.display import display

        self.cell = cell
        self._handle = display(_static(recording, cell), raw=True, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]

    def look(self, _: float) -> None:
        """Nobody looks."""

    def freeze(self, recording: RecordedTables, cell: int | None) -> None:
        """Draw it anew."""
        if self._handle is not None:
            self._handle.update(_static(recording, cell), raw=True)


def _behind(key: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return a display that is seen only where the widget with this key is not on the page.

    JupyterLab shows "model not found" in the place of a widget without its kernel: that line is hidden, too.
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
    except Exception:  # a text alone, or nothing, is better than a dead view
        _log.exception("no picture of the run could be made")
    return data
