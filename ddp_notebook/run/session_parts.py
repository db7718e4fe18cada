"""The parts of a session, put together around its ranks."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from ddp_notebook.launch.client import SharedClient
from ddp_notebook.launch.cluster import Cluster, Hosts
from ddp_notebook.launch.options import StartOptions
from ddp_notebook.launch.receipts import Receipts
from ddp_notebook.messages.ranks import Comm
from ddp_notebook.run.cells.abandoned_cells import AbandonedCells
from ddp_notebook.run.cells.cell_messages import CellMessages
from ddp_notebook.run.cells.cells import Cells
from ddp_notebook.run.consistency.agreement import Checking
from ddp_notebook.run.groups.busy_cells import BusyCells
from ddp_notebook.run.groups.healing import Healing
from ddp_notebook.run.groups.liveness import Liveness
from ddp_notebook.run.groups.probe import why_silent
from ddp_notebook.run.message_handlers import Dispatch
from ddp_notebook.run.notebook_kernel import before_next_cell
from ddp_notebook.run.output.comms import Comms
from ddp_notebook.run.output.pump import Pump
from ddp_notebook.run.rank_requests import Questions
from ddp_notebook.run.session_hooks import SessionHooks
from ddp_notebook.run.values.exchange import Exchange
from ddp_notebook.run.values.transfers import Transfers

if TYPE_CHECKING:
    from ddp_notebook.launch.keep.remote import KeeperClient

NOT_STARTED = "this session has no ranks yet: wait until its start has ended"
_SILENT_S = 1.5  # a rank speaks each second
_LONG_S = 5.0


class SessionParts:
    """The parts of a session. They know the ranks, and none of them knows the session.

    Args:
        cluster: the ranks, which were not started yet.
        dispatch: what the cluster tells all to that ranks say.
        world_size: how many they will be.
        options: what the session was started with.
        hosts: of the ranks.
    """

    def __init__(
        self, cluster: Cluster, dispatch: Dispatch, world_size: int, options: StartOptions, hosts: Hosts
    ) -> None:
        self.cluster = cluster
        self.hosts = hosts
        self.world_size = world_size  # at the start
        self.options = options
        self.hooks = hooks = SessionHooks()
        self.remote: KeeperClient | None = None  # a keeper that has the ranks, which live already
        self.liveness = liveness = Liveness(cluster)
        self.questions = questions = Questions(cluster.send, liveness.check_rank, self._tell_who_is_slow)
        cluster.tell_what_is_slow(_say)
        receipts = Receipts(cluster.send)
        self.arrivals = CellMessages(cluster, receipts.took)
        self.cells = cells = Cells(
            cluster,
            self.arrivals,
            questions,
            liveness.check_cells_arrive,
            hosts.notices,
            hooks,
            grace_s=options.grace_s,
            hang_after_s=options.hang_after_s,
            heals=options.heal,
            folds=options.fold,
        )
        self.transfers = transfers = Transfers(cluster, questions, liveness.check_rank)
        self.exchange = Exchange(cells, questions, transfers, liveness)
        self.healing = Healing(cluster, cells, questions, transfers, liveness)
        self.unended = AbandonedCells(cluster, cells, liveness.check_host)
        self.checking = Checking(cells, questions, liveness)
        cells.recovery.on_moved = self._on_moved
        self.client = SharedClient(cluster, self._why_silent, BusyCells(questions, hooks.unended).cells)
        cells.recovery.on_healed = self.client.on_healed
        self.comms = Comms(self._tell_widget, receipts.took)
        self.pump = Pump({**self.arrivals.slow_handlers, Comm: self.comms.on_message})
        dispatch.add(questions.handlers)
        dispatch.add(self.arrivals.handlers)
        dispatch.add(self.pump.handlers)
        hooks.fill(self)
        for handlers in hooks.handlers():
            dispatch.add(handlers)
        dispatch.connect(self.arrivals, self.client)

    def on_renumbered(self, stayed: Mapping[int, int]) -> None:
        """Ranks have other numbers.

        Args:
            stayed: the former number of each rank that has stayed, by its new one.
        """
        self.pump.settle()
        self.arrivals.on_renumbered(stayed)
        self.comms.on_renumbered(stayed)
        for renumbered in self.hooks.renumbered:
            renumbered(stayed)

    def _on_renumbered_elsewhere(self, stayed: Mapping[int, int]) -> None:
        """Another notebook has resized the session."""
        self.on_renumbered(stayed)
        for resized in self.hooks.resized:
            before_next_cell(resized)  # views are made in the main thread

    def _on_moved(self, rank: int) -> None:
        for moved in self.hooks.rank_moved:
            moved(rank)

    def attach(self, remote: KeeperClient) -> None:
        """The ranks live already, and a keeper has them. Call it before anything of them is heard."""
        self.remote = remote
        self.questions.begin_at(remote.welcome.number << 32)
        remote.renumbered = self._on_renumbered_elsewhere
        remote.say = _say
        for attached in self.hooks.attached:
            attached(remote)

    def _tell_who_is_slow(self, rank: int, seconds: float, is_due: bool) -> None:
        """Report a rank that is silent at once, and one that may compute its answer later if the answer is due."""
        is_long = is_due and seconds > _LONG_S
        is_here = rank in self.cluster.ranks
        is_silent = is_here and self.cluster.silent_s(rank) > _SILENT_S
        if not is_silent and rank in self.cells.recovery.in_call():
            why = "it answers when its call of session.client has ended"
        elif is_silent or (is_here and is_long):
            why = why_silent(self.cluster, [rank])[rank]
        else:
            return
        _say(f"rank {rank} has not answered for {seconds:g} s" + (f": {why}" if why else ""))

    def _why_silent(self, ranks: Collection[int]) -> Mapping[int, str]:
        """Return why ranks do not answer, of those that are stopped or silent."""
        cluster = self.cluster
        living = [rank for rank in cluster.alive if rank in ranks]
        silent = [rank for rank in living if cluster.process(rank).is_stopped or cluster.silent_s(rank) > _SILENT_S]
        return why_silent(cluster, silent) if silent else {}

    def on_started(self) -> None:
        """The ranks can run cells."""
        if self.remote is None:
            self.arrivals.forget_text()
        for started in self.hooks.started:
            started(is_attached=self.remote is not None)

    def let_go(self) -> None:
        """The session ends: let go of what others hold, while the ranks live."""
        self.comms.close()
        self.client.close()

    def close(self) -> None:
        """Nothing comes from the ranks any more, or nothing that anybody wants."""
        self.liveness.end()
        self.cells.close()
        self.pump.close()
        self.arrivals.close()
        for close in self.hooks.close:
            close()

    def _tell_widget(self, rank: int, message: Comm) -> None:
        """Send the message of a widget to the inbox of the rank, as cells are sent: the next cell sees its state."""
        if not self.liveness.has_ended:
            self.cluster.put_in_inboxes(message, [rank])


def _say(text: str) -> None:
    """Show a line under the cell that waits."""
    print(text, file=sys.stderr, flush=True)
