"""Debuggers of the ranks of one session."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ddp_notebook.messages.debug_messages import AdapterMessage, AdapterReady, HoldTimeouts, TimeoutsHeld, UseAdapter
from ddp_notebook.messages.ranks import InputReply, RunCell
from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.debug.cell_sources import CellSources
from ddp_notebook.run.debug.failures import debug_failure
from ddp_notebook.run.debug.front_end import FrontEnd
from ddp_notebook.run.debug.kernel_debugger import KernelDebugger
from ddp_notebook.run.debug.prompts import Prompts
from ddp_notebook.run.groups.named_ranks import Coordinates, NamedRanks
from ddp_notebook.run.message_handlers import Handlers
from ddp_notebook.run.notebook_kernel import kernel
from ddp_notebook.run.output.screen import Screen
from ddp_notebook.run.session_hooks import SessionFeature
from ddp_notebook.run.session_parts import SessionParts

_NAMED = re.compile(r"breakpoint|set_trace|%debug")
_DEFINES = re.compile(r"\b(def|lambda)\b")


class Debugging(SessionFeature):
    """Opens prompts for the ranks of a session. It is the `prompts.Ranks` of these prompts."""

    def __init__(self, parts: SessionParts) -> None:
        super().__init__(parts)
        self._prompts: dict[int, Prompts] = {}  # prompts by number of the cell; cells and jobs run in turn
        self._front_end: FrontEnd | None = None  # None: the kernel has no debugger
        self._may_stop = False  # ranks have stopped, or a cell has defined functions that may stop them

    def may_stop(self, code: str) -> bool:
        is_named = _NAMED.search(code) is not None
        self._may_stop |= is_named and _DEFINES.search(code) is not None
        return is_named or self._may_stop or (self._front_end is not None and self._front_end.is_on)

    def cell_prompts(self, run: CellRun, screen: Screen | None, quit: Callable[[], None], may_ask: bool) -> Prompts:
        say = (lambda _: None) if screen is None else screen.note
        finish = (lambda: None) if screen is None else screen.finish
        prompts = Prompts(run, self, say, finish, quit, may_ask=may_ask)
        self._prompts = {run.number: prompts}
        return prompts

    # ---- the debugger of the front end

    def started(self, *, is_attached: bool) -> None:
        cluster, cells = self.parts.cluster, self.parts.cells
        if cells.elsewhere is not None:  # another notebook runs cells, and may debug them
            return
        if (running := kernel()) is not None and (debugger := KernelDebugger.of(running)) is not None:
            sources = CellSources(debugger.folder, debugger.file_of, debugger.executed)
            questions = self.parts.questions
            self._front_end = FrontEnd(debugger, cluster, sources, questions, lambda: cells.busy, self._wake)
        if is_attached:
            for rank in cluster.alive:  # the front end of an earlier notebook may have stopped it
                cluster.send(rank, UseAdapter(on=False))

    def close(self) -> None:
        if self._front_end is not None:
            self._front_end.remove()
            self._front_end = None

    def cell_begins(self, cell: RunCell) -> None:
        if self._front_end is not None and self._front_end.is_on:
            self._front_end.prepare([rank for rank in self.parts.cluster.alive if rank not in cell.missing])

    def notices(self) -> Sequence[str]:
        return self._front_end.errors() if self._front_end is not None else ()

    def cell_ended(self, run: CellRun, code: str) -> Sequence[str]:
        if self._front_end is not None:
            self._front_end.update()
        return self.notices()

    def cell_is_stopped(self, run: CellRun) -> bool:
        if self._front_end is None:
            return False
        self._front_end.update()
        stopped = self._front_end.stopped_ranks()
        return bool(stopped) and not stopped.isdisjoint(run.pending)

    def _wake(self) -> None:
        """Let the thread that waits for a cell notice that a rank has stopped, or runs on."""
        if (watched := self.parts.cells.watched) is not None:
            watched[0].wake()

    # ---- the ranks of prompts

    def open_failure(self, run: Callable[..., object]) -> None:
        """Open a debugger on the ranks whose last cell has failed.

        Args:
            run: `Session.run`.
        """
        debug_failure(self.parts, run, None)

    def parse(self, asked: str, meshes: Coordinates) -> list[int]:
        """Return the ranks of a set, such as "0-1" or "tp=1".

        Args:
            asked: the set.
            meshes: coordinates of the stopped ranks, also in meshes of their functions.
        """
        if "=" in asked:
            return NamedRanks(self.parts.cluster, self.parts.questions).parse(asked, meshes)
        return self.parts.liveness.parse(asked)

    def answer(self, rank: int, answer: InputReply) -> None:
        """Send a command to the debugger of a rank."""
        self.parts.cells.answer(rank, answer)

    def hold_timeouts(self, cell: int, on: bool) -> None:
        """Hold the time limits of operations on all ranks, or end that.

        Args:
            cell: number of the cell in which a debugger has stopped.
        """
        self._may_stop = True
        for rank in self.parts.cluster.alive:
            self.parts.cluster.send(rank, HoldTimeouts(on=on, cell=cell))

    def handlers(self) -> Handlers:
        return {TimeoutsHeld: self._on_held, AdapterMessage: self._to_front_end, AdapterReady: self._to_front_end}

    def _to_front_end(self, rank: int, message: Any) -> None:
        if self._front_end is not None:
            adapters = self._front_end.adapters
            (adapters.on_ready if isinstance(message, AdapterReady) else adapters.on_message)(rank, message)

    def _on_held(self, rank: int, message: TimeoutsHeld) -> None:
        if (prompts := self._prompts.get(message.cell)) is not None:
            prompts.on_unheld(rank, message.unheld)
