"""End running cells, even if no thread or another thread waits for them. The first attempt keeps all variables."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable

from ddp_notebook.errors import HostError, SessionBrokenError
from ddp_notebook.launch.cluster import Cluster
from ddp_notebook.records.words import list_ranks
from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.cells.cells import Cells
from ddp_notebook.run.cells.interrupt import Interrupts, keyboard_interrupt
from ddp_notebook.run.cells.run_queue import QueueSlot, in_words
from ddp_notebook.run.groups.recovery import replaced_in_words
from ddp_notebook.wire.signals import INTERRUPT

_END_S = 2.0  # time for ranks to end an interrupted cell; longer than `ONE_PRESS_S`
_REPLACE_S = 20.0
_LOOK_S = 0.02


class AbandonedCells:
    """Ends running cells.

    Args:
        cluster: the ranks.
        cells: cells of the session.
        check: raises an error if the ranks are gone.
    """

    def __init__(self, cluster: Cluster, cells: Cells, check: Callable[[], object]) -> None:
        self._cluster = cluster
        self._cells = cells
        self._check = check

    def end(self, *, replace: bool, only: CellRun | None = None) -> list[str]:
        """End cells, see `Session.interrupt`.

        Args:
            only: end this cell only; None: all cells that have not ended.
        """
        self._check()
        said: list[str] | None = None
        with Interrupts(lambda: None) as interrupts:
            try:
                runs = [run for run in self._cells.to_end() if only in (None, run)]
                jobs = self._cells.run_queue.waiting_jobs
                said = self._end(runs, replace, interrupts)
                if only is None and jobs:
                    said.append(f"{in_words(jobs)} come{'s' * (len(jobs) == 1)} next: %ddp_cancel all ends all jobs")
            except KeyboardInterrupt:
                pass  # raised below, so that the traceback has no frames of this package
        if said is not None:
            interrupts.raise_late("; ".join(said))
            return said
        raise keyboard_interrupt("interrupted: %ddp_status lists the ranks that are still in a cell")

    def _end(self, runs: list[CellRun], replace: bool, interrupts: Interrupts) -> list[str]:
        if not runs:
            return self._end_calls(interrupts) or ["no cell is under way"]
        ranks = sorted({rank for run in runs for rank in run.pending})
        for run in runs:
            self._press(run)
        self._wait_for(runs, _END_S, interrupts)
        left = {rank for run in runs for rank in run.pending}
        said = []
        if ended := [rank for rank in ranks if rank not in left]:
            names = list(dict.fromkeys(run.name for run in runs))
            were = f"{' and '.join(names)} {'was' if len(names) == 1 else 'were'}"
            said = [f"{were} ended on {list_ranks(ended)}; all variables are kept"]
        if left and replace:
            return [*said, *self._replace(runs, interrupts)]
        if left:
            return [*said, *self._who_is_left(runs)]
        with self._cells.run_queue.if_free() as is_ours:
            if not is_ours:  # the thread that waits for the cell, or the next cell, forms the group
                return said
            self._check()
            return [*said, *self._cells.recovery.what_was_left(self._cells.busy, interrupts.check)]

    def _end_calls(self, interrupts: Interrupts) -> list[str]:
        """Interrupt calls of `session.client`. Return sentences about what was done, or [] if no rank is in such a
        call.
        """
        in_call = self._cells.recovery.in_call
        if not (ranks := in_call()):
            return []
        self._cluster.signal(ranks, INTERRUPT)
        until = time.monotonic() + _END_S
        while (left := in_call()) and time.monotonic() < until:
            interrupts.check()
            time.sleep(_LOOK_S)
        ended = [rank for rank in ranks if rank not in left]
        said = [f"a call of session.client was ended on {list_ranks(ended)}; all variables are kept"] if ended else []
        if left:
            said.append(
                f"{list_ranks(left)} still in a call of session.client: wait, or kill the process, and %ddp_heal "
                "replaces it without variables"
            )
        return said

    def _press(self, run: CellRun, *, replaces: bool = False) -> None:
        """Act as the stop button: the thread that waits for the cell ends it, and at a further press replaces its
        ranks.
        """
        watched = self._cells.watched
        if watched is not None and watched[0] is run and (replaces or not watched[1].count):
            watched[1].press()
        else:
            self._cells.interrupt(run)

    def _wait_for(self, runs: list[CellRun], timeout_s: float, interrupts: Interrupts) -> None:
        until = time.monotonic() + timeout_s
        while not all(run.is_over for run in runs) and time.monotonic() < until:
            interrupts.check()
            time.sleep(_LOOK_S)

    def _who_is_left(self, runs: list[CellRun]) -> list[str]:
        left = []
        for run in runs:
            views = self._cells.inspect(run)
            left += [views[rank] for rank in run.pending if rank in views]
        said = [f"rank {view.rank} has not ended yet: {view.doing}" for view in left]
        if all(view.state == "internal" for view in left):  # or the ranks have ended the cell since
            return [*said, "wait: these ranks end the cell soon"] if said else []
        advice = "wait, or %ddp_interrupt --replace gives new processes to these ranks, which lose their variables"
        return [*said, advice]

    def _replace(self, runs: list[CellRun], interrupts: Interrupts) -> list[str]:
        """Give new processes to the ranks on which these cells have not ended."""
        before = {rank: self._cluster.process(rank) for rank in self._cluster.ranks}
        for run in runs:
            if run.is_watched:
                self._press(run, replaces=True)
        killed: set[int] = set()
        until = time.monotonic() + _REPLACE_S
        while not all(run.is_over for run in runs) and time.monotonic() < until:
            interrupts.check()
            # A thread that waits for a cell may stop waiting at any moment, even right after the press.
            left = {rank for run in runs if not run.is_watched for rank in run.pending} - killed
            if left:
                killed |= left
                with contextlib.suppress(HostError):  # `_check` raises it below
                    self._cluster.signal(sorted(left), signal.SIGKILL)
            time.sleep(_LOOK_S)
        with QueueSlot(self._cells.run_queue, is_next=True):  # a waiting cell would start without these ranks
            self._check()
            notes = []
            if self._cluster.gone:
                if busy := self._cells.busy:
                    raise SessionBrokenError(f"{list_ranks(busy)} could not be ended; %ddp_restart starts new ranks")
                notes = self._cells.recovery.heal(interrupts.check)
            replaced = [rank for rank, process in before.items() if self._cluster.process(rank) is not process]
            return [replaced_in_words(replaced, len(self._cluster.ranks)), *notes] if replaced else notes
