"""Unreachable hosts: when they are declared lost, the effect on their ranks, and new hosts for these."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ddp_notebook.errors import StartError
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.membership.rank_placement import HostCapacity, move
from ddp_notebook.launch.placement import Placement
from ddp_notebook.launch.process import RANK, Process, Processes
from ddp_notebook.records.words import list_ranks

_GIVE_UP_S = 5.0  # time limit from the end of a stream to its report

Again = Callable[[Host], Host | None]


class LostRanks:
    """Handles lost hosts and their ranks in one session.

    Args:
        hosts: of the session, by name. A new connection to a lost host replaces its entry.
        processes: of the session.
        again: makes a new connection to a lost host; returns None if it cannot be reached from this machine.
        attach: connects the reports of a new host to the session.
        shut_out: fences a process that may come back.
        overlay: variables of ranks on other machines, on top of the remote environment.
    """

    def __init__(
        self,
        hosts: dict[str, Host],
        processes: Processes,
        again: Again,
        attach: Callable[[Host], None],
        shut_out: Callable[[Process], None],
        overlay: Mapping[str, str],
    ) -> None:
        self._hosts = hosts
        self._processes = processes
        self._again = again
        self._attach = attach
        self._shut_out = shut_out
        self._overlay = overlay

    @property
    def home(self) -> Host:
        """Host of processes that are not ranks: the first host that was not lost."""
        hosts = list(self._hosts.values())
        return next((host for host in hosts if host.is_alive), hosts[0])

    def give_up(self, why: str, ranks: Sequence[int] | None) -> None:
        """Declare unreachable hosts of these ranks lost. Returns when their ranks are known to be dead.

        Args:
            why: the reason in words.
            ranks: only hosts of these ranks; None: all hosts, except those whose silence the user can end.
        """
        of_ranks = self._processes.by_host(self._processes.ranks if ranks is None else list(ranks))
        hosts = [host for host in of_ranks if host.is_unreachable and not (ranks is None and host.why_silent)]
        if len(hosts) == sum(host.is_alive for host in self._hosts.values()):
            return  # no host would be left, and these may come back
        for host in hosts:
            host.give_up(f"it had sent nothing for {host.silent_s:.0f} s when {why}")
        with self._processes.changed:
            self._processes.changed.wait_for(lambda: not any(self._living(host) for host in hosts), _GIVE_UP_S)

    def take(self, host: Host) -> list[int]:
        """Mark the processes of a host as lost and fence them, after its server or the connection to it has ended.

        Returns:
            The ranks among them.
        """
        living = self._living(host)
        with self._processes.changed:
            for process in living:
                process.lost = f"{host.name} was lost: {host.how_it_ended}"
            self._processes.changed.notify_all()
        for process in living:
            self._shut_out(process)
        return sorted(process.rank for process in living if process.kind == RANK)

    def _living(self, host: Host) -> list[Process]:
        return [process for process in self._processes.all.values() if process.host is host and process.is_alive]

    def place(
        self, placement: Placement, ranks: Sequence[int], deadline: float, check: Callable[[], None]
    ) -> Placement:
        """Return a placement for dead ranks.

        A rank stays on its host if that is alive. Else it moves to a host of the session with room. If there is none,
        this connects to the lost host again.

        Args:
            placement: the current one.
            ranks: the dead ranks.
            deadline: monotonic time limit for an answer of the lost host.
            check: called often during that wait; an exception from it ends the wait.

        Raises:
            StartError: no host has room, and the lost host does not answer.
        """
        lost = [rank for rank in ranks if not self._hosts[placement.hosts[rank]].is_alive]
        if not lost:
            return placement
        moved, left = move(placement, lost, self.rooms(placement))
        for name in left:
            self._reach_again(name, deadline, check)
        return moved

    def rooms(self, placement: Placement) -> dict[str, HostCapacity]:
        """Return the capacity of each reachable host, by name."""
        shown = placement.cuda_visible_devices
        env = dict(self._overlay) if shown is None else {**self._overlay, "CUDA_VISIBLE_DEVICES": shown}
        hosts = [host for host in self._hosts.values() if host.is_alive and not host.is_unreachable]
        return {host.name: HostCapacity.of(host.transport.machine, host.facts(), env) for host in hosts}

    def moved_in_words(self, were_on: Mapping[int, Host]) -> list[str]:
        """Describe the new hosts of ranks that were on these hosts."""
        moved: dict[str, list[int]] = {}
        for rank, host in were_on.items():
            if (now := self._processes.by_rank[rank].host) is not host:
                moved.setdefault(now.label, []).append(rank)
        return [
            f"{list_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} on {host} now" for host, ranks in moved.items()
        ]

    def _reach_again(self, name: str, deadline: float, check: Callable[[], None]) -> None:
        no_room = f"no other host has room for the ranks of {name}"
        host = self._again(self._hosts[name])
        if host is None:
            raise StartError(f"{no_room}, which was lost")
        self._hosts[name] = host
        self._attach(host)  # attach at once: if another host does not answer, this one stays connected
        try:
            host.facts(max(0.1, deadline - time.monotonic()), check)
        except StartError as error:
            host.close()
            raise StartError(f"{no_room}, and it does not answer: {error}; %ddp_heal tries again") from error
