"""What stands at one place of a notebook: a widget, a picture where nobody looks, or the HTML of `html.view`."""

from __future__ import annotations

import base64
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

from ddp_notebook.observe.tables.recorded import RecordedTables

if TYPE_CHECKING:
    from ddp_notebook.widgets.monitor import Monitor

_log = logging.getLogger(__name__)


class View(Protocol):
    """A view of one cell, or of all (None)."""

    cell: int | None
    is_live: bool  # it shows rows as they come

    def look(self, now_s: float) -> None:
        """To be called often, in the main thread."""

    def freeze(self, recording: RecordedTables, cell: int | None) -> None:
        """Leave what stands in the saved notebook, and without a kernel."""


class WidgetView:
    """A monitor on the page.

    Args:
        monitor: the widget.
        cell: the one that it shows; None: all.
        is_live: it shows rows as they come.
    """

    def __init__(self, monitor: Monitor, cell: int | None, *, is_live: bool) -> None:
        from IPython.display import display

        self.cell = cell
        self.is_live = is_live
        self.monitor = monitor
        # Not `display(monitor)`: ipywidgets 7, as Colab has it, shows a widget itself, without the display's id.
        shown = monitor._repr_mimebundle_()
        data = shown[0] if isinstance(shown, tuple) else shown
        self.handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]
        self.shown_s = time.monotonic()

    def look(self, _: float) -> None:
        """Its publisher tells it what is new."""

    def freeze(self, recording: RecordedTables, cell: int | None) -> None:
        """Leave a picture and a text in its place."""
        try:
            if self.handle is not None:
                self.handle.update(_static(recording, cell), raw=True)
        finally:
            self.monitor.close()


class StillView:
    """A picture where there is no front end: of what is there now, and of everything when the session ends."""

    is_live = False

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


def _static(recording: RecordedTables, cell: int | None) -> dict[str, Any]:
    from ddp_notebook.widgets.still import summary

    data: dict[str, Any] = {"text/plain": ""}
    try:
        data["text/plain"] = summary.text(recording, cell)
        data["image/png"] = base64.b64encode(summary.picture(recording, cell)).decode()
    except Exception:  # a text alone, or nothing, is better than a dead view
        _log.exception("no picture of the run could be made")
    return data
