"""Places views: automatically under a running cell, and at `%ddp_monitor`; and replaces them by static output at the
end.

There are three kinds of views:

- a widget
- HTML that is redrawn, if the user asked for it or no widget answers
- a picture, if there is no front end

A widget that does not answer in time is replaced by HTML in the same display, so there is always exactly one view. If
the widget answers later, new views are widgets again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.tables.matching import label_of, numbers_of, prompt_of
from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.run.notebook_kernel import before_next_cell, cell_number, has_front_end, is_users_thread
from ddp_notebook.run.output.display_target import CellTarget, DisplayHandle, DisplayTarget
from ddp_notebook.run.output.rate_limiter import new_id
from ddp_notebook.widgets.frontend_probe import ANSWER_S, FrontendProbe
from ddp_notebook.widgets.picture_renewal import SETTLE_S, PictureRenewal
from ddp_notebook.widgets.placed_views import StillView, View, WidgetView
from ddp_notebook.widgets.under_cell import UnderCell

if TYPE_CHECKING:
    from ddp_notebook.widgets.html.view import HtmlView
    from ddp_notebook.widgets.live_status import MonitorSource
    from ddp_notebook.widgets.monitor import Monitor
    from ddp_notebook.widgets.publisher import Publisher

_MOST_NAMED = 8  # cells in an error message
_AGAIN_S = 0.5  # shortest time until `look` checks numbers again that are not current
_log = logging.getLogger(__name__)


class ViewPlacement:
    """Views of one session: one under the running cell, and one of `%ddp_monitor`.

    Args:
        recording: Recording of the session.
        flushed: Function that collects all recorded rows from the ranks.
        cells: Cells of the session.
        title: Function that returns the title of the session.
        mode: `StartOptions.live`.
    """

    def __init__(
        self,
        recording: RecordedTables,
        flushed: Callable[[], object],
        cells: MonitorSource,
        title: Callable[[], str],
        mode: str,
    ) -> None:
        self._recording = recording
        self._flushed = flushed
        self._cells = cells
        self._title = title
        self._mode = mode
        self._answering = FrontendProbe()
        self._publishers: dict[int | None, Publisher] = {}  # publishers of the placed views, by cell; None: all cells
        self._group = secrets.token_hex(4)
        self._shown: View | None = None  # view of %ddp_monitor
        self._under: View | None = None  # view under the running cell
        self._apart: dict[int | None, Publisher] = {}  # publishers of monitors that the user has created, by cell
        # widgets without an answer so far; if one answers, new views are widgets again
        self._replaced: list[Monitor] = []
        self._instead: HtmlView | None = None  # the latest HTML view that replaced a widget
        self._lock = threading.RLock()  # a background cell calls `look` in another thread
        self._loop: asyncio.AbstractEventLoop | None = None  # event loop of the kernel
        self._importing: threading.Thread | None = None  # imports the modules that a picture needs
        self._again_s = math.inf  # time of the next `look` that `_look_again` has scheduled
        self._renewal: PictureRenewal | None = None  # redraws the picture of a live %ddp_monitor

    def prepare(self) -> None:
        """Import the modules of the first view in a thread, before they are needed."""
        if self._mode != "off" and has_front_end():
            what = _import_html if self._mode == "html" else _import
            threading.Thread(target=what, name="ddp-monitor-import", daemon=True).start()

    @property
    def draws_html(self) -> bool:
        """Return whether new views are HTML."""
        return self._mode == "html" or self._answering.is_missing

    # ---- views of a running cell

    def beside(self, target: DisplayTarget, code: str) -> UnderCell | None:
        """Return the view for the output of a starting cell; None if it gets no view.

        Args:
            target: Target of the output.
            code: Code of the cell.
        """
        may_come = self._mode != "off"
        if not has_front_end() or not (may_come or self._shown is not None):
            return None
        elsewhere = target if isinstance(target, CellTarget) else None
        return UnderCell(self, self._recording, code, may_come=may_come, elsewhere=elsewhere)

    def look(self) -> float | None:
        """Redraw changed views, and replace a widget that does not answer.

        Returns:
            Seconds until the next call is needed although no cell runs; None if no call is needed.
        """
        now_s = time.monotonic()
        with self._lock:
            if self._under is not None:
                self._under = self._checked(self._under)
                self._under.look(now_s)
            if self._shown is not None:
                self._shown = self._checked(self._shown)
                self._shown.look(now_s)
                return self._keep_picture()
        return None

    def prepare_picture(self) -> None:
        """Import the modules for a picture while the cell runs.

        Without this, the end of the cell or the stop button would wait 0.5 s for the import (2 cores).
        """
        self._importing = threading.Thread(target=_import_for_picture, name="ddp-picture-import", daemon=True)
        self._importing.start()

    def show_under(self, cell: int, elsewhere: DisplayTarget | None) -> None:
        """Show a compact view under the running cell.

        Args:
            elsewhere: Output of a background cell, which gets HTML because any thread can draw it; None to display
                directly.
        """
        with self._lock:
            if elsewhere is None:
                self._under = self._view(cell, compact=True)
            else:
                self._under = self._html_view(cell, self._publisher_of(cell), DisplayHandle(elsewhere, new_id()))

    def end(self, cell: int) -> None:
        """Finish the views of a cell that has ended."""
        with self._lock:
            view, self._under = self._under, None
            if view is not None:
                self._freeze(view, cell)
            else:
                self._close_unused()  # a publisher exists even if the view could not be created
                if self._importing is not None:
                    before_next_cell(self._await_import)
            if self._shown is not None:
                if self._renewal is not None:
                    self._renewal.note_end()
                self._look_later(SETTLE_S)

    # ---- %ddp_monitor

    def show(self, cell: int | None = None) -> None:
        """Show the full view, and freeze the previous one.

        Args:
            cell: Show only this cell; None for all cells, including future ones.

        Raises:
            UsageError: The recording has nothing of this cell.
            MissingBuildError: The JavaScript was not built.
        """
        check_cell(self._recording, cell)
        with self._lock:
            if self._shown is not None:
                self._freeze(self._shown, self._shown.cell)
                self._shown = None
            self._end_renewal()
            if has_front_end():
                self._shown = self._view(cell, compact=False)
                self._look_later(ANSWER_S)
                if isinstance(self._shown, WidgetView) and self._shown.is_live:
                    self._begin_renewal()
            else:
                self._shown = StillView(self._recording_now(), cell)

    def on_resized(self) -> None:
        """Freeze the shown view after a change of world_size, and show a new one."""
        with self._lock:
            shown, self._shown = self._shown, None
            while self._apart:
                self._apart.popitem()[1].close()
            if shown is not None:
                self._freeze(shown, shown.cell)
                self.show(shown.cell)

    def close(self) -> None:
        """Freeze all views, because the session ends."""
        with self._lock:
            views = [view for view in (self._under, self._shown) if view is not None]
            self._under = self._shown = None
            self._end_renewal()
            for publisher in self._publishers.values():
                publisher.close(session_ends=True)
            while self._apart:
                self._apart.popitem()[1].close(session_ends=True)
            for view in views:
                self._freeze(view, view.cell)
            self._publishers.clear()
            self._close_replaced()

    def interrupt(self) -> str:
        """Handle the stop button of a view. Return a message about the result."""
        return self._cells.press_stop()

    # ---- views

    def _view(self, cell: int | None, *, compact: bool) -> View:
        run = self._cells.under_way
        is_live = cell is None or (run is not None and run.number == cell)  # otherwise no more rows arrive
        recording = self._recording if is_live else self._recording_now()
        if self.draws_html:
            return self._html_view(cell, self._publisher_of(cell) if is_live else None, recording=recording)
        from ddp_notebook.widgets.monitor import Monitor

        self._close_replaced()
        # A widget of one cell can filter the rows of all cells, so it shares that publisher if it exists.
        publisher = self._publisher_of(None if None in self._publishers else cell) if is_live else None
        monitor = Monitor(
            recording,
            cell,
            compact=compact and is_live,
            publisher=publisher,
            interrupt=self.interrupt,
            answering=self._answering,
            group=self._group if is_live else "",
            place="" if compact else f"In [{cell_number()}]",
        )
        view = WidgetView(monitor, cell, publisher, has_picture=not compact)
        if not is_live:
            view.keep_picture(recording)
        return view

    def _html_view(
        self,
        cell: int | None,
        publisher: Publisher | None,
        handle: object = None,
        recording: RecordedTables | None = None,
    ) -> HtmlView:
        from ddp_notebook.widgets.html.view import HtmlView

        return HtmlView(recording or self._recording, cell, self._title(), publisher, handle)

    def _checked(self, view: View) -> View:
        """Return the same view, or an HTML view that replaces a widget without an answer."""
        if self._instead is not None and view is self._instead and self._answering.is_there:
            self._instead.note("the widget under this cell answered late: %ddp_monitor shows one with all panels")
        if not isinstance(view, WidgetView) or not self._answering.is_overdue(view.shown_s):
            return view
        instead = self._html_view(view.cell, self._publisher_of(view.cell) if view.is_live else None, view.handle)
        self._instead = instead
        view.drop_picture()
        view.monitor.leave()
        self._replaced.append(view.monitor)  # not closed, so that a late answer is still received
        return instead

    def _close_replaced(self) -> None:
        while self._replaced:
            self._replaced.pop().close()

    def _look_later(self, after_s: float) -> None:
        """Schedule `look` in the kernel's event loop, and so in the main thread, when no cell runs."""
        with contextlib.suppress(RuntimeError):  # this thread has no event loop
            self._loop = asyncio.get_running_loop()
        with contextlib.suppress(RuntimeError):  # the event loop was closed
            if self._loop is not None:  # if there is none, the next cell calls `look`
                self._loop.call_soon_threadsafe(self._loop.call_later, after_s + 0.05, self._look_alone)

    def _look_again(self, after_s: float) -> None:
        """Schedule `look` when no cell runs, unless an earlier call is already scheduled."""
        if (at_s := time.monotonic() + after_s) < self._again_s:
            self._again_s = at_s
            self._look_later(after_s)

    def _look_alone(self) -> None:
        try:
            self._again_s = math.inf
            if (again_s := self.look()) is not None:
                self._look_again(again_s)
            self._look_until_current()
        except Exception:
            _log.exception("the monitor could not be updated")

    def _look_until_current(self) -> None:
        """Schedule `look` while HTML shows older numbers of the run than the ranks have sent. Nothing else redraws it
        now."""
        view = self._shown
        if view is None or isinstance(view, WidgetView) or view.publisher is None or self._cells.under_way is not None:
            return
        if (behind_s := view.publisher.behind_s()) is not None:
            self._look_later(max(behind_s, _AGAIN_S))

    def _publisher_of(self, cell: int | None) -> Publisher:
        if cell not in self._publishers:
            self._publishers[cell] = self._new_publisher(cell)
        return self._publishers[cell]

    def publisher_apart(self, cell: int | None) -> Publisher:
        """Return the publisher that all monitors of a cell share which the user creates.

        A repeated cell creates another monitor each time, and the earlier ones are never closed.
        """
        if cell not in self._apart:
            self._apart[cell] = self._new_publisher(cell)
        return self._apart[cell]

    def _new_publisher(self, cell: int | None) -> Publisher:
        from ddp_notebook.widgets.feed.feed import Feed
        from ddp_notebook.widgets.live_status import LiveStatus
        from ddp_notebook.widgets.publisher import Publisher

        # after the end of the session no rows arrive
        feed = Feed(self._recording, cell, is_live=self._cells.is_running)
        return Publisher(feed, LiveStatus(feed, self._cells, self._title()))

    def _await_import(self) -> None:
        """Wait for the import that a picture needs. Two threads that import matplotlib get an incomplete module."""
        if self._importing is not None:
            self._importing.join()
            self._importing = None

    def _freeze(self, view: View, cell: int | None) -> None:
        self._await_import()
        view.freeze(self._recording_now(), cell)
        self._close_unused(but_for=view)

    def _close_unused(self, but_for: View | None = None) -> None:
        """Close the publishers that no other view uses."""
        used = [view.publisher for view in (self._under, self._shown) if view is not None and view is not but_for]
        for cell, publisher in list(self._publishers.items()):
            if publisher not in used:
                publisher.close()
                del self._publishers[cell]

    # ---- the picture behind %ddp_monitor

    def _begin_renewal(self) -> None:
        self._renewal = renewal = PictureRenewal(self._recording)
        renewal.on_rows = lambda: self._look_again(SETTLE_S)
        if any(len(ring) for ring in self._recording.store.rings.values()):
            renewal.make_stale()

    def _end_renewal(self) -> None:
        renewal, self._renewal = self._renewal, None
        if renewal is not None:
            renewal.close()

    def _keep_picture(self) -> float | None:
        """Draw the picture if it is stale. Return the seconds until the next attempt; None if it is current.

        The picture is drawn when no cell runs, or during the next cell. During a cell, drawing takes at most 5 % of the
        time.
        """
        view, renewal = self._shown, self._renewal
        if renewal is None or not renewal.is_stale or not isinstance(view, WidgetView):
            return None
        if "matplotlib.figure" not in sys.modules and self._importing is None:
            self.prepare_picture()
            before_next_cell(self._await_import)
        if self._importing is not None and self._importing.is_alive():
            return SETTLE_S
        runs = self._cells.under_way is not None
        if (waits_s := renewal.waits_s(time.monotonic(), runs=runs)) > 0:
            return waits_s
        if not is_users_thread():  # a background thread; the main thread may use matplotlib now, and draws later
            return SETTLE_S
        renewal.begin()
        try:
            with self._recording._as_it_is() if runs else contextlib.nullcontext():
                view.keep_picture(self._recording)
        finally:
            renewal.end()
        return None

    def _recording_now(self) -> RecordedTables:
        with contextlib.suppress(Exception):  # if the ranks are gone, the rows so far must suffice
            self._flushed()
        return self._recording


