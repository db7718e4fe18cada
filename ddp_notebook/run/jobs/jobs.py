"""Background cells of a session: start, list, wait, cancel."""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import TYPE_CHECKING

from ddp_notebook.errors import UsageError
from ddp_notebook.records.words import format_ranks
from ddp_notebook.run.cells.abandoned_cells import AbandonedCells
from ddp_notebook.run.cells.cells import Cells
from ddp_notebook.run.cells.interrupt import Interrupts, keyboard_interrupt
from ddp_notebook.run.cells.result import CellResult
from ddp_notebook.run.cells.run_queue import QueueSlot, in_words
from ddp_notebook.run.interrupted import OF_JOBS, tells_interrupts
from ddp_notebook.run.jobs.job import Job
from ddp_notebook.run.notebook_kernel import thread_of_this_cell
from ddp_notebook.run.output.display_target import DisplayTarget
from ddp_notebook.run.session_hooks import SessionFeature
from ddp_notebook.status import as_table

if TYPE_CHECKING:
    from ddp_notebook.launch.keep.keeper_client import KeeperClient
    from ddp_notebook.messages.keeper import Waiting
    from ddp_notebook.run.kept.foreign_cells import ForeignCells
    from ddp_notebook.run.session_parts import SessionParts

_KEPT = 20  # number of ended jobs that are kept; each holds the output of its cell
_LOOK_S = 0.2
_END_S = 2.0  # time for ranks to end a cell when the session is stopped
_MOST_CODE_CHARS = 50  # shown characters of the first line of code


@tells_interrupts(OF_JOBS)
class Jobs:
    """Jobs of a session, numbered from 1, the oldest first. Its `repr` is the table that `%ddp_jobs` shows.

    Args:
        cells: cells of the session, whose run queue the jobs share.
        unended: ends running cells.

    Example:
        >>> job = session.submit("1", quiet=True)
        >>> session.jobs.wait(job.number) == [job], session.jobs[job.number] is job
        (True, True)
    """

    def __init__(self, cells: Cells, unended: AbandonedCells) -> None:
        self._cells = cells
        self._unended = unended
        self._jobs: dict[int, Job] = {}
        self.ranks_live_on = False  # the ranks outlive this process
        self.on_queue: Callable[[list[Waiting]], object] = lambda _: None  # called with the waiting jobs
        self.elsewhere: ForeignCells | None = None  # cells of the driver, if this notebook only observes
        self.before: list[str] = []  # sentences about ended cells of an earlier notebook
        self._telling = threading.Lock()
        self._last = 0
        self._waited_for: set[int] = set()

    def start(
        self,
        ranks: Sequence[int],
        code: str,
        prompt: int,
        target: DisplayTarget | None,
        run: Callable[[Job], CellResult],
        waiting: Waiting | None = None,
    ) -> Job:
        """Add a job to the run queue, and start a thread that runs it.

        Args:
            ranks: ranks that run it.
            code: code of the cell.
            prompt: number in its `In [n]`.
            target: shows its output; None: the output is not shown.
            run: runs the cell at the head of the queue.
            waiting: description of the waiting job, for a keeper that runs it if this process ends.
        """
        if not self._jobs:
            atexit.register(self._at_exit)
        self._last = number = self._last + 1
        place = QueueSlot(self._cells.run_queue, number)
        job = Job(number, ranks, code, prompt, place, target, self._cancel, waiting, self._telling)
        self._jobs[number] = job
        for old in [one for one in self if one.done()][:-_KEPT]:
            del self._jobs[old.number]
        try:
            if job.place.ahead:
                job._show_state()
            if not place.wait_is_over.is_set():
                self._tell_queue()
            thread_of_this_cell(functools.partial(self._work, job, run), f"ddp-job-{number}").start()
        except BaseException:  # without a thread, the slot would never be released
            del self._jobs[number]
            if not job.place.give_up():
                self._cells.run_queue.leave(job.place)
            raise
        return job

    def _work(self, job: Job, run: Callable[[Job], CellResult]) -> None:
        job._work(functools.partial(run, job))
        if job.run is None:  # it has left the queue and will not run
            self._tell_queue()

    def _tell_queue(self) -> None:
        with self._telling:
            left = [job for job in self if job.state == "waiting" and not job.place.is_given_up]
            self.on_queue([job.waiting for job in left if job.waiting is not None])

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def __len__(self) -> int:
        return len(self._jobs)

    def __getitem__(self, number: int) -> Job:
        try:
            return self._jobs[number]
        except KeyError:
            known = f"known: {in_words(list(self._jobs))}" if self._jobs else "no job was started"
            raise UsageError(f"job {number} does not exist; {known} (the last {_KEPT} ended jobs are kept)") from None

    def __repr__(self) -> str:
        if self.elsewhere is not None:
            return _of_elsewhere(self.elsewhere)
        if not self._jobs:
            none = "no cell was run in the background: %%on_all_ranks --background runs one"
            return "\n".join(self.before or [none])
        return "\n".join([*self.before, *as_table([("job", "cell", "ranks", "state", "s", "code"), *map(_row, self)])])

    @property
    def unended(self) -> list[Job]:
        """Return the jobs that wait or run."""
        return [job for job in self if not job.done()]

    def wait(self, *numbers: int, report: Callable[[Job], object] = lambda job: None) -> list[Job]:
        """Wait until jobs have ended. Cancelled jobs raise no error.

        Args:
            numbers: numbers of jobs; none: all jobs that were not waited for yet.
            report: called with each ended job, in order.

        Raises:
            UsageError: a job does not exist.
            KeyboardInterrupt: the wait was interrupted; the jobs continue.
            RankError: the error of the first failed job, or any other error of `Session.run`.
        """
        chosen = [self[n] for n in numbers] or [job for job in self if job.number not in self._waited_for]
        with Interrupts(lambda: None) as interrupts:
            for job in chosen:
                while not futures.wait([job], _LOOK_S).done and not interrupts.count:
                    pass
                if not job.done():
                    break
                self._waited_for.add(job.number)
                report(job)
        left = [job.number for job in chosen if not job.done()]
        if not left:
            interrupts.raise_late("the jobs have ended")
        else:
            raise keyboard_interrupt(f"interrupted: {in_words(left)} continue{'s' * (len(left) == 1)}")
        for job in chosen:
            if job.state == "failed":
                job.result()
        return chosen

    def cancel(self, *numbers: int) -> list[str]:
        """End running jobs like the stop button, and remove waiting jobs from the queue. Variables are kept.

        Args:
            numbers: numbers of jobs; none: all jobs that have not ended.

        Returns:
            Sentences that describe what was done. For ranks that have not ended a cell, their last activity.

        Raises:
            UsageError: a job does not exist.
        """
        chosen = [self[n] for n in numbers] or self.unended
        said = {job.number: self._cancel(job) for job in reversed(chosen)}  # reversed, so that no waiting job starts
        return [line for job in chosen for line in said[job.number]]

    def _cancel(self, job: Job) -> list[str]:
        said = []
        if not job.done() and not job.place.give_up():
            job._press()
            if job.run is not None:
                said = self._unended.end(replace=False, only=job.run)
                if not job.run.is_over:
                    return said
        futures.wait([job], _END_S)
        return [repr(job)]

    def close(self, why: str) -> None:
        """End all jobs with the session. The running job gets a moment to end."""
        atexit.unregister(self._at_exit)
        for job in reversed(left := self.unended):
            job.reason = why
            if not job.place.give_up():
                job._press()
        futures.wait(left, _END_S)

    def _at_exit(self) -> None:
        """End jobs when this process exits, and report those that have not ended.

        If a keeper has the ranks, they continue the running cell, and the keeper starts the waiting jobs.
        """
        if self.ranks_live_on:
            self.on_queue = lambda _: None
            for job in reversed(self.unended):
                job.place.give_up()
            return
        self.close("the program has ended")
        self._cells.close()
        self.join()

    def join(self) -> None:
        """Wait until the end of all jobs was reported, after the last message of the ranks."""
        futures.wait(self.unended, _END_S)


