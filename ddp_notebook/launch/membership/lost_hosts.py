"""Hosts that are not heard any more: which are given up, what that means for their ranks, and where these go."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ddp_notebook.errors import StartError
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.membership.rank_placement import HostCapacity, move
from ddp_notebook.launch.placement import Placement
from ddp_notebook.launch.process import RANK, Process, Processes
from ddp_notebook.records.words import list_ranks

_GIVE_UP_S = 5.0  # from the end of a stream to when it was told

Again = Callable[[Host], Host | None]


class LostRanks:
    """Of one session.

    Args:
        hosts: of the session, by name. One that is reached again takes the place of the one that was lost.
        processes: of the session.
        again: makes a new connection to a host that was lost; None: there is no way to it from here.
        attach: has a host that is reached again report to the session.
        shut_out: has the wire forget a process that may come back.
        overlay: what ranks on other machines have on top of the environment that is there.
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
        """Of what is not a rank's: the first host that was not lost."""
        hosts = list(self._hosts.values())
        return next((host for host in hosts if host.is_alive), hosts[0])

    @property
    def unheard(self) -> dict[int, str]:
        """Ranks whose host is not heard and may come back, each with what is said of it."""
        if not any(host.is_unreachable for host in self._hosts.values()):  # mostly, before each cell
            return {}
        processes = self._processes.by_rank.values()
        return {process.rank: why for process in processes if (why := process.host.unheard)}

    def give_up(self, why: str, ranks: Sequence[int]) -> None:
        """Do not wait for hosts of these ranks that are unreachable. Returns when their ranks are known to be lost.

        Args:
            why: in words.
        """
        hosts = [host for host in self._processes.by_host(list(ranks)) if host.is_unreachable]
        if len(hosts) == sum(host.is_alive for host in self._hosts.values()):
            return  # nothing would be left, and they may come back
        for host in hosts:
            host.give_up(f"it had sent nothing for {host.silent_s:.0f} s when {why}")
        with self._processes.changed:
            self._processes.changed.wait_for(lambda: not any(self._living(host) for host in hosts), _GIVE_UP_S)

    def take(self, host: Host) -> list[int]:
        """A host's server, or the connection to it, has ended: its processes are gone, and if they come back they count
        for nothing. Returns its ranks."""
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
        """Where ranks that have died go: where they were, if their host is there; else to hosts of the session that
        have room; else to their host, if it answers again.

        Args:
            deadline: monotonic time by which it must have answered.
            check: called often while it waits for that; what it raises ends the wait.

        Raises:
            StartError: there is no room, and it does not answer.
        """
        lost = [rank for rank in ranks if not self._hosts[placement.hosts[rank]].is_alive]
        if not lost:
            return placement
        moved, left = move(placement, lost, self.rooms(placement))
        for name in left:
            self._reach_again(name, deadline, check)
        return moved

    def rooms(self, placement: Placement) -> dict[str, HostCapacity]:
        """What the hosts have that are there and heard, by name."""
        shown = placement.cuda_visible_devices
        env = dict(self._overlay) if shown is None else {**self._overlay, "CUDA_VISIBLE_DEVICES": shown}
        hosts = [host for host in self._hosts.values() if host.is_alive and not host.is_unreachable]
        return {host.name: HostCapacity.of(host.transport.machine, host.facts(), env) for host in hosts}

    def moved_in_words(self, were_on: Mapping[int, Host]) -> list[str]:
        """Where ranks are now that were on these hosts."""
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
        self._attach(host)  # at once: another one may not answer, and this one stays
        try:
            host.facts(max(0.1, deadline - time.monotonic()), check)
        except StartError as error:
            host.close()
            raise StartError(f"{no_room}, and it does not answer: {error}; %ddp_heal tries again") from error
