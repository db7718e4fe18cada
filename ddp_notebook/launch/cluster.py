"""The processes of one session: ranks, store and controller, on one or more hosts, and the wire to the ranks.

A process has a number that it keeps; its rank belongs to an epoch of the group, see `forming`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ddp_notebook.launch.engines import Engines
from ddp_notebook.launch.forming import Check, Forming
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.members.admission import Admission
from ddp_notebook.launch.members.ending import end_all
from ddp_notebook.launch.members.losses import Again, Losses
from ddp_notebook.launch.members.members import Members, Renumbered
from ddp_notebook.launch.members.moving import resized
from ddp_notebook.launch.placement import Placement
from ddp_notebook.launch.process import CONTROLLER, LEAVER, NOTICE, RANK, STORE, Process, Processes
from ddp_notebook.launch.ways import folders
from ddp_notebook.launch.ways.ports import LOOPBACK_ONLY, Listening
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.hosts import Seen
from ddp_notebook.messages.ranks import Formed, Hello, Lost, Ready, Registered
from ddp_notebook.records.words import list_ranks
from ddp_notebook.wire.bulk import BulkFetcher
from ddp_notebook.wire.endpoint import Endpoint
from ddp_notebook.wire.keys import Keyring
from ddp_notebook.wire.memory import Memory

__all__ = ["Check", "Cluster", "Listener"]
_WIRE_ENDED = (
    "this notebook's thread ddp-wire, which carries messages of ranks, has ended. Text of cells arrives, no display or "
    "value does; %ddp_restart starts new ranks"
)
HANGS_S = 5.0  # without an answer, until something that needs it is given up; a loaded machine is slow


class Listener(Protocol):
    """Who is told what the ranks say. Called in I/O threads; must not block."""

    def on_message(self, rank: int, message: Message) -> None: ...
    def on_text(self, rank: int, fd: int, data: bytes) -> None: ...
    def on_ended(self, rank: int, how: str) -> None: ...
    def on_controller_ended(self) -> None: ...
    def on_gone(self) -> None: ...


class Cluster:
    """Starts and ends the processes of a session.

    Args:
        hosts: to start them on. The caller keeps them.
        placement: which rank gets which device.
        env: the environment of the ranks.
        listener: who is told what the ranks say.
        guard: whether ranks compare what they call.
        overlay: of that, what was asked for: ranks of other machines have it on top of what is there.
        address: of this machine, at which they reach the notebook.
        again: makes a new connection to a host that was lost, if there is a way to it.
        here: gives a host server of this machine, for the controller. Called when that is asked for.

    Attributes:
        directory: of this machine, with the session's logs and profiles.
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
        self.mark_token = secrets.token_hex(8)
        self._hosts = {host.name: host for host in hosts}
        self._listener = listener
        # They go with the host server, if that is here. Others may be lost, and with them what is kept for them.
        way = hosts[0].way
        self.directory = folders.make("ddp_notebook-session-", way.large_directory, is_large=True)
        self._small = folders.make("ddp_notebook-session-", way.directory if way.is_here else None)
        self._processes = Processes()
        keyring, overlay = Keyring(), dict(overlay or {})
        self._endpoint = Endpoint.listen(keyring, self._on_message, bind=at.bind)
        self._bulk = BulkFetcher(self._endpoint.context, keyring, at.bind)
        self._admission = Admission(self._processes, self._endpoint, self._bulk, keyring, placement, env, overlay)
        self._losses = Losses(self._hosts, self._processes, again, self._attach, self._admission.shut_out, overlay)
        wire, token = self._endpoint, self.mark_token
        self._forming = Forming(self._processes, wire, len(hosts) == 1, at.ports, store_prefix=token, guard=guard)
        self._engines = Engines(self._small, at, self._processes, partial(self._start_controller, here), self.send)
        members = self._admission, self._losses, self._forming, self._engines
        self._members = Members(self._processes, self._hosts, placement, *members, token)
        self._endpoint.start()
        for host in hosts:
            self._attach(host)

    def _start_controller(self, here: Callable[[], Host], spec: dict[str, Any]) -> Process:
        self._attach(host := here())
        host.facts()  # waits for its imports
        return self._admission.start(CONTROLLER, host, spec)

    def _attach(self, host: Host) -> None:
        host.attach(partial(self._on_text, host), partial(self._on_ended, host), partial(self._on_gone, host))

    # ---- starting

    def start(
        self, deadline: float, report: Callable[[str], None] = lambda _: None, check: Check = lambda: None
    ) -> None:
        """Start all processes and wait until every rank can run a cell.

        Args:
            deadline: monotonic time by which it must be done.
            report: told the name of each stage that is done.
            check: called often while it waits; what it raises ends the wait.

        Raises:
            StartError: a process ended or could not do its part.
            StartTimeoutError: the deadline passed; names the stage and the ranks that it waits for.
        """
        self._forming.start_timeout_s = deadline - time.monotonic()
        self._members.start()
        self._forming.wait_for("the processes to say hello", "Hello", deadline, check)
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
        """Form the group anew, in the next epoch: same ranks, same sizes, every variable kept.

        A store that is gone is replaced first. Where `check` raises, it can be tried again.

        Returns:
            What the ranks could not have again, in words.
        """
        self._members.call_to_form()
        return self._forming.wait(deadline, check)

    def replace(self, ranks: list[int], deadline: float, check: Check = lambda: None) -> list[str]:
        """New processes for ranks that have died, and then the group of all. Ranks of a host that was lost get them
        elsewhere, see `Losses.place`. Returns where they went, and what `form` does.

        Raises:
            StartError: it failed, and can be tried again: the new processes are gone.
            whatever `check` raises: the same holds.
        """
        return self._members.replace(ranks, deadline, check)

    def place(self, stay: Sequence[int], world_size: int, *, may_share: bool) -> Placement:
        """Where ranks would be if there were as many as this, see `moving.resized`."""
        return resized(self.placement, stay, world_size, self._losses.rooms(self.placement), may_share=may_share)

    def resize(
        self, stay: Sequence[int], placement: Placement, deadline: float, check: Check, renumbered: Renumbered
    ) -> list[str]:
        """More or fewer ranks: these stay, with other numbers, new ones come, the others end. Returns what `form` does.

        Args:
            stay: ranks, in the order of their new numbers.
            placement: what `place` gave for them.
            renumbered: called when ranks have their new numbers, before any uses one.

        Raises:
            StartError: a process did not come up, and nothing was changed; or the group did not form.
            whatever `check` raises: the same holds.
        """
        return self._members.resize(stay, placement, deadline, check, renumbered)

    def note_supplied(self) -> None:
        """New ranks have got what they get: nobody who comes later has to be told that they lack it."""

    # ---- the ranks

    @property
    def placement(self) -> Placement:
        """Which rank is where now."""
        return self._members.placement

    @property
    def epoch(self) -> int:
        """Number of the group: raised each time it is called to form."""
        return self._forming.epoch

    @property
    def is_running(self) -> bool:
        """Whether a host server lives, and with it ranks that have not died by themselves. Those of a host that was
        lost are gone."""
        return any(host.is_alive for host in self._hosts.values())

    @property
    def hosts(self) -> list[Host]:
        """Those that were not lost."""
        return [host for host in self._hosts.values() if host.is_alive]

    @property
    def unheard(self) -> dict[int, str]:
        """Ranks whose host is not heard and may come back, each with what is said of it."""
        return self._losses.unheard

    def give_up(self, why: str, ranks: Sequence[int] | None = None) -> None:
        """Take unreachable hosts for lost; returns when it is known which ranks are gone. Not if no host were left.

        Args:
            why: in words: "somebody asked for it".
            ranks: only hosts of these; None: of all.
        """
        self._losses.give_up(why, self.ranks if ranks is None else ranks)

    def trouble(self) -> str:
        """Why a host server does not answer, in a sentence; "" if all do that were not lost."""
        if self._endpoint.has_ended:
            return _WIRE_ENDED
        return next(filter(None, (host.trouble() for host in self.hosts or self._hosts.values())), "")

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has stopped a host server: no cell gets to its ranks then, and no text of them comes."""
        return any(host.is_stopped for host in self.hosts)

    def stopped(self, ranks: Sequence[int] | None = None) -> list[Process]:
        """The processes of the session that are stopped (SIGSTOP, SIGTSTP), as their hosts have reported. Asks nobody.

        Args:
            ranks: without those of other ranks; None: all.
        """
        if not any(host.stopped for host in self.hosts):  # mostly
            return []
        processes = [process for process in self._processes.current if process.is_stopped]
        return [one for one in processes if one.kind != RANK or ranks is None or one.rank in ranks]

    def pulse(self) -> str:
        """Why a host server does not answer, as far as is known without a wait, see `Host.pulse`; "": all do."""
        if self._endpoint.has_ended:
            return _WIRE_ENDED
        return next(filter(None, (host.pulse() for host in self.hosts)), "")

    def cut_off(self, after_s: float = HANGS_S) -> str:
        """Why nothing gets to any rank, in a sentence; "" if the way to them is open.

        Args:
            after_s: seconds without an answer after which a process that is not stopped counts as hanging.
        """
        return ""

    def tell_what_is_slow(self, say: Callable[[str], object]) -> None:
        """Have this told in a sentence what a group that forms again waits for, where that takes long."""
        self._forming.on_slow = say

    def replace_stopped_store(self) -> None:
        """End a store that is stopped, so that ranks do not wait for it: the next group gets a new one."""
        self._members.end_stopped_store()

    @property
    def is_here(self) -> bool:
        """Whether all ranks are on the notebook's machine."""
        return all(host.way.is_here for host in self._hosts.values())

    @property
    def ranks(self) -> list[int]:
        return self._processes.ranks

    def process(self, rank: int) -> Process:
        """The process that has this rank now."""
        return self._processes.by_rank[rank]

    @property
    def alive(self) -> list[int]:
        """Ranks whose process lives."""
        return self._processes.alive

    @property
    def gone(self) -> list[int]:
        """Ranks whose process has ended."""
        return self._processes.gone

    def send(self, rank: int, message: Message) -> None:
        """Send a message to a rank, from any thread. One that is gone, or has left meanwhile, hears nothing."""
        if (process := self._processes.by_rank.get(rank)) is not None:
            self._endpoint.send(message, process.name)

    def tell(self, message: Message, ranks: list[int]) -> None:
        """Put a message into inboxes of ranks; their main threads take it in this order, see `launch.host.pipes`."""
        [line] = message.encode()
        for host, those in self._processes.by_host(ranks).items():
            host.tell([process.number for process in those], line + b"\n")

    def signal(self, ranks: list[int], *numbers: int, value: int = 0) -> bool:
        """Send signals to ranks, in this order. They have them when this returns, also where the host server does not
        answer, which it tells by False. `value` goes with `RELEASE`.

        Raises:
            HostError: a host server ended.
        """
        targets = self._processes.by_host(ranks)
        return all([host.signal([p.number for p in those], *numbers, value=value) for host, those in targets.items()])

    def look(self, ranks: list[int]) -> dict[int, Seen]:
        """What their hosts see of ranks that do not answer: whether each is stopped, and its stack.

        Raises:
            HostError: a host server ended.
        """
        seen: dict[int, Seen] = {}
        for host, those in self._processes.by_host(ranks).items():
            by_number = host.look([process.number for process in those])
            seen |= {process.rank: by_number[process.number] for process in those if process.number in by_number}
        return seen

    def files(self, pattern: str) -> list[Path]:
        """Files that ranks have written into the session's directory, as files of this machine.

        Args:
            pattern: of their names, as for `Path.glob`.
        """
        return [file for host in self._hosts.values() for file in host.way.files(self.directory, pattern)]

    def silent_s(self, rank: int) -> float:
        """Seconds since the rank's agent was last heard."""
        return self._endpoint.silent_s(self.process(rank).name)

    def hold_text(self, hold: bool) -> None:
        """Let text stay in the ranks' pipes, or come again."""
        for host in self._hosts.values():
            host.hold_text(hold)

    def drop(self, rank: int, transfer: int) -> None:
        """Let a rank forget bulk data that is not wanted any longer. From any thread, and never waits."""
        self._bulk.drop(self.process(rank).name, transfer)

    def fetch(self, rank: int, transfer: int, nbytes: int, check: Check) -> bytearray:
        """Fetch bulk data that a rank holds."""
        return self._bulk.fetch(self.process(rank).name, transfer, nbytes, check)

    def put(self, rank: int, data: bytes | Memory, check: Check) -> int:
        """Put bulk data into a rank. Returns the number of the transfer, for `Push` or `drop`."""
        return self._bulk.put(self.process(rank).name, data, check)

    def client_file(self) -> tuple[str, int]:
        """The connection file for `ipp.Client`, and the controller's process id. It is started at the first call, and
        one that is gone again in its old place.

        Raises:
            ClientError: it cannot be started, or not reached by a host.
        """
        return self._engines.client_file()

    def check_registered(self) -> None:
        """See `Engines.check_registered`."""
        self._engines.check_registered()

    def pids(self, kind: str) -> list[int]:
        """Ids of the living processes of a kind: "rank" (in their order), "store" or "controller"."""
        # without those that are just being started: a signal to "0" would reach the caller and all around it
        return [process.pid for process in self._processes.living(kind) if process.pid]

    # ---- ending

    def stop(self, grace_s: float = 1.0) -> bool:
        """End every process and all below them. Whether that is done; if not, only the end of the host server helps."""
        self._admission.has_ended = True
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
        if host.way.is_here:  # it had the controller alone
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
        """Let those that live know why they cannot communicate."""
        if self._forming.has_started:
            why = f"{list_ranks(ranks)} died ({how}); %ddp_heal replaces {'it' if len(ranks) == 1 else 'them'}"
            for rank in self.alive:
                self.send(rank, Lost(why=f"{why}, and until then the ranks cannot communicate"))
