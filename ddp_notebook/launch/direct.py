"""The cluster in the process that owns the hosts. It starts ranks, store and controller, and owns the wire."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from ddp_notebook.launch import processes
from ddp_notebook.launch.cluster import HANGS_S, Cluster, Listener, end_all
from ddp_notebook.launch.engines import Engines
from ddp_notebook.launch.forming import Check, Forming
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.host.owner.requests import Progress
from ddp_notebook.launch.membership.lost_hosts import Again, LostRanks
from ddp_notebook.launch.membership.members import Members, Renumbered
from ddp_notebook.launch.membership.rank_placement import resized
from ddp_notebook.launch.membership.spawner import Spawner
from ddp_notebook.launch.placement import Placement
from ddp_notebook.launch.process import CONTROLLER, LEAVER, NOTICE, RANK, STORE, Process
from ddp_notebook.launch.transports import folders
from ddp_notebook.launch.transports.ports import LOOPBACK_ONLY, Listening
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.hosts import Seen
from ddp_notebook.messages.processes import ControllerSpec
from ddp_notebook.messages.ranks import Formed, Hello, Lost, Ready, Registered
from ddp_notebook.records.words import list_ranks
from ddp_notebook.wire.bulk import BulkFetcher
from ddp_notebook.wire.endpoint import Endpoint
from ddp_notebook.wire.keys import Keyring
from ddp_notebook.wire.shared_memory import SealedMemory

_WIRE_ENDED = (
    "this notebook's thread ddp-wire, which receives messages of ranks, has ended. Text of cells still arrives, but "
    "displays and values do not; %ddp_restart starts new ranks"
)
_ANSWER_S = 1.5  # time for a round of the thread's loop after it was woken
_STUCK_S = 2.0  # without a round of the thread's loop, which takes a second at most


class DirectCluster(Cluster):
    """Starts and ends the processes of a session.

    Args:
        hosts: to start processes on. The caller owns them.
        placement: host and device of each rank.
        env: the environment of local ranks.
        listener: receives messages and events of the ranks.
        guard: whether ranks compare their calls.
        overlay: the requested variables only: ranks on other machines get them on top of the remote environment.
        at: local address and ports at which ranks reach the notebook.
        again: makes a new connection to a lost host, if possible.
        here: returns a local host server for the controller. Called when the controller is needed.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        placement: Placement,
        env: Mapping[str, str],
        listener: Listener,
        *,
        guard: bool = False,
        overlay: Mapping[str, str] | None = None,
        at: Listening = LOOPBACK_ONLY,
        again: Again = lambda _: None,
        here: Callable[[], Host],
    ) -> None:
        # A local host server removes these directories at its end. A remote host may be lost, and directories on it
        # too.
        transport = hosts[0].transport
        directory = folders.make("ddp_notebook-session-", transport.large_directory, is_large=True)
        super().__init__(secrets.token_hex(8), directory, {host.name: host for host in hosts})
        self._listener = listener
        self._small = folders.make("ddp_notebook-session-", transport.directory if transport.is_here else None)
        keyring, overlay = Keyring(), dict(overlay or {})
        self._endpoint = Endpoint.listen(keyring, self._on_message, bind=at.bind)
        self._wire_progress = Progress(lambda: self._endpoint.rounds)
        self._bulk = BulkFetcher(self._endpoint.context, keyring, at.bind)
        self._spawner = Spawner(self._processes, self._endpoint, self._bulk, keyring, placement, env, overlay)
        self._losses = LostRanks(self._hosts, self._processes, again, self._attach, self._spawner.shut_out, overlay)
        wire, token = self._endpoint, self.mark_token
        self._forming = Forming(self._processes, wire, len(hosts) == 1, at.ports, store_prefix=token, guard=guard)
        self._engines = Engines(self._small, at, self._processes, partial(self._start_controller, here), self.send)
        members = self._spawner, self._losses, self._forming, self._engines
        self._members = Members(self._processes, self._hosts, placement, *members, token)
        self._endpoint.start()
        for host in hosts:
            self._attach(host)

    def _start_controller(self, here: Callable[[], Host], spec: ControllerSpec) -> Process:
        self._attach(host := here())
        host.facts()  # wait for its imports
        return self._spawner.start(CONTROLLER, host, lambda _: spec)

    def _attach(self, host: Host) -> None:
        host.attach(partial(self._on_text, host), partial(self._on_ended, host), partial(self._on_gone, host))

    # ---- starting

    def start(
        self, deadline: float, report: Callable[[str], None] = lambda _: None, check: Check = lambda: None
    ) -> None:
        self._forming.start_timeout_s = deadline - time.monotonic()
        self._members.start()
        self._forming.wait_for("the processes to connect", "Hello", deadline, check)
        report("processes")
        self._members.call_to_form()
        if not self._losses.home.facts()["engines_wait"]:
            self.client_file()
        self._engines.call(self.ranks)
        self._forming.wait(deadline, check)
        report("group")
        self._forming.wait_for("the engines", "Ready", deadline, check)
        report("engines")
        self._forming.has_started = True

    def form(self, deadline: float, check: Check = lambda: None) -> list[str]:
        self._members.call_to_form()
        return self._forming.wait(deadline, check)

    def replace(self, ranks: list[int], deadline: float, check: Check = lambda: None) -> list[str]:
        return self._members.replace(ranks, deadline, check)

    def place(self, stay: Sequence[int], world_size: int, *, may_share: bool) -> Placement:
        return resized(self.placement, stay, world_size, self._losses.rooms(self.placement), may_share=may_share)

    def resize(
        self, stay: Sequence[int], placement: Placement, deadline: float, check: Check, renumbered: Renumbered
    ) -> list[str]:
        return self._members.resize(stay, placement, deadline, check, renumbered)

    def note_supplied(self) -> None:
        return

    # ---- the ranks

    @property
    def placement(self) -> Placement:
        return self._members.placement

    @property
    def epoch(self) -> int:
        return self._forming.epoch

    @property
    def is_running(self) -> bool:
        return any(host.is_alive for host in self._hosts.values())

    @property
    def unheard(self) -> dict[int, str]:
        if not any(host.is_unreachable for host in self._hosts.values()):  # the usual case, before each cell
            return {}
        processes = self._processes.by_rank.values()
        return {process.rank: why for process in processes if (why := process.host.unheard)}

    def give_up(self, why: str, ranks: Sequence[int] | None = None) -> None:
        self._losses.give_up(why, ranks)

    def trouble(self) -> str:
        if self._endpoint.has_ended:
            return _WIRE_ENDED
        if not self._endpoint.runs(_ANSWER_S):
            return self._wire_in_words(_ANSWER_S)
        return next(filter(None, (host.trouble() for host in self.hosts or self._hosts.values())), "")

    @property
    def is_stopped(self) -> bool:
        return any(host.is_stopped for host in self.hosts)

    def pulse(self) -> str:
        if self._endpoint.has_ended:
            return _WIRE_ENDED
        if why := self.cut_off(_STUCK_S):
            return why
        return next(filter(None, (host.pulse() for host in self.hosts)), "")

    def cut_off(self, after_s: float = HANGS_S) -> str:
        stuck_s = self._wire_progress.poll()
        return self._wire_in_words(stuck_s) if stuck_s > max(after_s, _STUCK_S) else ""

    def _wire_in_words(self, stuck_s: float) -> str:
        pid = os.getpid()
        held = f" ({why})" if (why := processes.held(pid)) else ""
        return (
            f"the thread ddp-wire of process {pid}, which receives messages of ranks, has not run for {stuck_s:.1f} s"
            f"{held}; nothing is lost if it continues; %ddp_restart starts new ranks"
        )

    def tell_what_is_slow(self, say: Callable[[str], object]) -> None:
        self._forming.on_slow = say

    def replace_stopped_store(self) -> None:
        self._members.end_stopped_store()

    @property
    def is_here(self) -> bool:
        return all(host.transport.is_here for host in self._hosts.values())

    def send(self, rank: int, message: Message) -> None:
        if (process := self._processes.by_rank.get(rank)) is not None:
            self._endpoint.send(message, process.name)

    def put_in_inboxes(self, message: Message, ranks: list[int]) -> None:
        [line] = message.encode()
        for host, those in self._processes.by_host(ranks).items():
            host.put_in_inboxes([process.number for process in those], line + b"\n")

    def signal(self, ranks: list[int], *numbers: int, value: int = 0) -> bool:
        targets = self._processes.by_host(ranks)
        return all([host.signal([p.number for p in those], *numbers, value=value) for host, those in targets.items()])

    def inspect(self, ranks: list[int]) -> dict[int, Seen]:
        seen: dict[int, Seen] = {}
        for host, those in self._processes.by_host(ranks).items():
            by_number = host.inspect([process.number for process in those])
            seen |= {process.rank: by_number[process.number] for process in those if process.number in by_number}
        return seen

    def files(self, pattern: str) -> list[Path]:
        return [file for host in self._hosts.values() for file in host.transport.files(self.directory, pattern)]

    def silent_s(self, rank: int) -> float:
        return self._endpoint.silent_s(self.process(rank).name)

    def hold_text(self, hold: bool) -> None:
        for host in self._hosts.values():
            host.hold_text(hold)

    def drop(self, rank: int, transfer: int) -> None:
        self._bulk.drop(self.process(rank).name, transfer)

    def fetch(self, rank: int, transfer: int, nbytes: int, check: Check) -> bytearray:
        return self._bulk.fetch(self.process(rank).name, transfer, nbytes, check)

    def put(self, rank: int, data: bytes | SealedMemory, check: Check) -> int:
        return self._bulk.put(self.process(rank).name, data, check)

    def client_file(self) -> tuple[str, int]:
        return self._engines.client_file()

    def check_registered(self) -> None:
        self._engines.check_registered()

    # ---- ending

    def stop(self, grace_s: float = 1.0) -> bool:
        self._spawner.has_ended = True
        left = end_all(self._processes, list(self._hosts.values()), grace_s)
        self._bulk.close()
        self._endpoint.close()
        folders.remove(self.directory)
        folders.remove(self._small)
        return not left

    # ---- I/O threads

    def _on_message(self, peer: str, _: int, message: Message) -> None:
        process = self._processes.all.get(peer)
        if process is None or process.lost or process.kind == LEAVER:
            return
        if isinstance(message, Hello | Formed | Ready | Registered):
            self._forming.on_said(process, message)
        elif process.kind == RANK:
            self._listener.on_message(process.rank, message)

    def _on_text(self, host: Host, number: int, fd: int, data: bytes) -> None:
        if (process := self._processes.all.get(f"{host.name}/{number}")) is None:
            return
        process.note_text(fd, data)
        if process.kind == RANK:
            self._listener.on_text(process.rank, fd, data)
        elif process.kind == STORE and fd == 2:
            for line in data.decode(errors="replace").splitlines():
                if line.startswith(NOTICE):
                    host.add_notice(line.removeprefix(NOTICE))

    def _on_gone(self, host: Host) -> None:
        if not self.is_running:
            self._listener.on_gone()
            return
        if lost := self._losses.take(host):
            self._tell_died(lost, self.process(lost[0]).how)
            for rank in lost:
                self._listener.on_ended(rank, self.process(rank).how)
        if host.transport.is_here:  # the local host server ran only the controller
            self._listener.on_controller_ended()

    def _on_ended(self, host: Host, number: int, status: int, why: str) -> None:
        if (process := self._processes.all.get(f"{host.name}/{number}")) is None:
            return
        with self._processes.changed:
            process.status, process.why = status, why
            self._processes.changed.notify_all()
        if process.kind == RANK:
            self._tell_died([process.rank], process.how)
            self._listener.on_ended(process.rank, process.how)
        elif process.kind == CONTROLLER:
            self._listener.on_controller_ended()

    def _tell_died(self, ranks: list[int], how: str) -> None:
        """Send the living ranks the reason why they cannot communicate."""
        if self._forming.has_started:
            why = f"{list_ranks(ranks)} died ({how}); %ddp_heal replaces {'it' if len(ranks) == 1 else 'them'}"
            for rank in self.alive:
                self.send(rank, Lost(why=f"{why}, and until then the ranks cannot communicate"))
