"""Table with the state of every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddp_notebook.records.units import ms, size

if TYPE_CHECKING:
    from ddp_notebook.observe.steps.run import TrainingRun

_MOST_NAMED = 4  # hosts in a sentence, those with the largest clock errors


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """State of one rank."""

    rank: int
    host: str
    pid: int
    device: str
    device_name: str
    state: str
    rss_bytes: int | None
    device_bytes: int | None  # memory that torch has allocated and cached on the rank's GPU
    shortages: tuple[str, ...] = ()  # exhausted resources of the rank, a sentence for each

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        memory = "?" if self.rss_bytes is None else size(self.rss_bytes)
        if self.device_bytes:
            memory += f" + {size(self.device_bytes)} on the GPU"
        device = self.device if self.device == "cpu" else f"{self.device} ({self.device_name})"
        return str(self.rank), self.host, str(self.pid), device, memory, self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """State of all ranks of a session. Its `repr` is the table that `%ddp_status` shows."""

    backend: str
    epoch: int
    rows: tuple[RankStatus, ...]
    trouble: str = ""  # description of a fault of the host servers
    clock_errors_ns: Mapping[str, int] = field(default_factory=dict)  # clock error by host; 0: the notebook's own clock
    run: TrainingRun | None = None  # the last recorded training run
    tasks: str = ""  # description of the cluster job that has the hosts, with its time left

    def __repr__(self) -> str:
        table = [("rank", "host", "pid", "device", "memory", "state"), *(row.cells() for row in self.rows)]
        last = [
            f"backend {self.backend}, group {self.epoch}",
            *([] if self.run is None else [f"training in {self.run}"]),
            *(sentence for row in self.rows for sentence in row.shortages),
            *filter(None, [self._clocks(), self.tasks, self.trouble]),
        ]
        return "\n".join([*as_table(table), *last])

    def _clocks(self) -> str:
        """Return a sentence about hosts with a clock error, or ""."""
        known = sorted(
            ((host, error) for host, error in self.clock_errors_ns.items() if error), key=lambda one: -one[1]
        )
        if not known:
            return ""
        words = [f"{host} to ±{ms(error)}" for host, error in known[:_MOST_NAMED]]
        others = [f"{len(known) - _MOST_NAMED} others better"] if len(known) > _MOST_NAMED else []
        return f"clocks are known: {', '.join([*words, *others])}"


def as_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with aligned columns.

    Example:
        >>> as_table([("rank", "state"), ("0", "idle")])
        ['rank  state', '0     idle']
    """
    widths = [max(len(line[column]) for line in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in rows)
    return [line.rstrip() for line in lines]
