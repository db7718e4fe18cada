"""Where views appear: by themselves under a running cell, and at `%ddp_monitor`; and what stays of them.

Which kind of view: a widget; HTML that is redrawn, where that was asked for or no widget answers; a picture, where
nobody looks. A widget that does not answer in time is replaced in its display, so there is one view all the same; if
it answers later, the views to come are widgets again.
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

_MOST_NAMED = 8  # cells, in a message
_AGAIN_S = 0.5  # at least, until the next look at numbers that are not current
_log = logging.getLogger(__name__)


class ViewPlacement:
    """Where the views of one session stand: one under the running cell, one of `%ddp_monitor`.

    Args:
        recording: the session's.
        flushed: brings all that ranks have recorded into it.
        cells: the session's.
        title: tells that of the session.
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
        self._publishers: dict[int | None, Publisher] = {}  # for views here: publisher of one cell; None: of all cells
        self._group = secrets.token_hex(4)
        self._shown: View | None = None  # of %ddp_monitor
        self._under: View | None = None  # the cell that runs
        self._apart: dict[int | None, Publisher] = {}  # of monitors that the user has made, by cell
        self._replaced: list[Monitor] = []  # widgets that have not answered yet; when they do, widgets are shown again
        self._instead: HtmlView | None = None  # the last view in the place of such a widget
        self._lock = threading.RLock()  # a cell in the background looks in a thread of its own
        self._loop: asyncio.AbstractEventLoop | None = None  # the kernel's own
        self._importing: threading.Thread | None = None  # what its picture will need
        self._again_s = math.inf  # when `_look_again` has asked for a look
        self._renewal: PictureRenewal | None = None  # redraws the picture behind a live %ddp_monitor

    def prepare(self) -> None:
        """Import what the first view needs, in a thread, before anybody waits for it."""
        if self._mode != "off" and has_front_end():
            what = _import_html if self._mode == "html" else _import
            threading.Thread(target=what, name="ddp-monitor-import", daemon=True).start()

    @property
    def draws_html(self) -> bool:
        """Whether views to come are HTML."""
        return self._mode == "html" or self._answering.is_missing

    # ---- beside a running cell

    def beside(self, target: DisplayTarget, code: str) -> UnderCell | None:
        """What goes beside the output of a cell that begins now; None: nothing.

        Args:
            target: where the output goes.
            code: of the cell.
        """
        may_come = self._mode != "off"
        if not has_front_end() or not (may_come or self._shown is not None):
            return None
        elsewhere = target if isinstance(target, CellTarget) else None
        return UnderCell(self, self._recording, code, may_come=may_come, elsewhere=elsewhere)

    def look(self) -> float | None:
        """Redraw what has changed, and replace a widget that does not answer.

        Returns:
            Seconds until it should be called again though no cell runs here; None if that is not needed.
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
        """Import what a picture needs while the cell runs: its end, or the stop button, would wait for that for 0.5 s
        (2 cores)."""
        self._importing = threading.Thread(target=_import_for_picture, name="ddp-picture-import", daemon=True)
        self._importing.start()

    def show_under(self, cell: int, elsewhere: DisplayTarget | None) -> None:
        """Show a compact view under the cell that runs.

        Args:
            elsewhere: where, for a cell in the background; that is HTML, which any thread can draw. None: here.
        """
        with self._lock:
            if elsewhere is None:
                self._under = self._view(cell, compact=True)
            else:
                self._under = self._html_view(cell, self._publisher_of(cell), DisplayHandle(elsewhere, new_id()))

    def end(self, cell: int) -> None:
        """The cell is over."""
        with self._lock:
            view, self._under = self._under, None
            if view is not None:
                self._freeze(view, cell)
            else:
                self._close_unused()  # there is one if a view could not be made
                if self._importing is not None:
                    before_next_cell(self._await_import)
            if self._shown is not None:
                if self._renewal is not None:
                    self._renewal.note_end()
                self._look_later(SETTLE_S)

    # ---- %ddp_monitor

    def show(self, cell: int | None = None) -> None:
        """Show the full view, in the place of the one before.

        Args:
            cell: of this cell only; None: of all, future ones too.

        Raises:
            UsageError: nothing was recorded of this cell.
            MissingBuildError: the JavaScript was not built.
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
        """There are more or fewer ranks: what is shown becomes a picture, and a full view is made anew."""
        with self._lock:
            shown, self._shown = self._shown, None
            while self._apart:
                self._apart.popitem()[1].close()
            if shown is not None:
                self._freeze(shown, shown.cell)
                self.show(shown.cell)

    def close(self) -> None:
        """The session ends: what is shown becomes static."""
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
        """What the stop button of a view does. Returns what was done, in words."""
        return self._cells.press_stop()

    # ---- views

    def _view(self, cell: int | None, *, compact: bool) -> View:
        run = self._cells.under_way
        is_live = cell is None or (run is not None and run.number == cell)  # else nothing comes any more
        recording = self._recording if is_live else self._recording_now()
        if self.draws_html:
            return self._html_view(cell, self._publisher_of(cell) if is_live else None, recording=recording)
        from ddp_notebook.widgets.monitor import Monitor

        self._close_replaced()
        # A widget takes what it shows of one cell from the rows of all, where another one has them already.
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
        """Return the same view, or HTML in the place of a widget that does not answer."""
        if self._instead is not None and view is self._instead and self._answering.is_there:
            self._instead.note("the widget in this place answered late: %ddp_monitor shows one with all panels")
        if not isinstance(view, WidgetView) or not self._answering.is_overdue(view.shown_s):
            return view
        instead = self._html_view(view.cell, self._publisher_of(view.cell) if view.is_live else None, view.handle)
        self._instead = instead
        view.drop_picture()
        view.monitor.leave()
        self._replaced.append(view.monitor)  # open, so that it is heard if it answers after all
        return instead

    def _close_replaced(self) -> None:
        while self._replaced:
            self._replaced.pop().close()

    def _look_later(self, after_s: float) -> None:
        """Look again when no cell runs, in the kernel's own event loop and so in the main thread."""
        with contextlib.suppress(RuntimeError):  # there is none in this thread
            self._loop = asyncio.get_running_loop()
        with contextlib.suppress(RuntimeError):  # it was closed
            if self._loop is not None:  # else the next cell looks
                self._loop.call_soon_threadsafe(self._loop.call_later, after_s + 0.05, self._look_alone)

    def _look_again(self, after_s: float) -> None:
        """Look again when no cell runs, unless a look is due by then."""
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
            _log.exception("the monitor is as it was")

    def _look_until_current(self) -> None:
        """Look again if HTML shows older numbers of the run than the ranks have sent: nothing else redraws it now."""
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
        """One for all monitors of a cell that the user makes: a cell that is run again makes one more each time, and
        nobody closes the one before."""
        if cell not in self._apart:
            self._apart[cell] = self._new_publisher(cell)
        return self._apart[cell]

    def _new_publisher(self, cell: int | None) -> Publisher:
        from ddp_notebook.widgets.feed.feed import Feed
        from ddp_notebook.widgets.live_status import LiveStatus
        from ddp_notebook.widgets.publisher import Publisher

        feed = Feed(self._recording, cell, is_live=self._cells.is_running)  # behind the session's end nothing comes
        return Publisher(feed, LiveStatus(feed, self._cells, self._title()))

    def _await_import(self) -> None:
        """Let the import of what a picture needs end: two threads that import matplotlib find it half made."""
        if self._importing is not None:
            self._importing.join()
            self._importing = None

    def _freeze(self, view: View, cell: int | None) -> None:
        self._await_import()
        view.freeze(self._recording_now(), cell)
        self._close_unused(but_for=view)

    def _close_unused(self, but_for: View | None = None) -> None:
        """Close the publishers that no view but this one has."""
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
        """Draw the picture if it is stale. Returns the seconds until the next try; None if it is current.

        It is drawn when no cell runs, or while the next one does; not so often then that drawing takes 5 % of the time.
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
        if not is_users_thread():  # a job's thread: matplotlib may be in use in the main thread, which looks later
            return SETTLE_S
        renewal.begin()
        try:
            with self._recording._as_it_is() if runs else contextlib.nullcontext():
                view.keep_picture(self._recording)
        finally:
            renewal.end()
        return None

    def _recording_now(self) -> RecordedTables:
        with contextlib.suppress(Exception):  # the ranks may be gone: then what has come must do
            self._flushed()
        return self._recording


def check_cell(recording: RecordedTables, cell: int | None) -> None:
    """Something is recorded of this cell; None: of whichever.

    Raises:
        UsageError: nothing is; says of which cells there is something.
    """
    if cell is None or cell in (known := _cells(recording)):
        return
    raise UsageError(f"nothing is recorded of a cell {cell}; {_there(numbers_of(recording, known[-_MOST_NAMED:]))}")


def find_cell(recording: RecordedTables, number: int) -> int:
    """The last recorded cell with this number in its prompt, `In [6]`; where none has, the cell that has no prompt and
    this number in the recording.

    Raises:
        UsageError: nothing is recorded of such a cell; says of which cells there is something.
    """
    prompts = {cell: prompt_of(recording, cell) for cell in _cells(recording)}
    if cells := [cell for cell, prompt in prompts.items() if prompt == f"In [{number}]"]:
        return cells[-1]
    if prompts.get(number) == "":
        return number
    labels = [label_of(recording, cell) for cell in prompts]
    raise UsageError(f"nothing is recorded of In [{number}]; {_there(labels[-_MOST_NAMED:])}")


def _cells(recording: RecordedTables) -> list[int]:
    """The cells of which something is recorded, in their order."""
    found = [np.unique(recording.rows(table)["cell"]) for table in ("call", "span", "metric")]
    return [cell for cell in np.unique(np.concatenate(found)).tolist() if cell]


def _there(names: list[str]) -> str:
    return f"there is something of {', '.join(names)}" if names else "nothing at all was"


def _import() -> None:
    import ddp_notebook.widgets.monitor
    import ddp_notebook.widgets.publisher
    import ddp_notebook.widgets.still.saved_summary  # noqa: F401


def _import_html() -> None:
    import ddp_notebook.widgets.html.view
    import ddp_notebook.widgets.still.saved_summary  # noqa: F401


def _import_for_picture() -> None:
    with contextlib.suppress(Exception):  # who draws it says what is wrong
        import matplotlib.backends.backend_agg  # noqa: F401
        import PIL.PngImagePlugin  # noqa: F401

        import ddp_notebook.observe.figures.bars
        import ddp_notebook.observe.figures.curves  # noqa: F401
