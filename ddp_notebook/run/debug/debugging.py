"""Debuggers of the ranks of one session."""

from __future__ import annotations

from collections.abc import Callable

from ddp_notebook.messages.debug_messages import HoldTimeouts, TimeoutsHeld
from ddp_notebook.messages.ranks import InputReply
from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.debug.failures import debug_failure
from ddp_notebook.run.debug.prompts import Prompts
from ddp_notebook.run.message_handlers import Handlers
from ddp_notebook.run.output.screen import Screen
from ddp_notebook.run.session_hooks import SessionFeature
from ddp_notebook.run.session_parts import SessionParts


class Debugging(SessionFeature):
    """Opens prompts for the ranks of a session. It is the `prompts.Ranks` of these prompts."""

    def __init__(self, parts: SessionParts) -> None:
        super().__init__(parts)
        self._prompts: dict[int, Prompts] = {}  # prompts by number of the cell

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.parts.cluster.ranks)

    def cell_prompts(self, run: CellRun, screen: Screen | None, quit: Callable[[], None], may_ask: bool) -> Prompts:
        say = (lambda _: None) if screen is None else screen.note
        finish = (lambda: None) if screen is None else screen.finish
        prompts = Prompts(run, self, say, finish, quit, may_ask=may_ask)
        self._prompts = {run.number: prompts}
        return prompts

    def open_failure(self, run: Callable[..., object]) -> None:
        """Open a debugger on the ranks whose last cell has failed.

        Args:
            run: `Session.run`.
        """
        debug_failure(self.parts, run, None)

    def answer(self, rank: int, answer: InputReply) -> None:
        """Send a command to the debugger of a rank."""
        self.parts.cells.answer(rank, answer)

    def hold_timeouts(self, cell: int, on: bool) -> None:
        """Hold the time limits of operations on all ranks, or end that.

        Args:
            cell: number of the cell in which a debugger has stopped.
        """
        for rank in self.parts.cluster.alive:
            self.parts.cluster.send(rank, HoldTimeouts(on=on, cell=cell))

    def handlers(self) -> Handlers:
        return {TimeoutsHeld: self._on_held}

    def _on_held(self, rank: int, message: TimeoutsHeld) -> None:
        if (prompts := self._prompts.get(message.cell)) is not None:
            prompts.on_unheld(rank, message.unheld)
