"""`Session` as it is used where a keeper has its ranks: the public methods for that."""

from __future__ import annotations

import sys

from ddp_notebook.errors import DDPNotebookError, UsageError
from ddp_notebook.launch.keep.remote import Remote
from ddp_notebook.records.words import list_ranks
from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.cells.face import CellFace
from ddp_notebook.run.cells.result import CellResult
from ddp_notebook.run.jobs.job import Job
from ddp_notebook.run.kernel import is_run_by_program
from ddp_notebook.run.output.sink import of_this_cell
from ddp_notebook.wire.events import RunCell


class KeptFace(CellFace):
    """The part of `Session` that is about who has its ranks."""

    _remote: Remote | None = None  # the keeper, if it has one

    @property
    def is_kept(self) -> bool:
        """Whether its ranks outlive the notebook, see `keep_h`."""
        return self._remote is not None

    @property
    def kept_as(self) -> str:
        """The name of a kept session, which `attach` takes; "" of another."""
        return "" if self._remote is None else self._remote.welcome.name

    @property
    def drives(self) -> bool:
        """Whether this notebook runs the cells, and does not only look on."""
        return self._remote is None or (self._remote.welcome.drives and not self._remote.gone)

    @property
    def outlives_stop(self) -> bool:
        """Whether `stop` ends nothing: this notebook only looks on, has left, or another has taken the session over."""
        return self._remote is not None and self._remote.goes_on

    @property
    def _ended_elsewhere(self) -> bool:
        return self._remote is not None and self._remote.ended_elsewhere

    def detach(self) -> None:
        """Let the ranks of a kept session live on without this notebook, whose `stop` then ends nothing any more."""
        if self._remote is not None:
            self._remote.close("this notebook has left the session")

    def show_unseen(self, *, wait: bool = False, timeout_s: float = 30.0) -> list[str]:
        """Show what cells have printed and displayed that an earlier notebook has sent and not shown to their end. One
        that still runs goes on in the background: its output comes here, and it is one of `jobs`, as are those behind
        it whose turn has not come.

        Args:
            wait: for the end of one that runs. The stop button ends it then, unless it is in the background already.
            timeout_s: how long what was kept may take to come.

        Returns:
            A line about each that runs or waits, and about ranks that the earlier notebook has left without variables.

        Raises:
            what `run` raises: of the first one that has not ended well.

        Example:
            >>> session.show_unseen(wait=True)
            []
        """
        if self._remote is None or not self.drives:
            return []
        self._remote.told_all.wait(timeout_s)
        self._parts.pump.settle(timeout_s)
        jobs, adopted = self._parts.jobs, self._parts.adopted
        wait = wait or is_run_by_program()  # which takes nothing that comes later
        failed: BaseException | None = None
        try:
            adopted.show_ended(wait=wait)
        except (DDPNotebookError, KeyboardInterrupt) as error:
            failed = error
        said = _lacking_in_words(self._remote.lacking)
        for run, cell in adopted.let_go():
            job = self._in_background(run, cell)
            adopted.jobs.add(job.number)
            said.append(f"cell [{cell.execution_count}] of the earlier notebook goes on as job {job.number}")
        said += self._queue_again()
        if failed is not None:
            print(*said, sep="\n", file=sys.stderr)
            raise failed
        if wait and (numbers := [job.number for job in jobs if job.number in adopted.jobs]):
            jobs.wait(*numbers)
        return said + [
            f"cell [{cell.execution_count}] of the earlier notebook waits at input(): %ddp_attach --wait asks you"
            for cell in adopted.asking
        ]

    def _queue_again(self) -> list[str]:
        """Have the jobs in the queue here that waited in that of the earlier notebook. Returns a line about each."""
        adopted, said = self._parts.adopted, []
        while adopted.waiting and not adopted.asking:  # behind one that asks its user they go on waiting
            one = adopted.waiting.pop(0)
            cell = one.told
            which = f"cell [{cell.execution_count}], which waited in the queue of the earlier notebook,"
            try:
                job = self.run(
                    cell.code,
                    one.ranks,
                    one.timeout_s,
                    wait=False,
                    execution_count=cell.execution_count,
                    file=cell.file,
                    record=cell.record,
                    fold=cell.folds,
                )
            except UsageError as error:  # there are fewer ranks now
                said.append(f"{which} cannot run: {error}")
                continue
            adopted.jobs.add(job.number)
            said.append(f"{which} is job {job.number}")
        return said

    def _in_background(self, run: CellRun, cell: RunCell) -> Job:
        sink = of_this_cell()
        beside = self._beside(sink)

        def follow(job: Job) -> CellResult:
            return self._parts.adopted.follow(run, sink, job.place, job.waiter, beside, job.on_begin)

        return self._parts.jobs.start(run.result.ranks, cell.code, cell.execution_count, sink, follow)


def _lacking_in_words(ranks: list[int]) -> list[str]:
    """The notebook that has resized the session ended before these had what they get."""
    if not ranks:
        return []
    given = next(rank for rank in range(len(ranks) + 1) if rank not in ranks)
    new = f"{list_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} new"
    return [
        f"{new}, and the earlier notebook ended while it resized the session: variables may be missing there. "
        f"%ddp_heal --from {given} copies those of rank {given}"
    ]
