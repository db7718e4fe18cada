"""Hooks for features of a session. `rank/hooks` has those of a rank.

A feature with hooks has a subclass of `SessionFeature`, which its declaration in `run/features` names. The hooks are
called in the order of `features.FEATURES`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddp_notebook.errors import UsageError
from ddp_notebook.launch.cluster import Check
from ddp_notebook.messages.ranks import RunCell
from ddp_notebook.run import features
from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.cells.watch import Prompts, SideView
from ddp_notebook.run.groups.rank_view import Views
from ddp_notebook.run.message_handlers import Handlers
from ddp_notebook.run.output.display_target import DisplayTarget
from ddp_notebook.run.output.screen import Screen

if TYPE_CHECKING:
    from ddp_notebook.launch.keep.keeper_client import KeeperClient
    from ddp_notebook.run.session_parts import SessionParts

_log = logging.getLogger(__name__)


class SessionFeature:
    """One feature in one session. The methods are the hooks; a feature overrides the ones that it needs.

    Args:
        parts: the complete core of the session. The ranks were not started yet.
    """

    def __init__(self, parts: SessionParts) -> None:
        self.parts = parts

    # ---- the session

    def attached(self, remote: KeeperClient) -> None:
        """Called if a keeper has the running ranks, before any message of them arrives."""

    def started(self, *, is_attached: bool) -> None:
        """Called when the ranks can run cells."""

    def stops(self) -> None:
        """Called before the session stops, while the ranks are alive. Errors are logged."""

    def close(self) -> None:
        """Called when no more messages arrive from the ranks."""

    def joined(self) -> None:
        """Called when the ranks have ended."""

    # ---- cells

    def may_stop(self, code: str) -> bool:
        """Return whether a debugger may stop ranks in a cell. Called before it is sent."""
        return False

    def cell_begins(self, cell: RunCell) -> None:
        """Called before a cell is sent."""

    def cell_ended(self, run: CellRun, code: str) -> Sequence[str]:
        """Return lines to show under an ended cell. Called before its other notes are shown."""
        return ()

    def cause(self, run: CellRun, views: Views) -> str:
        """Return a sentence about why ranks wait in different operations, or "" if it is not known.

        Called while ranks wait for each other, and when the operations of a failed cell differed.
        """
        return ""

    def cell_named(self, cell: int, prompt: str) -> None:
        """Called with the prompt of a cell, such as "In [6]"."""

    def side_view(self, target: DisplayTarget, code: str) -> SideView | None:
        """Return a view to show next to the output of a cell, or None."""
        return None

    def cell_prompts(self, run: CellRun, screen: Screen | None, quit: Callable[[], None], may_ask: bool) -> Prompts:
        """Return the prompts of a cell whose ranks stop in a debugger.

        Args:
            screen: shows the output of the cell; None: no output is shown.
            quit: ends the cell on all ranks.
            may_ask: whether the caller of the cell can answer.
        """
        raise NotImplementedError

    def cell_is_stopped(self, run: CellRun) -> bool:
        """Return whether a rank of the cell has stopped in the debugger of the front end, so that time limits are held.

        Called repeatedly while the cell runs.
        """
        return False

    def survives(self, run: CellRun, check: Check) -> bool:
        """Return whether a cell continues although ranks died. Called repeatedly while the cell runs.

        Args:
            check: called often; raises KeyboardInterrupt if stop was pressed.
        """
        return False

    def notices(self) -> Sequence[str]:
        """Return messages to show once while a cell runs. Called each second then, in the thread that waits for it."""
        return ()

    def unended(self) -> Sequence[Any]:
        """Return the background cells that have not ended, as `BusyCells` accepts them."""
        return ()

    # ---- messages, processes and groups

    def handlers(self) -> Handlers:
        """Return the handlers of messages of ranks. They are called in I/O threads."""
        return {}

    def rank_moved(self, rank: int) -> None:
        """Called when a rank has a new process on another host."""

    def before_renumbering(self) -> None:
        """Called before the ranks are renumbered."""

    def renumbered(self, stayed: Mapping[int, int]) -> None:
        """Called when the ranks were renumbered.

        Args:
            stayed: former number of each remaining rank, by its new number.
        """

    def resized(self) -> None:
        """Called in the main thread when the number of ranks has changed."""


class SessionHooks:
    """Features of a session, and for each hook the methods that override it.

    The core is created with it, and the features with the core. So `fill` adds the features afterwards.
    """

    def __init__(self) -> None:
        self.features: dict[str, Any] = {}  # enabled features by name
        self._collect()

    def fill(self, parts: SessionParts) -> None:
        """Create the enabled features."""
        for name, feature in features.load().items():
            if feature.session is not None:
                self.features[name] = feature.session()(parts)
        self._collect()

    def _collect(self) -> None:
        self.attached = self._of("attached")
        self.started = self._of("started")
        self.close = self._of("close")
        self.joined = self._of("joined")
        self.cell_begins = self._of("cell_begins")
        self.cell_ended = self._of("cell_ended")
        self.cause = self._of("cause")
        self.cell_named = self._of("cell_named")
        self.survives = self._of("survives")
        self.notices = self._of("notices")
        self.cell_prompts = self._of("cell_prompts")
        self.cell_is_stopped = self._of("cell_is_stopped")
        self._may_stop = self._of("may_stop")
        self.rank_moved = self._of("rank_moved")
        self.before_renumbering = self._of("before_renumbering")
        self.renumbered = self._of("renumbered")
        self.resized = self._of("resized")
        self._stops = self._of("stops")
        self._handlers = self._of("handlers")
        self.side_view = self._of("side_view")
        self._unended = self._of("unended")

    def _of(self, hook: str) -> list[Callable[..., Any]]:
        return [
            getattr(one, hook)
            for one in self.features.values()
            if getattr(type(one), hook) is not getattr(SessionFeature, hook)
        ]

    def need(self, name: str) -> Any:
        """Return a feature.

        Raises:
            UsageError: the feature is off.
        """
        if (found := self.features.get(name)) is None:
            raise UsageError(f"the feature {name} is off")
        return found

    def handlers(self) -> list[Handlers]:
        """Return the message handlers of features."""
        return [handlers() for handlers in self._handlers]

    def may_stop(self, code: str) -> bool:
        """Return whether a debugger may stop ranks in a cell."""
        return any([may_stop(code) for may_stop in self._may_stop])

    def unended(self) -> list[Any]:
        """Return the background cells that have not ended."""
        return [job for jobs in self._unended for job in jobs()]

    def stops(self) -> None:
        """Call the hooks before the session stops."""
        for stops in self._stops:
            try:
                stops()
            except Exception:
                _log.exception("a feature could not prepare for the end of the session")
