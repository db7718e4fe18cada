"""The state of every rank, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddp_notebook.records.units import ms, size

if TYPE_CHECKING:
    from ddp_notebook.observe.steps.run import TrainingRun

_MOST_NAMED = 4  # hosts in a sentence, the worst ones


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank."""

    rank: int
    host: str
    pid: int
    device: str
    device_name: str
    state: str
    rss_bytes: int | None
    device_bytes: int | None  # allocated and cached by torch on the rank's GPU
    shortages: tuple[str, ...] = ()  # resources that the rank has none left of, a sentence for each

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        memory = "?" if self.rss_bytes is None else size(self.rss_bytes)
        if self.device_bytes:
            memory += f" + {size(self.device_bytes)} on the GPU"
        device = self.device if self.device == "cpu" else f"{self.device} ({self.device_name})"
        return str(self.rank), self.host, str(self.pid), device, memory, self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """All ranks of a session. Its `repr` is the table that `%ddp_status` shows."""

    backend: str
    epoch: int
    rows: tuple[RankStatus, ...]
    trouble: str = ""  # of the host server, in a sentence
    clock_errors_ns: Mapping[str, int] = field(default_factory=dict)  # by host: how well its clock is known
    run: TrainingRun | None = None  # the last one that was recorded
    tasks: str = ""  # of what has started the ranks' hosts, in a sentence: a job, and the time that it has left

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
        """Of hosts that have not the notebook's clock; "" if all have."""
        known = sorted(
            ((host, error) for host, error in self.clock_errors_ns.items() if error), key=lambda one: -one[1]
        )
        if not known:
            return ""
        words = [f"{host} to ±{ms(error)}" for host, error in known[:_MOST_NAMED]]
        others = [f"{len(known) - _MOST_NAMED} others better"] if len(known) > _MOST_NAMED else []
        return f"clocks are known: {', '.join([*words, *others])}"


def as_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table in columns.

    Example:
        >>> as_table([("rank", "state"), ("0", "idle")])
        ['rank  state', '0     idle']
    """
    widths = [max(len(line[column]) for line in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in rows)
    return [line.rstrip() for line in lines]
