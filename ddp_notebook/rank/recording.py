"""What a rank records, put together. Works without a notebook too, see `ddp_notebook.record`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp_notebook.rank.drain import Drain
from ddp_notebook.rank.metrics import Metrics
from ddp_notebook.rank.recorder import Recorder
from ddp_notebook.rank.rows import Rows
from ddp_notebook.rank.tape import LEVELS, Tape
from ddp_notebook.rank.training import CELL, Training
from ddp_notebook.rank.where import Where


class Recording:
    """One rank's.

    Args:
        recorder: sees the operations.
        where: knows which files are cells.
        rank: tells the rank's number.
        send, is_busy: see `Drain`.
    """

    def __init__(
        self,
        recorder: Recorder,
        where: Where,
        rank: Callable[[], int],
        send: Callable[[bytes], None],
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self.tape = recorder.tape = Tape(where.cells)
        self.training = Training(self.tape)
        self.metrics = Metrics(self.tape, self.training, where.cells)
        self.drain = Drain(self.tape, Rows(rank, where.of_calls), send, is_busy)
        self._level = self.tape.level
        self._began_ns = self._began_at = 0
        self.training.install()
        self.drain.start()

    def set_level(self, level: str) -> None:
        """Record nothing (`"off"`), no values (`"meta"`), or all."""
        self._level = self.tape.level = LEVELS.index(level)

    def begin_cell(self, cell: int, title: int, options: dict[str, Any], now_ns: int) -> None:
        """A cell begins.

        Args:
            cell, title: its number, and that in `In [n]`.
            options: what to record of it beside: "full_bytes", "watch", "gradient".
        """
        self.tape.enter(cell, title)
        self.training.begin_cell()
        self.tape.full_bytes = options.get("full_bytes", 0)
        self.metrics.watched = tuple(options.get("watch", ()))
        self.training.gradient = options.get("gradient", "")
        self._began_ns, self._began_at = now_ns, self.tape.puts

    def end_cell(self) -> None:
        """The cell has ended. One that has recorded nothing leaves nothing."""
        if self.tape.puts != self._began_at:
            self.training.put(CELL, "", self._began_ns)
