"""`Session` as it is used to run cells: the public methods for that."""

from __future__ import annotations

from typing import Literal, overload

from ddp_notebook.errors import DDPNotebookError, UsageError
from ddp_notebook.launch.keep.state import Waiting
from ddp_notebook.launch.options import StartOptions
from ddp_notebook.run.assembly import Assembled
from ddp_notebook.run.cells.interrupt import uninterrupted
from ddp_notebook.run.cells.options import check_timeout
from ddp_notebook.run.cells.result import CellResult
from ddp_notebook.run.cells.watch import NOTEBOOK, Beside
from ddp_notebook.run.foresee.warnings import foresee
from ddp_notebook.run.jobs.job import Job
from ddp_notebook.run.jobs.jobs import Jobs
from ddp_notebook.run.kernel import cell_number, is_users_thread
from ddp_notebook.run.output.sink import Here, Sink, of_this_cell
from ddp_notebook.run.rank_sets import RankSet
from ddp_notebook.wire.events import RunCell
from ddp_notebook.wire.record_options import RecordOptions


class CellFace(Assembled):
    """The part of `Session` that runs cells."""

    options: StartOptions

    def _beside(self, sink: Sink) -> Beside | None:
        """What is shown beside the output of a cell that begins now."""
        raise NotImplementedError

    @property
    def jobs(self) -> Jobs:
        """The cells in the background: those of `run(wait=False)` and of `%%on_all_ranks --background`.

        Example:
            >>> job = session.run("1", wait=False, quiet=True)
            >>> session.jobs.wait(job.number)[0].state
            'done'
        """
        return self._parts.jobs

    @overload
    def run(
        self,
        code: str,
        ranks: RankSet = None,
        timeout: float | None = None,
        wait: Literal[True] = True,
        *,
        quiet: bool = False,
        execution_count: int | None = None,
        file: str = "",
        record: RecordOptions | None = None,
        fold: bool | None = None,
    ) -> CellResult: ...
    @overload
    def run(
        self,
        code: str,
        ranks: RankSet = None,
        timeout: float | None = None,
        *,
        wait: Literal[False],
        quiet: bool = False,
        execution_count: int | None = None,
        file: str = "",
        record: RecordOptions | None = None,
        fold: bool | None = None,
    ) -> Job: ...
    @overload
    def run(
        self,
        code: str,
        ranks: RankSet = None,
        timeout: float | None = None,
        wait: bool = True,
        *,
        quiet: bool = False,
        execution_count: int | None = None,
        file: str = "",
        record: RecordOptions | None = None,
        fold: bool | None = None,
    ) -> CellResult | Job: ...
    def run(
        self,
        code: str,
        ranks: RankSet = None,
        timeout: float | None = None,
        wait: bool = True,
        *,
        quiet: bool = False,
        execution_count: int | None = None,
        file: str = "",
        record: RecordOptions | None = None,
        fold: bool | None = None,
    ) -> CellResult | Job:
        """Run code on ranks, as a cell of a notebook would.

        In the main thread the output appears live, `input()` can be answered and the kernel's interrupt is passed on;
        in another thread nothing is shown. A second call waits its turn. With `wait=False` the cell runs in the
        background: its output goes on where the call was made, and whatever ends a wait of the notebook's leaves it
        alone.

        Args:
            code: what an IPython cell may hold, magics and top-level `await` included.
            ranks: which of them: "all", "0,2-3", "-1", "::2", a rank or several; None: all.
            timeout: seconds after which the cell is stopped as by the stop button; None: no limit.
            wait: False returns at once: a job, which is a future of the result.
            quiet: show nothing.
            execution_count: the number in `In [n]` that tracebacks show; None: that of the cell that calls this.
            file: the name of the cell's file that warnings show; "": one made from the code.
            record: what to record of it; None: what is always recorded.
            fold: show lines that are equal on several ranks, or differ only in numbers, as one. False: show each line
                of each rank. None: as the session was started.

        Raises:
            UsageError: no such rank, or no such time.
            RankError: it failed on at least one rank; holds the results of all.
            RankDiedError: a rank's process ended.
            CellTimeoutError: it took too long; says where each rank was.
            KeyboardInterrupt: it was interrupted.
            SessionBrokenError: a rank is gone, or still busy with an earlier cell.

        Example:
            >>> session.run("total = torch.ones(1) * rank; dist.all_reduce(total); total")[0].result
            [0-1] tensor([1.])
            'tensor([1.])'
        """
        if not isinstance(code, str):
            raise UsageError(f"code is text, not {type(code).__name__}: session.run('print(rank)')")
        if execution_count is None:
            execution_count = cell_number()
        parts = self._parts
        living = parts.living
        gone = [] if self.options.heal else living.check_host().gone
        asked_for = living.parse(ranks)
        warned: list[str] = []
        if not quiet:
            left = [rank for rank in asked_for if rank not in gone]
            with uninterrupted():  # a press during a garbage collection would be lost: a callback of its swallows it
                warned = foresee(code, left, self.world_size, gone, self._placement.local_rank)
        if timeout is not None:
            check_timeout(timeout)
        asked = parts.recordings.for_cell(record)
        sink: Sink | None = None
        if not quiet and not wait:
            sink = of_this_cell()
        elif not quiet and is_users_thread():
            sink = Here()
        beside = None if sink is None else self._beside(sink)

        def choose() -> tuple[list[int], list[str]]:
            healed = parts.healing.before_cell() if self.options.heal else []
            chosen, notes = living.for_cell(ranks)
            parts.recordings.on_cell()
            return chosen, [*healed, *notes, *warned]

        def run(job: Job | None = None) -> CellResult:
            return parts.cells.run(
                code,
                choose,
                timeout_s=timeout,
                sink=sink,
                execution_count=execution_count,
                file=file,
                record=asked,
                folds=fold,
                beside=beside,
                place=None if job is None else job.place,
                waiter=NOTEBOOK if job is None else job.waiter,
                on_begin=None if job is None else job.on_begin,
            )

        if wait:
            try:
                return run()
            except (DDPNotebookError, KeyboardInterrupt) as error:
                # In a script our frames would stand before what the ranks say.
                raise error.with_traceback(None)  # noqa: B904 - the same error, whose context is the script's
        living.check_host()  # now, not in a thread of its own
        told = RunCell(cell=0, code=code, execution_count=execution_count, file=file, record=asked, folds=fold)
        of_all = len(asked_for) == self.world_size
        waiting = Waiting(told=told, ranks=None if of_all else asked_for, timeout_s=timeout)
        return parts.jobs.start(asked_for, code, execution_count, sink, run, waiting)
