"""The ranks of a job as a table, what has happened, and what is to be done about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_notebook.observe.steps.run import TrainingRun
from ddp_notebook.registry.torchrun import RankEntry
from ddp_notebook.run.groups.diagnosis import Views, verdict
from ddp_notebook.status import as_table
from ddp_notebook.torchrun.rounds import Round
from ddp_notebook.torchrun.shown import missing

_WAITS_S = 3.0  # that long a rank may wait in an operation without a word about it


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRankRow:
    """One rank."""

    rank: int
    host: str
    pid: int | None  # None: it was not seen
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """What `%ddp_attach` and `%ddp_status` show of a job."""

    name: str
    attempt: int  # counted by this notebook
    restarts: int  # after failures, as torchrun counts them
    rows: tuple[JobRankRow, ...]
    waits_s: float  # how long the rank that waits longest has done so
    why: str  # who waits for whom; "": nothing is certain
    notes: tuple[str, ...]
    events: tuple[str, ...]

    def __repr__(self) -> str:
        header = ("rank", "host", "pid", "state")
        rows = [(str(row.rank), row.host, "?" if row.pid is None else str(row.pid), row.state) for row in self.rows]
        restarts = f", {self.restarts} restart{'s' * (self.restarts != 1)}" if self.restarts else ""
        head = f"job {self.name}, attempt {self.attempt} seen by this notebook{restarts}"
        hang = [f"no progress for {self.waits_s:.0f} s: {self.why}"] if self.waits_s > _WAITS_S and self.why else []
        return "\n".join([head, *as_table([header, *rows]), *hang, *self.notes, *self.events])


def status_of(
    name: str, run: Round, views: Views, events: Sequence[str], training: TrainingRun | None = None
) -> JobStatus:
    """The status of an attempt.

    Args:
        name: of the job.
        views: what its ranks do.
        events: the last ones.
        training: the last training run; None: no step was recorded.
    """
    rows = []
    for rank in range(run.world_size):
        member = run.members.get(rank)
        host, pid = ("?", None) if member is None else (member.place.host, member.entry.pid)
        rows.append(JobRankRow(rank=rank, host=host, pid=pid, state=views[rank].doing))
    place = next((one.place for one in run.members.values()), None)
    return JobStatus(
        name=name,
        attempt=run.number,
        restarts=0 if place is None else place.restarts,
        rows=tuple(rows),
        waits_s=max((view.since_s for view in views.values()), default=0.0),
        why=verdict(views),
        notes=tuple(filter(None, [f"training in {training}" if training else "", missing(run), _about_store(place)])),
        events=tuple(events),
    )


def _about_store(place: RankEntry | None) -> str:
    """torch's fault, see `launch.elastic.agent`: said before somebody waits for a restart that cannot succeed."""
    if place is None or not place.shares_store or not (place.restarts or place.most_restarts):
        return ""
    return (
        "torchrun shares one store between its attempts, with which gloo does not get past a restart: set "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started (%ddp_torchrun does)"
    )
