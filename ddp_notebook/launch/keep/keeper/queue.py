"""Jobs that wait for their turn in the notebook that drives. Where that is gone they begin without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_notebook.launch.keep.keeper.journal import Journal
from ddp_notebook.messages.keeper import Waiting
from ddp_notebook.messages.ranks import RunCell


class Queue:
    """Of one session. The caller lets one thread at a time use it.

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
        """The notebook sends a cell to ranks: its turn has come, if it is one of these."""
        for one in self.waiting:
            if replace(one.told, cell=cell.cell) == cell:
                self.waiting.remove(one)
                return

    def begin(
        self, journal: Journal, *, ranks: Sequence[int], alive: Sequence[int]
    ) -> tuple[RunCell, list[int]] | None:
        """The next one begins, if it can do so without a notebook: all ranks live, nothing runs, and what ran last has
        ended well, so that nothing has to be mended before; nor has it a time, which a notebook looks after.

        Returns:
            What is to be sent to which ranks; None: none begins.
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