def check_cell(recording: RecordedTables, cell: int | None) -> None:
    """Check that the recording has something of this cell; None accepts any cell.

    Raises:
        UsageError: The recording has nothing of it. The error lists the recorded cells.
    """
    if cell is None or cell in (known := _cells(recording)):
        return
    raise UsageError(f"cell {cell} was not recorded; {_recorded(numbers_of(recording, known[-_MOST_NAMED:]))}")


def find_cell(recording: RecordedTables, number: int) -> int:
    """Return the last recorded cell with this number in its prompt, `In [6]`.

    If there is none, return the cell without a prompt that has this number in the recording.

    Raises:
        UsageError: No such cell was recorded. The error lists the recorded cells.
    """
    prompts = {cell: prompt_of(recording, cell) for cell in _cells(recording)}
    if cells := [cell for cell, prompt in prompts.items() if prompt == f"In [{number}]"]:
        return cells[-1]
    if prompts.get(number) == "":
        return number
    labels = [label_of(recording, cell) for cell in prompts]
    raise UsageError(f"In [{number}] was not recorded; {_recorded(labels[-_MOST_NAMED:])}")


def _cells(recording: RecordedTables) -> list[int]:
    """Return the recorded cells, ascending."""
    found = [np.unique(recording.rows(table)["cell"]) for table in ("call", "span", "metric")]
    return [cell for cell in np.unique(np.concatenate(found)).tolist() if cell]


def _recorded(names: list[str]) -> str:
    return f"the latest recorded cells: {', '.join(names)}" if names else "no cell was recorded"


def _import() -> None:
    import ddp_notebook.widgets.monitor
    import ddp_notebook.widgets.publisher
    import ddp_notebook.widgets.still.saved_summary  # noqa: F401


def _import_html() -> None:
    import ddp_notebook.widgets.html.view
    import ddp_notebook.widgets.still.saved_summary  # noqa: F401


def _import_for_picture() -> None:
    with contextlib.suppress(Exception):  # the drawing code reports the error
        import matplotlib.backends.backend_agg  # noqa: F401
        import PIL.PngImagePlugin  # noqa: F401

        import ddp_notebook.observe.figures.bars
        import ddp_notebook.observe.figures.curves  # noqa: F401
