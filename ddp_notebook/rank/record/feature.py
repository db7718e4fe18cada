"""Feature of a rank that records its steps, collectives and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ddp_notebook.messages.ranks import Recorded, RunCell
from ddp_notebook.rank.hooks import Core, Feature
from ddp_notebook.rank.record.rank_recording import RankRecording
from ddp_notebook.rank.record.training.wrapping import hide_from_compile
from ddp_notebook.records import logs
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401


class RecordingFeature(Feature):
    """Recording of a rank's activity, and answers to requests between two steps."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        place = core.place
        core.recording = self._recording = RankRecording(
            core.network.recorder,
            core.network.where,
            rank=lambda: -1 if (here := place()) is None else here.rank,
            send=lambda data: core.send(Recorded(data=data)),
            is_busy=core.is_busy,
            between=core.between,
        )
        logs.install(self._recording.metrics.log)

    @classmethod
    def prepare(cls) -> Iterable[Callable[..., Any]]:
        hide_from_compile()
        return ()

    def cell_begins(self, cell: RunCell) -> None:
        self._recording.begin_cell(
            cell.cell, cell.execution_count, cell.record, self.core.shell.user_ns, has_prompt=bool(cell.file)
        )

    def cell_ends(self) -> None:
        self._recording.end_cell()

    def variables(self) -> Mapping[str, object]:
        return {"log": self._recording.metrics.log}

    def vitals(self) -> Mapping[str, Any]:
        return {"training": self._recording.training.loop_counts.to_json()}

    def on_asked(self, flush: bool) -> None:
        self._recording.flusher.on_asked(flush=flush)


FEATURE = RecordingFeature
