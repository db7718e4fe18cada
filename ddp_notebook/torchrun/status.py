"""The ranks of a job as a table, and what has happened."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_notebook.status import as_table

_WAITS_S = 3.0  # that long a rank may wait in an operation without a word about it


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
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
    rows: tuple[RankRow, ...]
    waits_s: float  # how long the rank that waits longest has done so
    why: str  # who waits for whom; "": nothing is certain
    notes: tuple[str, ...]
    events: tuple[str, ...]

    def __repr__(self) -> str:
        header = ("rank", "host", "pid", "state")
        rows = [(str(row.rank), row.host, "?" if row.pid is None else str(row.pid), row.state) for row in self.rows]
        restarts = f", {self.restarts} restart{'s' * (self.restarts != 1)}" if self.restarts else ""
        head = f"job {self.name}, attempt {self.attempt} since this notebook looks{restarts}"
        hang = [f"no progress for {self.waits_s:.0f} s: {self.why}"] if self.waits_s > _WAITS_S and self.why else []
        return "\n".join([head, *as_table([header, *rows]), *hang, *self.notes, *self.events])