class SessionJobs(SessionFeature):
    """The jobs of one session."""

    def __init__(self, parts: SessionParts) -> None:
        super().__init__(parts)
        self.jobs = Jobs(parts.cells, parts.unended)

    def attached(self, remote: KeeperClient) -> None:
        self.jobs.ranks_live_on = True

    def stops(self) -> None:
        self.jobs.close("the session was stopped")

    def joined(self) -> None:
        self.jobs.join()

    def unended(self) -> list[Job]:
        return self.jobs.unended


def _of_elsewhere(elsewhere: ForeignCells) -> str:
    rows = [
        (f"In [{told.execution_count}]", ranks or "all", state, seconds, _first_line(told.code))
        for told, ranks, state, seconds in elsewhere.rows()
    ]
    if not rows:
        return "no cell is running or queued in this session; this notebook is attached read-only and has no jobs"
    table = as_table([("cell", "ranks", "state", "s", "code"), *rows])
    return "\n".join(["this notebook is read-only; cells of the notebook that drives the session:", *table])


def _first_line(code: str) -> str:
    first = next((line.strip() for line in code.splitlines() if line.strip()), "")
    return first if len(first) <= _MOST_CODE_CHARS else f"{first[: _MOST_CODE_CHARS - 3]}..."


def _row(job: Job) -> tuple[str, ...]:
    code = _first_line(job.code)
    state = job.waits if job.state == "waiting" else job.state
    seconds = f"{job.seconds:.1f}" if job.seconds else ""
    return str(job.number), f"In [{job.prompt}]", format_ranks(job.ranks), state, seconds, code
