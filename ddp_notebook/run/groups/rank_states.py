"""State of every rank: the table of `%ddp_status`."""

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
        return f"silent for {silent_s:.0f} s" if silent_s > SILENT_S else "too busy to answer"
    if vitals.client_call_s:
        return f"in a call of session.client for {vitals.client_call_s:.1f} s"
    if vitals.unread:
        return f"its state cannot be read: {vitals.unread}"
    if not vitals.running_cell:
        return "in no cell" if is_blocked else "idle"
    doing = f"has failed ({vitals.failed})" if vitals.failed else vitals.where or vitals.phase
    return f"in a cell for {vitals.running_s:.1f} s" + (f": {doing}" if doing else "")
