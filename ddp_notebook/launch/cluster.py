"""The processes of one session: ranks, store and controller, on one or more hosts, and the wire to the ranks.

A process has a number that it keeps; its rank belongs to an epoch of the group, see `forming`.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ddp_notebook.errors import ClientError, HostError, StartError, StartTimeoutError
from ddp_notebook.launch import environment
from ddp_notebook.launch.engines import Engines
from ddp_notebook.launch.forming import Check, Forming
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.host.look import Seen
from ddp_notebook.launch.placement import Placement
from ddp_notebook.launch.process import CONTROLLER, RANK, STORE, Process, Processes, describe_status
from ddp_notebook.launch.ways.base import LOOPBACK
from ddp_notebook.records.words import name_ranks
from ddp_notebook.wire.bulk import BulkFetcher
from ddp_notebook.wire.endpoint import Endpoint
from ddp_notebook.wire.events import (
    Comm,
    Formed,
    Hello,
    Listening,
    Lost,
    Message,
    Ready,
    Registered,
    RunCell,
)
from ddp_notebook.wire.keys import Keyring

__all__ = ["Check", "Cluster", "Listener"]

_END_S = 5.0  # what ranks that were killed get to be gone


class Listener(Protocol):
    """Who is told what the ranks say. Called in I/O threads; must not block."""

    def on_message(self, rank: int, message: Message) -> None: ...
    def on_text(self, rank: int, fd: int, data: bytes) -> None: ...
    def on_ended(self, rank: int, status: int) -> None: ...
    def on_controller_ended(self) -> None: ...
    def on_gone(self) -> None: ...


class Cluster:
    """Starts and ends the processes of a session.

    Args:
        hosts: to start them on. The caller keeps them. The first one's directory holds the session's files.
        placement: which rank gets which device.
        env: the environment of the ranks.
        listener: who is told what the ranks say.
        guard: whether ranks compare what they call.
        overlay: of that, what was asked for: ranks of other machines have it on top of what is there.
        address: of this machine, at which they reach the notebook.
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
        address: str = LOOPBACK,
    ) -> None:
        self.mark_token = secrets.token_hex(8)
        self._hosts = {host.name: host for host in hosts}
        self._home = hosts[0]  # of what is not a rank's
        self._placement = placement
        self._env = environment.rank_env(env, threads=placement.threads)
        if placement.cuda_visible_devices is not None:
            self._env["CUDA_VISIBLE_DEVICES"] = placement.cuda_visible_devices
        self._overlay = dict(overlay or {})
        self._listener = listener
        self.directory = tempfile.mkdtemp(prefix="session-", dir=self._home.directory)
        self._processes = Processes()
        self._has_ended = False
        self._keyring = Keyring()
        self._endpoint = Endpoint.listen(self._keyring, self._on_message, host=address)
        wire, token = self._endpoint, self.mark_token
        self._forming = Forming(self._processes, hosts, placement, wire, store_prefix=token, guard=guard)
        self._bulk = BulkFetcher(self._endpoint.context, self._keyring, host=address)
        self._engines = Engines(
            self.directory, self._processes, partial(self._start_process, CONTROLLER, self._home), self.send
        )
        self._endpoint.start()
        for host in hosts:
            host.attach(partial(self._on_text, host), partial(self._on_ended, host), self._on_gone)

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
        for rank in range(self._placement.world_size):
            self._start_rank(rank)
        self._forming.wait_for("the processes to say hello", "Hello", deadline, check)
        report("processes")
        self._call_to_form()
        if not self._home.facts()["engines_wait"]:
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
        self._call_to_form()
        return self._forming.wait(deadline, check)

    def replace(self, ranks: list[int], deadline: float, check: Check = lambda: None) -> list[str]:
        """New processes for ranks that have died, and then the group of all. Returns what `form` does.

        Raises:
            StartError: it failed, and can be tried again: the new processes are gone.
            whatever `check` raises: the same holds.
        """
        for process in self._processes.by_rank.values():
            process.error = ""  # of a forming that failed
        try:
            if self._engines.have_had_controller:
                self.client_file()  # it knows the engines of those that have died
            for rank in ranks:
                self._start_rank(rank)
            self._forming.wait_for("the new processes to say hello", "Hello", deadline, check)
            self._call_to_form()
            self._engines.call(ranks)
            notes = self._forming.wait(deadline, check)
            self._forming.wait_for("the engines", "Ready", deadline, check)
            if self._engines.replace():
                self._forming.wait_for("the engines to register", "Registered", deadline, check, ranks)
        except BaseException as error:
            self._end_again(ranks)
            if isinstance(error, StartError | ClientError):
                raise StartError(f"no new process for {name_ranks(ranks)}: {error}") from error
            raise  # of `check`
        return notes

    def _end_again(self, ranks: list[int]) -> None:
        """End processes that were to replace others, at once."""
        try:
            self.signal([rank for rank in ranks if self.process(rank).is_alive], signal.SIGKILL)
        except HostError:  # the host server is gone, and they with it
            return
        with self._processes.changed:
            self._processes.changed.wait_for(lambda: not set(ranks) & set(self.alive), _END_S)

    def _start_rank(self, rank: int) -> None:
        host = self._hosts[self._placement.hosts[rank]]
        spec = {"mark_token": self.mark_token, "threads": self._placement.threads}
        self._processes.by_rank[rank] = self._start_process(RANK, host, spec, rank)

    def _call_to_form(self) -> None:
        """Tell every rank its place in the next epoch's group."""
        at = {"host": self._forming.address_of(self._home)}
        [*_, store] = self._processes.living(STORE) or [self._start_process(STORE, self._home, at)]
        self._forming.call(store)

    def _start_process(self, kind: str, host: Host, spec: dict[str, Any], rank: int = -1) -> Process:
        if self._has_ended:
            raise StartError("the session was stopped")
        process = Process(number=host.next_number(), kind=kind, host=host, rank=rank)
        self._processes.all[process.name] = process
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores others too
        everyone: dict[str, Any] = {"kind": kind, "cwd": host.folder or environment.working_directory()}
        here = {"env": self._env, "sys_path": path}
        everyone |= here if host.way.is_here else {"env": self._overlay, "threads": self._placement.threads}
        try:
            if kind == RANK:
                self._endpoint.expect(process.name)
                control, bulk = host.way.reach(self._endpoint.url), host.way.reach(self._bulk.url)
                address = self._keyring.invite(process.name, control=control, bulk=bulk)
                spec = {**spec, "process": process.number, "address": asdict(address)}
            reply = host.start(process.number, {**everyone, **spec})
        except HostError as error:
            del self._processes.all[process.name]  # it does not run: the next try needs another one
            kind_of_error = StartTimeoutError if isinstance(error, TimeoutError) else StartError
            raise kind_of_error(str(error)) from error
        process.pid = reply["pid"]
        process.port = reply.get("port", 0)
        return process

    # ---- the ranks

    @property
    def epoch(self) -> int:
        """Number of the group: raised each time it is called to form."""
        return self._forming.epoch

    @property
    def is_running(self) -> bool:
        """Whether the host servers live, and so the ranks that have not died by themselves."""
        return all(host.is_alive for host in self._hosts.values())

    def trouble(self) -> str:
        """Why a host server does not answer, in a sentence; "" if all do."""
        return next(filter(None, (host.trouble() for host in self._hosts.values())), "")

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has stopped a host server: no cell gets to its ranks then, and no text of them comes."""
        return any(host.is_stopped for host in self._hosts.values())

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
        """Send a message to a rank, from any thread."""
        self._endpoint.send(message, self.process(rank).name)

    def tell(self, message: RunCell | Comm, ranks: list[int]) -> None:
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

    def put(self, rank: int, data: bytes, check: Check) -> int:
        """Put bulk data into a rank. Returns the number of the transfer, for `Push` or `drop`."""
        return self._bulk.put(self.process(rank).name, data, check)

    def client_file(self) -> tuple[str, int]:
        """The connection file for `ipp.Client`, and the controller's process id. The controller is started at the first
        call, and one that is gone again in its old place.

        Raises:
            ClientError: it cannot be started.
        """
        if not self.is_here:
            raise ClientError(
                "session.client and %%px are there for ranks on the notebook's machine only; use session.run and "
                "%%on_all_ranks"
            )
        return self._engines.client_file()

    def pids(self, kind: str) -> list[int]:
        """Ids of the living processes of a kind: "rank" (in their order), "store" or "controller"."""
        # without those that are just being started: a signal to "0" would reach the caller and all around it
        return [process.pid for process in self._processes.living(kind) if process.pid]

    # ---- ending

    def stop(self, grace_s: float = 1.0) -> bool:
        """End every process and all below them. Whether that is done; if not, only the end of the host server helps."""
        self._has_ended = True
        left = []
        for host in self._hosts.values():
            those = [process for process in self._processes.all.values() if process.host is host]
            ranks = [process.number for process in those if process.kind == RANK]
            left += host.end_all(ranks, [process.number for process in those if process.kind != RANK], grace_s)
        self._bulk.close()
        self._endpoint.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        return not left

    # ---- I/O threads

    def _on_message(self, peer: str, epoch: int, message: Message) -> None:
        process = self._processes.all.get(peer)
        if process is None:
            return
        if isinstance(message, Hello | Formed | Ready | Registered):
            self._forming.on_said(process, message)
        elif isinstance(message, Listening):
            if epoch == self.epoch:
                self._forming.on_listening(process.rank, message.ports)
        else:
            self._listener.on_message(process.rank, message)

    def _on_text(self, host: Host, number: int, fd: int, data: bytes) -> None:
        process = self._processes.all.get(f"{host.name}/{number}")
        if process is None:
            return
        process.note_text(fd, data)
        if process.kind == RANK:
            self._listener.on_text(process.rank, fd, data)

    def _on_gone(self) -> None:
        with self._processes.changed:
            self._processes.changed.notify_all()
        self._listener.on_gone()

    def _on_ended(self, host: Host, number: int, status: int) -> None:
        process = self._processes.all.get(f"{host.name}/{number}")
        if process is None:
            return
        with self._processes.changed:
            process.status = status
            self._processes.changed.notify_all()
        if process.kind == RANK:
            if self._forming.has_started:
                why = f"rank {process.rank} died ({describe_status(status)}); %ddp_heal replaces it"
                for rank in self.alive:
                    self.send(rank, Lost(why=f"{why}, and until then the ranks cannot communicate"))
            self._listener.on_ended(process.rank, status)
        elif process.kind == CONTROLLER:
            self._listener.on_controller_ended()
