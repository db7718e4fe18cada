"""Create and connect the parts of a session."""

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
from ddp_notebook.run.groups.healing import Healing
from ddp_notebook.run.groups.liveness import Liveness
from ddp_notebook.run.groups.named_ranks import NamedRanks
from ddp_notebook.run.groups.probe import why_silent
from ddp_notebook.run.groups.rank_states import BusyCells
from ddp_notebook.run.message_handlers import Dispatch, Pump
from ddp_notebook.run.notebook_kernel import before_next_cell
from ddp_notebook.run.output.comms import Comms
from ddp_notebook.run.rank_requests import Questions
from ddp_notebook.run.session_hooks import SessionHooks
from ddp_notebook.run.values.exchange import Exchange
from ddp_notebook.run.values.transfers import Transfers

if TYPE_CHECKING:
    from ddp_notebook.launch.keep.keeper_client import KeeperClient

NOT_STARTED = "this session has no ranks yet: wait until its start has ended"
_SILENT_S = 1.5  # a rank sends a message each second
_LONG_S = 5.0


class SessionParts:
    """Parts of a session. They know the ranks, but not the session.

    Args:
        cluster: the ranks, which were not started yet.
        dispatch: receives the messages of the ranks from the cluster.
        world_size: number of ranks.
        options: options of the start.
        hosts: hosts of the ranks.
    """

    def __init__(
        self, cluster: Cluster, dispatch: Dispatch, world_size: int, options: StartOptions, hosts: Hosts
    ) -> None:
        self.cluster = cluster
        self.hosts = hosts
        self.world_size = world_size  # number of ranks at the start
        self.options = options
        self.hooks = hooks = SessionHooks()
        self.remote: KeeperClient | None = None  # connection to a keeper that has the running ranks
        self.liveness = liveness = Liveness(cluster)
        self.questions = questions = Questions(cluster.send, liveness.check_rank, self._tell_who_is_slow)
        liveness.by_name = NamedRanks(cluster, questions).parse
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
        """Renumber the ranks in all parts.

        Args:
            stayed: former number of each remaining rank, by its new number.
        """
        self.pump.settle()
        self.arrivals.on_renumbered(stayed)
        self.comms.on_renumbered(stayed)
        for renumbered in self.hooks.renumbered:
            renumbered(stayed)

    def _on_renumbered_elsewhere(self, stayed: Mapping[int, int]) -> None:
        """Handle a resize of the session by another notebook."""
        self.on_renumbered(stayed)
        for resized in self.hooks.resized:
            before_next_cell(resized)  # views are created in the main thread

    def _on_moved(self, rank: int) -> None:
        for moved in self.hooks.rank_moved:
            moved(rank)

    def attach(self, remote: KeeperClient) -> None:
        """Connect to a keeper that has the running ranks. Call it before any message of them arrives."""
        self.remote = remote
        self.questions.begin_at(remote.welcome.number << 32)
        remote.renumbered = self._on_renumbered_elsewhere
        remote.say = _say
        for attached in self.hooks.attached:
            attached(remote)

    def _tell_who_is_slow(self, rank: int, seconds: float, is_due: bool) -> None:
        """Report a rank that does not answer. If the rank sends other messages, report it only if the answer is due."""
        is_long = is_due and seconds > _LONG_S
        is_here = rank in self.cluster.ranks
        is_silent = is_here and self.cluster.silent_s(rank) > _SILENT_S
        if not is_silent and rank in self.cells.recovery.in_call():
            why = "it answers after its call of session.client"
        elif is_silent or (is_here and is_long):
            why = why_silent(self.cluster, [rank])[rank]
        else:
            return
        _say(f"rank {rank} has not answered for {seconds:g} s" + (f": {why}" if why else ""))

    def _why_silent(self, ranks: Collection[int]) -> Mapping[int, str]:
        """Return the reasons of ranks that do not answer, for those that are stopped or silent."""
        cluster = self.cluster
        living = [rank for rank in cluster.alive if rank in ranks]
        silent = [rank for rank in living if cluster.process(rank).is_stopped or cluster.silent_s(rank) > _SILENT_S]
        return why_silent(cluster, silent) if silent else {}

    def on_started(self) -> None:
        """Handle the end of the start: the ranks can run cells."""
        if self.remote is None:
            self.arrivals.forget_text()
        for started in self.hooks.started:
            started(is_attached=self.remote is not None)

    def let_go(self) -> None:
        """Close connections to other programs while the ranks are alive, because the session ends."""
        self.comms.close()
        self.client.close()

    def close(self) -> None:
        """Stop handling messages of the ranks."""
        self.liveness.end()
        self.cells.close()
        self.pump.close()
        self.arrivals.close()
        for close in self.hooks.close:
            close()

    def _tell_widget(self, rank: int, message: Comm) -> None:
        """Send a widget's message to the rank's inbox, like cells, so that the next cell sees the widget's
        new state.
        """
        if not self.liveness.has_ended:
            self.cluster.put_in_inboxes(message, [rank])


def _say(text: str) -> None:
    """Print a line under the waiting cell."""
    print(text, file=sys.stderr, flush=True)
