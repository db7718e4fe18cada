"""State of every rank, from its answer: the table of `%ddp_status`, and sentences about cells that keep ranks busy."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from ddp_notebook.launch.cluster import Cluster
from ddp_notebook.launch.placement import Placement
from ddp_notebook.messages.ranks import Probe, Vitals
from ddp_notebook.records.phases import WORDS
from ddp_notebook.run.groups.probe import why_silent
from ddp_notebook.run.rank_requests import Questions
from ddp_notebook.status import RankStatus, Status
from ddp_notebook.wire.endpoint import SILENT_S

if TYPE_CHECKING:
    from ddp_notebook.observe.tables.recorded import RecordedTables
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from ddp_notebook.records.words import list_ranks
from ddp_notebook.run.cells.cell import CellRun

_ANSWER_S = 1.0  # time for an answer


def status(
    cluster: Cluster,
    questions: Questions,
    placement: Placement,
    tasks: str,
    recording: RecordedTables | None,
    *,
    lost: str,
) -> Status:
    """Return the state of all ranks, from their answers and the reports of their hosts.

    Args:
        tasks: sentence about the cluster job that has the hosts.
        recording: recording of the session, with the measured clocks; None: recording is off.
        lost: state of all ranks if the hosts cannot be reached.
    """
    trouble = cluster.trouble()
    answers: dict[int, Vitals] = {}

    def probe(number: int) -> Probe:
        return Probe(request=number, with_shortages=True)

    if cluster.is_running:
        answers = questions.ask_for(set(cluster.alive) - cluster.unheard.keys(), probe, _ANSWER_S)
    halted = stopped(cluster)  # the keeper of a kept session reports a stopped process with a delay
    trouble = "\n".join(filter(None, [trouble, *halted]))
    is_blocked = bool(halted or cluster.pulse())  # a notebook that only observes is not blocked
    silent = [rank for rank in cluster.alive if rank not in answers and cluster.is_running]
    why = why_silent(cluster, silent) if silent else {}
    rows = []
    for rank in cluster.ranks:
        vitals, process = answers.get(rank), cluster.process(rank)
        rows.append(
            RankStatus(
                rank=rank,
                host=process.host.label,
                pid=process.pid,
                device=placement.devices[rank],
                device_name=placement.names[rank],
                state=_state(cluster, rank, vitals, why.get(rank, ""), is_blocked) if cluster.is_running else lost,
                rss_bytes=vitals.rss_bytes if vitals else None,
                device_bytes=vitals.device_bytes if vitals else None,
                shortages=tuple(vitals.shortages) if vitals else (),
            )
        )
    known: dict[str, int] = {}
    run = None
    if recording is not None:
        from ddp_notebook.observe.steps.run import run_of

        for row in rows:
            known[row.host] = max(known.get(row.host, 0), recording.clock.error_ns(row.rank) or 0)
        with recording._as_it_is() if silent else nullcontext():  # otherwise it would wait for unresponsive ranks
            run = run_of(recording)
    return Status(
        backend=placement.backend,
        epoch=cluster.epoch,
        rows=tuple(rows),
        trouble=trouble,
        clock_errors_ns=known,
        run=run,
        tasks=tasks,
    )


def stopped(cluster: Cluster) -> list[str]:
    """Return a sentence for each stopped process other than a rank. The state of ranks is in the table."""
    return [process.stopped for process in cluster.stopped([])]


def _state(cluster: Cluster, rank: int, vitals: Vitals | None, why: str, is_blocked: bool) -> str:
    """Return the state of a rank as text. "idle" means that the next cell starts immediately.

    Args:
        is_blocked: a process that the next cell may need is stopped or does not answer.
    """
    if not cluster.process(rank).is_alive:
        return "died"
    if unheard := cluster.process(rank).host.unheard:
        return unheard.partition(";")[0]
    if vitals is None and why:
        return why if why in WORDS else f"no answer: {why}"
    if vitals is None:
        silent_s = cluster.silent_s(rank)
        return f"silent for {silent_s:.0f} s" if silent_s > SILENT_S else "no answer"
    if vitals.client_call_s:
        return f"in a call of session.client for {vitals.client_call_s:.1f} s"
    if vitals.unread:
        return f"its state cannot be read: {vitals.unread}"
    if not vitals.running_cell:
        return "in no cell" if is_blocked else "idle"
    doing = f"has failed ({vitals.failed})" if vitals.failed else vitals.where or vitals.phase
    return f"in a cell for {vitals.running_s:.1f} s" + (f": {doing}" if doing else "")


_BUSY_ANSWER_S = 0.3  # a rank's agent answers within milliseconds
_LONG_S = 1.0  # a shorter cell may end before a message about it is read


class _Job(Protocol):
    @property
    def number(self) -> int: ...
    @property
    def run(self) -> CellRun | None: ...


class BusyCells:
    """Finds the cells that ranks are running.

    Args:
        questions: sends requests to the ranks.
        jobs: returns the jobs that have not ended.
    """

    def __init__(self, questions: Questions, jobs: Callable[[], Collection[_Job]]) -> None:
        self._questions = questions
        self._jobs = jobs

    def cells(self, ranks: Collection[int]) -> str:
        """Return sentences about the cells that these ranks have run for more than a second, and how to end each.

        Return "" if there are none. Ranks that do not answer in time are left out.
        """
        answers: dict[int, Vitals] = self._questions.ask_for(ranks, lambda n: Probe(request=n), _BUSY_ANSWER_S)
        return ". ".join(self._describe({rank: one for rank, one in answers.items() if one.running_s > _LONG_S}))

    def _describe(self, answers: dict[int, Vitals]) -> Iterator[str]:
        jobs = {job.run.number: job.number for job in self._jobs() if job.run is not None}
        for cell in sorted({vitals.running_cell for vitals in answers.values()} - {0}):
            its = [rank for rank, vitals in answers.items() if vitals.running_cell == cell]
            runs = f"{list_ranks(its)} {'runs' if len(its) == 1 else 'run'}"
            since = f"since {max(answers[rank].running_s for rank in its):.0f} s"
            if number := jobs.get(cell):
                yield f"{runs} job {number} {since}: %ddp_wait {number} waits for it, %ddp_cancel {number} ends it"
            else:
                yield f"{runs} a cell {since}: %ddp_interrupt ends it, and all variables are kept"
