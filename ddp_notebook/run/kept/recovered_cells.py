"""Cells that an earlier notebook has sent, and whose output it has not shown completely."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ddp_notebook.errors import DDPNotebookError
from ddp_notebook.launch.cluster import Cluster
from ddp_notebook.messages.keeper import CellShown, WaitingJobs
from ddp_notebook.messages.ranks import RunCell
from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.cells.cells import Cells
from ddp_notebook.run.cells.interrupt import Interrupts
from ddp_notebook.run.cells.result import CellResult
from ddp_notebook.run.cells.run_queue import QueueSlot
from ddp_notebook.run.cells.watch import NOTEBOOK, SideView, Waiter
from ddp_notebook.run.kept.foreign_cells import ForeignCells
from ddp_notebook.run.notebook_kernel import is_users_thread
from ddp_notebook.run.output.display_target import DisplayTarget, ThreadTarget
from ddp_notebook.run.session_hooks import SessionFeature

if TYPE_CHECKING:
    from ddp_notebook.launch.keep.keeper_client import KeeperClient
    from ddp_notebook.messages.keeper import Waiting
    from ddp_notebook.run.session_parts import SessionParts


class RecoveredCells:
    """Recovered cells that no thread follows yet, the oldest first.

    Args:
        cluster: the ranks.
        cells: cells of the session.

    Attributes:
        jobs: numbers of the jobs that follow released cells.
        ended: sentences about the end of shown cells.
        waiting: jobs that have not started and are not in this notebook's run queue yet.
    """

    def __init__(self, cluster: Cluster, cells: Cells) -> None:
        self._cluster = cluster
        self._cells = cells
        self.jobs: set[int] = set()
        self.ended: list[str] = []
        self.waiting: list[Waiting] = []
        self._left: list[tuple[CellRun, RunCell]] = []

    def add(self, told: Sequence[tuple[RunCell, list[int], float]]) -> None:
        """Add cells, see `Welcome.cells`. Call it before any message of them arrives."""
        for cell, ranks, for_s in told:
            run = CellRun(cell.cell, ranks, self._cluster.hold_text)
            run.folds = cell.folds
            run.took = self._cells.took
            run.is_patient = True
            run.began_s = time.monotonic() - for_s
            self._cells.name(run.number, f"In [{cell.execution_count}]")
            self._cells.add_recovered(run, cell)
            self._left.append((run, cell))

    def show_ended(self, *, wait: bool = False) -> None:
        """Show the output of ended cells, like that of this notebook's cells.

        Args:
            wait: also wait for cells that still run. The stop button ends them.

        Raises:
            RankError: the first cell that failed, or any other error of `Cells.run`.
        """
        while self._left and (wait or self._left[0][0].is_over):
            run, cell = self._left.pop(0)
            how = "was stopped"
            try:
                self.follow(run, ThreadTarget() if is_users_thread() else None, QueueSlot(self._cells.run_queue))
                how = "is done"
            except DDPNotebookError:
                how = "has failed"
                raise
            finally:
                self.ended.append(f"cell [{cell.execution_count}] of the earlier notebook {how}, and was shown here")

    def notes(self) -> list[str]:
        """Show ended cells. Return a note if one has failed, because that is not an error of the next cell."""
        try:
            self.show_ended()
        except (DDPNotebookError, KeyboardInterrupt) as error:
            return [f"an earlier cell, of another notebook, has failed in the meantime: {error}"]
        return []

    def let_go(self) -> list[tuple[CellRun, RunCell]]:
        """Release the running cells, and return them, to be followed as jobs.

        A cell that waits for input is not released, because a background job cannot be answered.
        """
        going = [(run, cell) for run, cell in self._left if not run.asks]
        self._left = [(run, cell) for run, cell in self._left if run.asks]
        return going

    @property
    def asking(self) -> list[RunCell]:
        """Return the cells that wait for `input()`."""
        return [cell for run, cell in self._left if run.asks]

    def follow(
        self,
        run: CellRun,
        target: DisplayTarget | None,
        place: AbstractContextManager[object],
        waiter: Waiter = NOTEBOOK,
        beside: SideView | None = None,
        on_begin: Callable[[CellRun, Interrupts], object] = lambda *_: None,
    ) -> CellResult:
        """Follow a cell to its end. The arguments are those of `Cells.run`."""
        with place:
            run.is_patient = False
            run.name = waiter.name
            with Interrupts(run.wake) as interrupts:
                on_begin(run, interrupts)
                screen = None
                if target is not None:
                    screen = self._cells.screen(run.result.ranks, target, waiter, interrupts, beside, run.folds)
                    run.note = screen.note
                    if run.left_out_chars:
                        screen.note(f"... {run.left_out_chars} characters before this were not kept ...")
                beside = beside if screen is not None else None
                watch = self._cells.watch(run, interrupts, screen, beside, waiter)
                pending, notes = self._cells.see_through(run, watch, interrupts, beside)
            return self._cells.tell_end(run, watch, interrupts, screen, pending, notes)


class KeptCells(SessionFeature):
    """Cells of other notebooks in one session. A session without a keeper has none."""

    def __init__(self, parts: SessionParts) -> None:
        super().__init__(parts)
        self.recovered = RecoveredCells(parts.cluster, parts.cells)

    def attached(self, remote: KeeperClient) -> None:
        cells, recovered, welcome = self.parts.cells, self.recovered, remote.welcome
        jobs_of = self.parts.hooks.features.get("jobs")
        jobs = None if jobs_of is None else jobs_of.jobs
        if not welcome.drives:
            cells.elsewhere = elsewhere = ForeignCells(cells.name)
            remote.running = elsewhere.update
            if jobs is not None:
                jobs.elsewhere = elsewhere
            return
        cells.begin_behind(welcome.last_cell)
        cells.recovery.replaced = welcome.lacking
        recovered.add(welcome.cells)
        recovered.waiting = list(welcome.waiting)
        cells.before_turn = recovered.notes
        cells.on_shown = lambda cell: remote.send(CellShown(cell=cell))
        if jobs is not None:
            jobs.before = recovered.ended
            jobs.on_queue = lambda waiting: remote.send(WaitingJobs(waiting=[*recovered.waiting, *waiting]))
