"""The cells of a kept session that other notebooks have sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_notebook.messages.keeper import CellShown, WaitingJobs
from ddp_notebook.run.kept.foreign_cells import ForeignCells
from ddp_notebook.run.kept.recovered_cells import RecoveredCells
from ddp_notebook.run.session_hooks import SessionFeature

if TYPE_CHECKING:
    from ddp_notebook.launch.keep.remote import KeeperClient
    from ddp_notebook.run.session_parts import SessionParts


class KeptCells(SessionFeature):
    """Those of one session. In a session without a keeper there are none."""

    def __init__(self, parts: SessionParts) -> None:
        super().__init__(parts)
        self.recovered = RecoveredCells(parts.cluster, parts.cells)

    def attached(self, remote: KeeperClient) -> None:
        cells, recovered, welcome = self.parts.cells, self.recovered, remote.welcome
        jobs_of = self.parts.hooks.features.get("jobs")
        jobs = None if jobs_of is None else jobs_of.jobs
        if not welcome.drives:
            cells.elsewhere = elsewhere = ForeignCells(cells.name)
            remote.running = elsewhere.take
            if jobs is not None:
                jobs.elsewhere = elsewhere
            return
        cells.begin_behind(welcome.last_cell)
        cells.recovery.replaced = welcome.lacking
        recovered.take(welcome.cells)
        recovered.waiting = list(welcome.waiting)
        cells.before_turn = recovered.notes
        cells.on_shown = lambda cell: remote.tell(CellShown(cell=cell))
        if jobs is not None:
            jobs.before = recovered.ended
            jobs.on_queue = lambda waiting: remote.tell(WaitingJobs(waiting=[*recovered.waiting, *waiting]))
