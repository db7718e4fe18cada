"""The widget: its JavaScript, and its messages to and from the browser."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import anywidget
import traitlets

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.tables.matching import label_of
from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.widgets import bundles
from ddp_notebook.widgets.feed import browser_requests
from ddp_notebook.widgets.feed.feed import Feed
from ddp_notebook.widgets.feed.messages import FeedMessage
from ddp_notebook.widgets.frontend_probe import FrontendProbe
from ddp_notebook.widgets.live_status import LiveStatus
from ddp_notebook.widgets.publisher import Publisher

if TYPE_CHECKING:
    from ddp_notebook.widgets.simulated.simulation import Simulation


_ROUTE = "_reply_subshell_for"  # a private attribute of `ipykernel.comm.comm.BaseComm`


def hear_at_once(comm: Any) -> None:
    """Allow the kernel to handle messages of the browser to this comm while a cell runs, if the front end supports it.

    Args:
        comm: Comm of a widget.
    """
    if hasattr(comm, _ROUTE):
        setattr(comm, _ROUTE, _where_it_was_sent)


def _where_it_was_sent(_: Any, sent_to: str | None) -> str | None:
    return sent_to


_log = logging.getLogger(__name__)


@runtime_checkable
class Watchable(Protocol):
    """A running session as returned by `ddp_notebook.start`."""

    @property
    def _views(self) -> Views: ...


class Views(Protocol):
    """Methods that the monitors of a session call. Implemented by `widgets.view_placement.ViewPlacement`."""

    def publisher_apart(self, cell: int | None) -> Publisher: ...
    def interrupt(self) -> str: ...


class Monitor(anywidget.AnyWidget):
    """Live view of the ranks: losses, gradient synchronisation, a timeline, tensors, the state of the ranks.

    `%ddp_monitor` shows the running session. Without that magic, as in marimo, or to show any other recording:

        Monitor(session)
        Monitor(ddp_notebook.load("run.npz"))

    Args:
        recording: Recording or session to show. A session, or a simulation of `simulate(live=True)`, is shown live.
        cell: Show only this cell; None for all cells.
        live: The recording grows.
        compact: Use the lower layout of views under a running cell.
        publisher: Publisher that sends messages to this widget; None to create one.
        interrupt: Function of the stop button, which returns a message; None to use the session's, if there is one.
        answering: Probe that is notified of messages of the view; None to create one.
        group: Id that all monitors of a session share; "" if this monitor has no relation to others.
        place: Label of the cell that shows the full monitor, such as "In [2]"; "" if it is not known.

    Raises:
        UsageError: The object is neither a recording nor a session.
        MissingBuildError: The JavaScript was not built.
    """

    compact = traitlets.Bool(False).tag(sync=True)
    key = traitlets.Unicode().tag(sync=True)  # all views of this widget find their common store in the page by this key
    group = traitlets.Unicode().tag(sync=True)  # id of the session; a compact view uses it to find the full view
    place = traitlets.Unicode().tag(sync=True)  # cell of the full view: "In [2]"

    def __init__(
        self,
        recording: RecordedTables | Simulation | Watchable,
        cell: int | None = None,
        *,
        live: bool = False,
        compact: bool = False,
        publisher: Publisher | None = None,
        interrupt: Callable[[], str] | None = None,
        answering: FrontendProbe | None = None,
        group: str = "",
        place: str = "",
    ) -> None:
        _check(recording)
        self._cell = cell
        self._answering = answering or FrontendProbe()
        self._is_own = publisher is None and not isinstance(recording, Watchable)
        if publisher is None:
            if isinstance(recording, Watchable):
                publisher, interrupt = recording._views.publisher_apart(cell), interrupt or recording._views.interrupt
            else:
                publisher = _publisher_of(recording, cell, live)
        self._interrupt = interrupt
        self._publisher = publisher
        # After the attributes that `close` uses: Python closes a widget even if its constructor fails.
        super().__init__(_esm=bundles.monitor(), compact=compact, key=uuid.uuid4().hex, group=group, place=place)
        hear_at_once(self.comm)
        self.on_msg(self._on_message)
        # Send now, without a request of the browser: the kernel may read that request only after the cell.
        publisher.add(self._tell, may_miss=True)

    def __repr__(self) -> str:
        recording = self._publisher.feed.recording
        cell = "" if self._cell is None else f", {label_of(recording, self._cell)}"
        return f"<Monitor of {_title(recording)}{cell}>"

    def leave(self) -> None:
        """Stop sending to this widget. Its messages are still read. Idempotent."""
        if not hasattr(self, "_publisher"):  # the constructor failed, and Python calls `close`
            return
        self._publisher.remove(self._tell)
        if self._is_own:
            self._publisher.close()

    def close(self) -> None:
        """Remove the widget from the page. Idempotent."""
        self.leave()
        super().close()

    def _tell(self, message: FeedMessage) -> None:
        header = {**message.header, "only": self._cell}
        if "notes" in header:
            header["notes"] = {**header["notes"], "answers": self._answering.when}
        if self.comm is not None:  # None if another thread has closed it
            self.send(header, [message.data] if message.data else None)

    def _on_message(self, _: Any, content: Any, __: Any) -> None:
        """Answer the browser. Runs in the main thread, or in a subshell thread if the front end uses subshells."""
        try:
            self._publisher.heard(self._tell)
            match content:
                case {"kind": "here"}:
                    if when := self._answering.heard(is_last=bool(content.get("last"))):
                        self._tell(FeedMessage({"kind": "heard", "answers": when}, b""))
                case {"kind": "hello"}:
                    self._publisher.catch_up(self._tell)
                case {"kind": "interrupt"}:
                    said = self._interrupt() if self._interrupt else "nothing runs that could be interrupted"
                    self._tell(FeedMessage({"kind": "answer", "request": content.get("request"), "said": said}, b""))
                case {"kind": "ask"}:
                    self._answer(content, partial(browser_requests.answer, content))
        except Exception:
            _log.exception("the monitor could not answer %s", content)

    def _answer(self, content: dict[str, Any], ask: Callable[[Feed, int], FeedMessage]) -> None:
        try:
            # Send this before the thread can send more: these rows replace the metrics that were sent before.
            self._publisher.with_feed(lambda feed, now_ns: self._tell(ask(feed, now_ns)))
        except Exception as error:
            self._tell(FeedMessage({"kind": "answer", "request": content.get("request"), "error": str(error)}, b""))
            if not isinstance(error, LookupError | ValueError | TypeError):
                raise


def _check(recording: object) -> None:
    if recording is None:
        raise UsageError("Monitor needs a recording, but no ranks are running; start them with start(2)")
    if isinstance(recording, str | os.PathLike):
        path = os.fspath(recording)
        raise UsageError(f"{path!r} is a path; load it: Monitor(ddp_notebook.load({path!r}))")
    if not isinstance(recording, RecordedTables | Watchable) and not hasattr(recording, "recording"):
        raise UsageError(f"Monitor needs a session or a recording, got {type(recording).__name__}")


def _publisher_of(recording: RecordedTables | Simulation, cell: int | None, live: bool) -> Publisher:
    """Return a publisher for a recording without a session."""
    if not isinstance(recording, RecordedTables):
        recording, live = recording.recording, True
    feed = Feed(recording, cell, is_live=live)
    return Publisher(feed, LiveStatus(feed, None, _title(recording)))


def _title(recording: RecordedTables) -> str:
    return f"{recording.world_size} rank{'s' * (recording.world_size != 1)}"
