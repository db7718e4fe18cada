"""The processes that are the ranks: how they are started, replaced, added and removed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence

from ddp_notebook.errors import ClientError, HostError, StartError
from ddp_notebook.launch.engines import Engines
from ddp_notebook.launch.forming import Check, Forming
from ddp_notebook.launch.host import open_files
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.membership.lost_hosts import LostRanks
from ddp_notebook.launch.membership.spawner import Spawner
from ddp_notebook.launch.placement import Placement
from ddp_notebook.launch.process import COMER, LEAVER, RANK, STORE, Process, Processes
from ddp_notebook.records.words import name_ranks

_GRACE_S = 1.0  # grace period of ranks that leave

Renumbered = Callable[[Mapping[int, int]], object]  # called with the former number of each kept rank, by its new number


class Members:
    """The ranks of one session.

    Args:
        processes: of the session.
        hosts: by name.
        placement: of the ranks that are started first.
        spawner: starts processes.
        losses: chooses hosts for ranks of lost hosts.
        forming: forms the group of the ranks.
        engines: the ipyparallel engines of the ranks.
        mark_token: token of the marks in the ranks' text.

    Attributes:
        placement: current host and device of each rank.
    """

    def __init__(
        self,
        processes: Processes,
        hosts: Mapping[str, Host],
        placement: Placement,
        spawner: Spawner,
        losses: LostRanks,
        forming: Forming,
        engines: Engines,
        mark_token: str,
    ) -> None:
        self.placement = placement
        self._processes = processes
        self._hosts = hosts
        self._spawner = spawner
        self._losses = losses
        self._forming = forming
        self._engines = engines
        self._mark_token = mark_token

    def start(self) -> None:
        """Start a process for each rank."""
        for rank in range(self.placement.world_size):
            self._processes.by_rank[rank] = self._start_rank(rank, self.placement)

    def end_stopped_store(self) -> None:
        """See `Cluster.replace_stopped_store`."""
        self._spawner.kill([store for store in self._processes.living(STORE) if store.is_stopped])

    def call_to_form(self) -> None:
        """Send every rank its position in the group of the next epoch."""
        self.end_stopped_store()
        at = self._forming.store_at(self._losses.home)
        [*_, store] = self._processes.living(STORE) or [self._spawner.start(STORE, self._losses.home, lambda _: at)]
        self._forming.call(store, self.placement)

    def replace(self, ranks: list[int], deadline: float, check: Check) -> list[str]:
        """See `Cluster.replace`."""
        processes = self._processes
        for process in processes.by_rank.values():
            process.error, process.lacks_others = "", False  # left by a failed attempt to form the group
        were_on = {rank: processes.by_rank[rank].host for rank in ranks}
        try:
            open_files.check_free(open_files.OF_RANK * len(ranks), "a heal")
            self.placement = self._losses.place(self.placement, ranks, deadline, check)
            if self._engines.have_had_controller:
                self._engines.client_file()  # the controller knows the engines of the dead ranks
            for rank in ranks:
                self._processes.by_rank[rank] = self._start_rank(rank, self.placement)
            self._forming.wait_for("the new processes to connect", "Hello", deadline, check)
            self.call_to_form()
            self._engines.call(ranks)
            notes = self._forming.wait(deadline, check)
            self._forming.wait_for("the engines", "Ready", deadline, check)
            if self._engines.replace():
                new = [processes.by_rank[rank] for rank in ranks]
                self._forming.wait_for("the engines to register", "Registered", deadline, check, new)
        except BaseException as error:
            self._spawner.kill([processes.by_rank[rank] for rank in ranks])
            if isinstance(error, StartError | ClientError):
                raise StartError(f"no new process for {name_ranks(ranks)}: {error}") from error
            raise  # an exception of `check`
        return [*self._losses.moved_in_words(were_on), *notes]

    # A resize replaces ranks with more or fewer members. A failure before the renumbering changes nothing. After it,
    # the group can be healed or formed again.

    def resize(
        self, stay: Sequence[int], placement: Placement, deadline: float, check: Check, renumbered: Renumbered
    ) -> list[str]:
        """See `Cluster.resize`."""
        leavers = [process for rank, process in self._processes.by_rank.items() if rank not in stay]
        new = self._bring(leavers, len(stay), placement, deadline, check)
        with self._processes.changed:
            ranks = dict(enumerate([*(self._processes.by_rank[rank] for rank in stay), *new]))
            for rank, process in ranks.items():
                process.rank, process.kind = rank, RANK
            self._processes.by_rank = ranks
            self.placement = placement
        renumbered(dict(enumerate(stay)))
        ending = threading.Thread(target=self._end, args=(leavers,), name="ddp-leave", daemon=True)
        ending.start()
        try:
            self._engines.forget_all()
            self.call_to_form()
            self._engines.call([process.rank for process in new])
            notes = self._forming.wait(deadline, check)
            self._forming.wait_for("the engines", "Ready", deadline, check)
        finally:
            ending.join()
        return notes

    def _bring(
        self, leavers: Sequence[Process], count: int, placement: Placement, deadline: float, check: Check
    ) -> list[Process]:
        """Start the new processes of this placement: the ranks from number `count` on."""
        new: list[Process] = []
        for process in leavers:  # a dead leaving rank must not fail the wait
            process.kind = LEAVER
        try:
            open_files.check_free(open_files.OF_RANK * max(0, placement.world_size - count), "a resize")
            for rank in range(count, placement.world_size):
                new.append(self._start_rank(rank, placement, COMER))
            self._forming.wait_for("the new processes to connect", "Hello", deadline, check, new)
        except BaseException as error:
            self._spawner.kill(new)
            for process in new:
                self._processes.all.pop(process.name, None)
            for process in leavers:
                process.kind = RANK
            if isinstance(error, StartError):
                raise StartError(f"no new process started, and {self._what_is_left()}: {error}") from error
            raise  # an exception of `check`
        return new

    def _what_is_left(self) -> str:
        dead = [rank for rank, process in self._processes.by_rank.items() if not process.is_alive]
        if not dead:
            return "nothing was changed"
        if len(dead) == len(self._processes.by_rank):
            return "all ranks have died; start new ones with %ddp_restart"
        return f"{name_ranks(dead)} {'has' if len(dead) == 1 else 'have'} died"

    def _end(self, leavers: Sequence[Process]) -> None:
        for host in dict.fromkeys(process.host for process in leavers if process.is_alive):
            with contextlib.suppress(HostError):  # the host is gone, and its processes too
                host.end([process.number for process in leavers if process.host is host], _GRACE_S)
        for process in leavers:
            self._spawner.shut_out(process)
            self._processes.all.pop(process.name, None)

    def _start_rank(self, rank: int, placement: Placement, kind: str = RANK) -> Process:
        process = self._spawner.start_rank(
            rank,
            self._hosts[placement.hosts[rank]],
            mark_token=self._mark_token,
            open_files=open_files.needed(placement.world_size),
            threads=placement.threads,
        )
        process.kind = kind
        return process
