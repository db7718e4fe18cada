"""Where views appear: by themselves under a running cell, and at `%ddp_monitor`; and the picture that stays of them."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_notebook.errors import MissingBuildError, UsageError
from ddp_notebook.observe.tables.matching import prompt_of
from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.records.schema import ORIGINS
from ddp_notebook.run.cells.cells import Cells
from ddp_notebook.run.kernel import has_front_end

if TYPE_CHECKING:
    from ddp_notebook.widgets.monitor import Monitor
    from ddp_notebook.widgets.publisher import Publisher

_AFTER_S = 1.0  # a cell that is over sooner needs no view
_LOOK_S = 0.2
_SYNCHRONISES = [ORIGINS.index(name) for name in ("ddp", "ddp hook", "fsdp")]
_MOST_ROWS = 2000  # calls that are searched for one of these
_log = logging.getLogger(__name__)


class Placing:
    """Where the views of one session stand: one under the running cell, one of `%ddp_monitor`.

    Args:
        recording: the session's.
        flushed: brings all that ranks have recorded into it.
        cells: the session's.
        title: of the session.
        mode: "auto": a view comes by itself under a cell that logs or synchronises; "off".
    """

    def __init__(
        self, recording: RecordedTables, flushed: Callable[[], object], cells: Cells, title: str, mode: str
    ) -> None:
        self._recording = recording
        self._flushed = flushed
        self._cells = cells
        self._title = title
        self._mode = mode
        self._publisher: Publisher | None = None
        self._shown: _View | _Still | None = None  # of %ddp_monitor
        self._under: _View | None = None  # the cell that runs
        self._apart: weakref.WeakSet[Publisher] = weakref.WeakSet()  # of monitors that the user has made
        self._importing: threading.Thread | None = None  # what its picture will need

    def prepare(self) -> None:
        """Import what the first view needs, in a thread, before anybody waits for it."""
        if self._mode == "auto" and has_front_end():
            threading.Thread(target=_import, name="ddp-monitor-import", daemon=True).start()

    # ---- under a running cell

    def beside(self) -> UnderCell | None:
        """What goes beside the output of a cell that begins now; None: nothing."""
        if self._mode != "auto" or self._shows_what_comes() or not has_front_end():
            return None
        return UnderCell(self)

    def prepare_picture(self) -> None:
        """Import what a picture needs while the cell runs: its end, or the stop button, would wait for that for 0.5 s
        (2 cores)."""
        self._importing = threading.Thread(target=_import_for_picture, name="ddp-picture-import", daemon=True)
        self._importing.start()

    def show_under(self, cell: int) -> None:
        """Show a compact view under the cell that runs."""
        self._under = self._view(cell, compact=True)

    def freeze_under(self, cell: int) -> None:
        """The cell is over."""
        view, self._under = self._under, None
        if self._importing is not None:  # two threads that import matplotlib find it half made
            self._importing.join()
            self._importing = None
        if view is not None:
            self._freeze(view, cell)

    # ---- %ddp_monitor

    def show(self, cell: int | None = None) -> None:
        """Show the full view, in the place of the one before.

        Args:
            cell: of this cell only; None: of all, future ones too.

        Raises:
            UsageError: nothing was recorded of this cell.
            MissingBuildError: the JavaScript was not built.
        """
        if cell is not None and not self._knows(cell):
            raise UsageError(f"nothing is recorded of a cell {cell}; {self._known_cells()}")
        if self._shown is not None:
            self._freeze(self._shown, self._shown.cell)
            self._shown = None
        if has_front_end():
            self._shown = self._view(cell, compact=False)
        else:
            self._shown = _Still(self._recording_now(), cell)

    def close(self) -> None:
        """The session ends: what is shown becomes static."""
        views = [view for view in (self._under, self._shown) if view is not None]
        self._under = self._shown = None
        if self._publisher is not None:
            self._publisher.close(session_ends=True)
        for publisher in list(self._apart):
            publisher.close(session_ends=True)
        for view in views:
            self._freeze(view, view.cell)
        self._publisher = None

    def interrupt(self) -> str:
        """What the stop button of a view does. Returns what was done, in words."""
        watched = self._cells.watched
        if watched is None:
            return "no cell runs on the ranks"
        # Signal the main thread if it waits for the cell: that also ends its wait for an answer of input().
        main = threading.main_thread().ident
        if not watched[1].takes_signals:
            watched[1].press()
        elif main is not None and hasattr(signal, "pthread_kill"):
            signal.pthread_kill(main, signal.SIGINT)
        else:
            os.kill(os.getpid(), signal.SIGINT)
        return "interrupted"

    # ---- views

    def _view(self, cell: int | None, *, compact: bool) -> _View:
        from ddp_notebook.widgets.monitor import Monitor

        run = self._cells.under_way
        is_live = cell is None or (run is not None and run.number == cell)  # else nothing comes any more
        if not is_live:
            monitor = Monitor(self._recording_now(), cell, interrupt=self.interrupt)
        else:
            monitor = Monitor(
                self._recording,
                cell,
                compact=compact,
                publisher=self._live_publisher(cell),
                interrupt=self.interrupt,
            )
        return _View(monitor, cell, is_live=is_live)

    def _live_publisher(self, cell: int | None) -> Publisher:
        if self._publisher is None:
            self._publisher = self._new_publisher(cell)
        return self._publisher

    def publisher_apart(self, cell: int | None) -> Publisher:
        """One for a monitor that the user makes, and closes."""
        publisher = self._new_publisher(cell)
        self._apart.add(publisher)
        return publisher

    def _new_publisher(self, cell: int | None) -> Publisher:
        from ddp_notebook.widgets.feed.feed import Feed
        from ddp_notebook.widgets.present import Present
        from ddp_notebook.widgets.publisher import Publisher

        feed = Feed(self._recording, cell)
        return Publisher(feed, Present(feed, self._cells, self._title))

    def _freeze(self, view: _View | _Still, cell: int | None) -> None:
        view.freeze(self._recording_now(), cell)
        is_watched = self._under is not None or (self._shown is not view and self._shows_what_comes())
        if self._publisher is not None and not is_watched:
            self._publisher.close()
            self._publisher = None

    def _shows_what_comes(self) -> bool:
        """Whether `%ddp_monitor` shows rows as they come: the view of a cell that is over does not."""
        return isinstance(self._shown, _View) and self._shown.is_live

    def _recording_now(self) -> RecordedTables:
        with contextlib.suppress(Exception):  # the ranks may be gone: then what has come must do
            self._flushed()
        return self._recording

    def _knows(self, cell: int) -> bool:
        return cell in self._cells_recorded()

    def _cells_recorded(self) -> list[int]:
        found = [np.unique(self._recording.rows(table)["cell"]) for table in ("call", "span", "metric")]
        return [cell for cell in np.unique(np.concatenate(found)).tolist() if cell]

    def _known_cells(self) -> str:
        known = self._cells_recorded()[-8:]
        prompts = [prompt_of(self._recording, cell) for cell in known]
        names = [f"{cell} ({prompt})" if prompt else str(cell) for cell, prompt in zip(known, prompts, strict=True)]
        return f"there is something of {', '.join(names)}" if known else "nothing at all was"


class UnderCell:
    """A compact view under one cell, once there is something to see. Part of `run.cells.watch.Beside`."""

    def __init__(self, placing: Placing) -> None:
        self._placing = placing
        self._recording = placing._recording
        self._began_s = time.monotonic()
        self._looked_s = self._began_s
        rings = self._recording.store.rings
        self._ends = {name: rings[name].end for name in ("metric", "call")}
        self._is_wanted = False
        self._is_decided = False

    def look(self, cell: int) -> None:
        now_s = time.monotonic()
        if self._is_decided or now_s < self._looked_s + _LOOK_S:
            return
        self._looked_s = now_s
        try:
            if not self._is_wanted and self._has_something(cell):
                self._is_wanted = True
                self._placing.prepare_picture()
            if self._is_wanted and now_s > self._began_s + _AFTER_S:
                self._is_decided = True
                self._placing.show_under(cell)
        except MissingBuildError:  # %ddp_monitor says so
            self._is_decided = True
        except Exception:  # the cell matters more than its view
            self._is_decided = True
            _log.exception("no view could be shown under the cell")

    def end(self, cell: int) -> None:
        try:
            self._placing.freeze_under(cell)
        except Exception:
            _log.exception("the view under the cell is as it was")

    def _has_something(self, cell: int) -> bool:
        recording = self._recording
        metrics, self._ends["metric"], _ = recording.follow("metric", self._ends["metric"], _MOST_ROWS)
        if (metrics["cell"] == cell).any():
            return True
        end = recording.store.rings["call"].end
        calls, _, _ = recording.follow("call", max(self._ends["call"], end - _MOST_ROWS))
        self._ends["call"] = end
        return bool((np.isin(calls["origin"], _SYNCHRONISES) & (calls["cell"] == cell)).any())


class _View:
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
        self._monitor = monitor
        self._handle = display(monitor, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]

    def freeze(self, recording: RecordedTables, cell: int | None) -> None:
        """Leave a picture and a text in its place: they stand in the saved notebook, and without a kernel."""
        try:
            if self._handle is not None:
                self._handle.update(_static(recording, cell), raw=True)
        finally:
            self._monitor.close()


class _Still:
    """A picture where there is no front end: of what is there now, and of everything when the session ends."""

    def __init__(self, recording: RecordedTables, cell: int | None) -> None:
        from IPython.display import display

        self.cell = cell
        self._handle = display(_static(recording, cell), raw=True, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]

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


def _import() -> None:
    import ddp_notebook.widgets.monitor
    import ddp_notebook.widgets.publisher
    import ddp_notebook.widgets.still.summary  # noqa: F401


def _import_for_picture() -> None:
    with contextlib.suppress(Exception):  # who draws it says what is wrong
        import matplotlib.backends.backend_agg  # noqa: F401
        import PIL.PngImagePlugin  # noqa: F401

        import ddp_notebook.observe.figures.bars
        import ddp_notebook.observe.figures.curves  # noqa: F401
