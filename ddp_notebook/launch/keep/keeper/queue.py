"""Waiting jobs of the driving notebook. After it has left, they start without a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_notebook.launch.keep.keeper.journal import Journal
from ddp_notebook.messages.keeper import Waiting
from ddp_notebook.messages.ranks import RunCell


class Queue:
    """Waiting jobs of one session. The caller must serialise all calls.

    Example:
        >>> queue, journal = Queue(), Journal("ab12", limit_bytes=1000)
        >>> cell = RunCell(cell=0, code="train()", execution_count=3)
        >>> queue.waiting = [Waiting(told=cell, ranks=None, timeout_s=None)]
        >>> queue.begin(journal, ranks=[0, 1], alive=[0, 1])
        (RunCell(cell=1, code='train()', execution_count=3, ...), [0, 1])
        >>> queue.waiting, [cell.told.cell for cell in journal.running]
        ([], [1])
    """

    def __init__(self) -> None:
        self.waiting: list[Waiting] = []

    def on_told(self, cell: RunCell) -> None:
        """Remove a waiting job that the notebook has sent to ranks."""
        for one in self.waiting:
            if replace(one.told, cell=cell.cell) == cell:
                self.waiting.remove(one)
                return

    def begin(
        self, journal: Journal, *, ranks: Sequence[int], alive: Sequence[int]
    ) -> tuple[RunCell, list[int]] | None:
        """Start the next job if this is possible without a notebook.

        All ranks must be alive, no cell may run, and the last one must have succeeded, so that no recovery is needed.
        The job must have no time limit, since a notebook enforces time limits.

        Returns:
            The cell and its ranks; None if no job starts.
        """
        if not self.waiting or journal.running or not journal.went_well or len(alive) < len(ranks):
            return None
        job = self.waiting[0]
        its = list(ranks) if job.ranks is None else job.ranks
        if job.timeout_s is not None or not set(its) <= set(ranks):
            return None
        del self.waiting[0]
        cell = replace(job.told, cell=journal.last_cell + 1)
        journal.on_told(cell, its)
        return cell, its
