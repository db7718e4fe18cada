"""The widget: its JavaScript, and the messages from and to the browser."""

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
    """Let what the browser says to this comm through while a cell runs, where it can be.

    Args:
        comm: of a widget.
    """
    if hasattr(comm, _ROUTE):
        setattr(comm, _ROUTE, _where_it_was_sent)


def _where_it_was_sent(_: Any, sent_to: str | None) -> str | None:
    return sent_to


_log = logging.getLogger(__name__)


@runtime_checkable
class Watchable(Protocol):
    """A running session, as `ddp_notebook.start` makes one."""

    @property
    def _views(self) -> Views: ...


class Views(Protocol):
    """The methods that monitors of a session call; `widgets.view_placement.ViewPlacement` has them."""

    def publisher_apart(self, cell: int | None) -> Publisher: ...
    def interrupt(self) -> str: ...


class Monitor(anywidget.AnyWidget):
    """What ranks do, live: losses, gradient synchronisation, a timeline, tensors, ranks.

    `%ddp_monitor` shows the running session's. Without that magic, as in marimo, or to show any other recording:

        Monitor(session)
        Monitor(ddp_notebook.load("run.npz"))

    Args:
        recording: what is shown; a session's is live, and one that `simulate(live=True)` feeds.
        cell: this one only; None: all.
        live: the recording grows.
        compact: lower, as under a running cell.
        publisher: sends it messages; None: one of its own.
        interrupt: does what the stop button does, and says what it did; None: what the session does, if there is one.
        answering: learns from what the view says; None: one of its own.
        group: the same word for all monitors of a session; "": it has nothing to do with others.
        place: the cell that shows the full monitor: "In [2]"; "": not known.

    Raises:
        UsageError: it is nothing that a monitor could show.
        MissingBuildError: the JavaScript was not built.
    """

    compact = traitlets.Bool(False).tag(sync=True)
    key = traitlets.Unicode().tag(sync=True)  # all views of this widget find its store in the page by this key
    group = traitlets.Unicode().tag(sync=True)  # id of its session: a compact view finds the full view by it
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
        # After what `close` needs: a widget whose making fails is closed too.
        super().__init__(_esm=bundles.monitor(), compact=compact, key=uuid.uuid4().hex, group=group, place=place)
        hear_at_once(self.comm)
        self.on_msg(self._on_message)
        # At once, not when the browser asks: its question may be heard only after the cell.
        publisher.add(self._tell, may_miss=True)

    def __repr__(self) -> str:
        recording = self._publisher.feed.recording
        cell = "" if self._cell is None else f", {label_of(recording, self._cell)}"
        return f"<Monitor of {_title(recording)}{cell}>"

    def leave(self) -> None:
        """Tell it nothing more; what it says is still heard. Doing it twice is no error."""
        if not hasattr(self, "_publisher"):  # the making has failed, and Python closes what it drops
            return
        self._publisher.remove(self._tell)
        if self._is_own:
            self._publisher.close()

    def close(self) -> None:
        """Take it off the page. Doing it twice is no error."""
        self.leave()
        super().close()

    def _tell(self, message: FeedMessage) -> None:
        header = {**message.header, "only": self._cell}
        if "notes" in header:
            header["notes"] = {**header["notes"], "answers": self._answering.when}
        if self.comm is not None:  # else closed by another thread
            self.send(header, [message.data] if message.data else None)

    def _on_message(self, _: Any, content: Any, __: Any) -> None:
        """Answer the browser. In the main thread; in another one where it has sent this to a subshell."""
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
            # Sent before the thread can send more: the rows of metrics take the place of those that were sent before.
            self._publisher.with_feed(lambda feed, now_ns: self._tell(ask(feed, now_ns)))
        except Exception as error:
            self._tell(FeedMessage({"kind": "answer", "request": content.get("request"), "error": str(error)}, b""))
            if not isinstance(error, LookupError | ValueError | TypeError):
                raise


def _check(recording: object) -> None:
    if recording is None:
        raise UsageError("there is no recording to show: no ranks are running; start(2) gives a session for Monitor")
    if isinstance(recording, str | os.PathLike):
        path = os.fspath(recording)
        raise UsageError(f"{path!r} is a path; load it: Monitor(ddp_notebook.load({path!r}))")
    if not isinstance(recording, RecordedTables | Watchable) and not hasattr(recording, "recording"):
        raise UsageError(f"a monitor shows a session or a recording, not {type(recording).__name__}")


def _publisher_of(recording: RecordedTables | Simulation, cell: int | None, live: bool) -> Publisher:
    """Of a recording without a session."""
    if not isinstance(recording, RecordedTables):
        recording, live = recording.recording, True
    feed = Feed(recording, cell, is_live=live)
    return Publisher(feed, LiveStatus(feed, None, _title(recording)))


def _title(recording: RecordedTables) -> str:
    return f"{recording.world_size} rank{'s' * (recording.world_size != 1)}"
