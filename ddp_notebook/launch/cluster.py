"""The processes of one session: ranks, store and controller, and the wire to the ranks.

A process has a number that it keeps; its rank belongs to an epoch of the group. Starting has two phases: every process
says hello, then each is told its place and joins the group of the first epoch.
"""

from __future__ import annotations

import re
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from ddp_notebook.errors import ClientError, StartError, StartTimeoutError
from ddp_notebook.launch import controller, environment, processes
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.placement import Placement
from ddp_notebook.records.words import name_ranks
from ddp_notebook.wire.bulk import BulkFetcher
from ddp_notebook.wire.endpoint import Endpoint
from ddp_notebook.wire.events import Comm, Engine, Form, Formed, Hello, Listening, Lost, Message, Peers, Ready, RunCell
from ddp_notebook.wire.keys import Keyring
from ddp_notebook.wire.marks import since_last_cell

Check = Callable[[], None]

_LOOK_S = 0.2  # between two looks whether a wait is to go on
_FORM_TIMEOUT_S = 10.0  # of a group that forms; more where many ranks do
_LAST_WORDS_BYTES = 16_000
_RANKS, _STORE, _CONTROLLER = "rank", "store", "controller"
_LOOPBACK = "127.0.0.1"
# faulthandler's lines from IPython's run_code on, and its list of extension modules
_BELOW_THE_CELL = re.compile(
    r'(  File "[^"]*interactiveshell\.py", line \d+ in run_code\n(  File .*\n|  \.\.\.\n)*)'
    r"|(Extension modules: .*\n?)"
)


@dataclass(slots=True)
class Process:
    """A process of the session."""

    number: int
    kind: str  # "rank", "store" or "controller"
    rank: int = -1
    pid: int = 0
    port: int = 0
    status: int | None = None  # exit status once it ended; negative: signal
    said: set[str] = field(default_factory=set)  # names of the messages of its start
    error: str = ""
    notes: list[str] = field(default_factory=list)  # what it said of the group that it has formed
    stack_file: str = ""  # where a rank writes its stacks when it is told to
    tails: dict[int, bytes] = field(default_factory=lambda: {1: b"", 2: b""})  # the end of what it wrote, by fd

    @property
    def is_alive(self) -> bool:
        return self.status is None

    @property
    def last_words(self) -> str:
        """What it wrote since its last cell, without what faulthandler says of frames below the cell."""
        words = "\n".join(tail.decode(errors="replace").strip() for tail in self.tails.values())
        return _BELOW_THE_CELL.sub("", words).strip()

    def note_text(self, fd: int, data: bytes) -> None:
        """Remember the end of what it wrote."""
        data, has_ended = since_last_cell(data)
        if has_ended:  # what came before the end of a cell is not its last word
            self.tails = {1: b"", 2: b""}
        self.tails[fd] = (self.tails[fd] + data)[-_LAST_WORDS_BYTES:]

    def how_it_ended(self) -> str:
        """In words, with what it wrote last."""
        words = self.last_words
        return describe_status(self.status) + (f"; its last words:\n{words}" if words else "")

    def tell_end(self) -> str:
        """As `how_it_ended`, but what it wrote last is told once: not again in the error of every later cell."""
        how = self.how_it_ended()
        self.forget_words()
        return how

    def forget_words(self) -> None:
        """What it wrote last has been told."""
        self.tails = {1: b"", 2: b""}


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
        host: the host server to start them with. The caller keeps it.
        placement: which rank gets which device.
        env: the environment of the ranks.
        listener: who is told what the ranks say.
        guard: whether ranks compare what they call.
    """

    def __init__(
        self, host: Host, placement: Placement, env: Mapping[str, str], listener: Listener, *, guard: bool = False
    ) -> None:
        self.epoch = 0
        self.mark_token = secrets.token_hex(8)
        self._host = host
        self._placement = placement
        self._env = environment.rank_env(env, threads=placement.threads)
        self._env[processes.TOKEN_VARIABLE] = host.token
        if placement.cuda_visible_devices is not None:
            self._env["CUDA_VISIBLE_DEVICES"] = placement.cuda_visible_devices
        self._listener = listener
        self._guard = guard
        self._gloo_ports: dict[int, list[int]] = {}  # that ranks listen on, while a group forms
        self.directory = tempfile.mkdtemp(prefix="session-", dir=host.directory)
        self._controller_spec = controller.make_spec(self.directory)
        self._processes: dict[int, Process] = {}
        self._ranks: dict[int, Process] = {}
        self._changed = threading.Condition()
        self._started = False
        self._has_ended = False
        self._is_formed = False
        self._keyring = Keyring()
        self._endpoint = Endpoint.listen(self._keyring, self._on_message)
        self._bulk = BulkFetcher(self._endpoint.context, self._keyring)
        self._endpoint.start()
        host.attach(self._on_text, self._on_ended, self._on_gone)

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
        self._start_process(_CONTROLLER, self._controller_spec)
        for rank in range(self._placement.world_size):
            self._start_rank(rank)
        self._wait("the processes to say hello", "Hello", deadline, check)
        report("processes")
        self._call_to_form()
        self._wait_for_controller(deadline, check)
        self._call_engines(self.ranks)
        self._wait_until_formed(deadline, check)
        report("group")
        self._wait("the engines", "Ready", deadline, check)
        report("engines")
        self._started = True

    def form(self, deadline: float, check: Check = lambda: None) -> list[str]:
        """Form the group anew, in the next epoch: same ranks, same sizes, every variable kept.

        A store that is gone is replaced first. Where `check` raises, it can be tried again.

        Returns:
            What the ranks could not have again, in words.
        """
        self._call_to_form()
        return self._wait_until_formed(deadline, check)

    def replace(self, ranks: list[int], deadline: float, check: Check = lambda: None) -> list[str]:
        """New processes for ranks that have died, and then the group of all. Returns what `form` does.

        Raises:
            StartError: it failed, and can be tried again: the new processes are gone.
            whatever `check` raises: the same holds.
        """
        for process in self._ranks.values():
            process.error = ""  # of a forming that failed
        try:
            self.client_file(check=check)  # a controller, for their engines
            for rank in ranks:
                self._start_rank(rank)
            self._wait("the new processes to say hello", "Hello", deadline, check)
            self._call_to_form()
            self._call_engines(ranks, replace=True)
            notes = self._wait_until_formed(deadline, check)
            self._wait("the engines", "Ready", deadline, check)
        except (StartError, ClientError) as error:
            self._end_again(ranks)
            raise StartError(f"no new process for {name_ranks(ranks)}: {error}") from error
        except BaseException:  # of `check`
            self._end_again(ranks)
            raise
        return notes

    def _end_again(self, ranks: list[int]) -> None:
        """End processes that were to replace others. At once: nobody wants their last words."""
        self._host.signal([self._ranks[rank].number for rank in ranks if self._ranks[rank].is_alive], signal.SIGKILL)
        self._wait_for_ends(ranks)

    def _wait_for_ends(self, ranks: list[int], timeout_s: float = 5.0) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not any(self._ranks[rank].is_alive for rank in ranks), timeout_s)

    def _start_rank(self, rank: int) -> None:
        spec = {"mark_token": self.mark_token, "threads": self._placement.threads}
        self._ranks[rank] = self._start_process(_RANKS, spec, rank)

    def _call_engines(self, ranks: list[int], *, replace: bool = False) -> None:
        connection_file = str(controller.connection_file(self.directory, "engine"))
        for rank in ranks:
            self.send(rank, Engine(connection_file=connection_file, engine_id=rank, replaces=replace))

    def _wait_until_formed(self, deadline: float, check: Check) -> list[str]:
        """Wait, then tell each rank on which ports gloo listens in the others."""
        self._wait("the group to form", "Formed", deadline, check)
        with self._changed:
            ports, self._gloo_ports = self._gloo_ports, {}
            self._is_formed = True
        for rank in self._ranks:
            others = [port for other, theirs in ports.items() if other != rank for port in theirs]
            self.send(rank, Peers(ports=others))
        notes = [note for process in self._ranks.values() for note in process.notes]
        return list(dict.fromkeys(notes))

    def _on_listening(self, rank: int, ports: list[int]) -> None:
        with self._changed:
            if not self._is_formed:
                self._gloo_ports.setdefault(rank, []).extend(ports)
                return
        for other in self.alive:
            if other != rank:
                self.send(other, Peers(ports=ports))

    def _call_to_form(self) -> None:
        """Tell every rank its place in the next epoch's group."""
        store = self._find(_STORE) or self._start_process(_STORE, {"host": _LOOPBACK})
        with self._changed:
            self._is_formed = False
            self._gloo_ports.clear()
        self.epoch += 1
        self._endpoint.epoch = self.epoch
        world_size = self._placement.world_size
        for rank, process in self._ranks.items():
            process.said.discard("Formed")
            process.error = ""
            process.notes = []
            self.send(
                rank,
                Form(
                    epoch=self.epoch,
                    rank=rank,
                    local_rank=rank,
                    world_size=world_size,
                    local_world_size=world_size,
                    group_rank=0,
                    backend=self._placement.backend,
                    device=self._placement.devices[rank],
                    store_host=_LOOPBACK,
                    store_port=store.port,
                    store_prefix=self.mark_token,
                    interface="lo0" if sys.platform == "darwin" else "lo",
                    form_timeout_s=max(_FORM_TIMEOUT_S, world_size / 2),
                    guard=self._guard,
                ),
            )

    def _start_process(self, kind: str, spec: dict[str, Any], rank: int = -1) -> Process:
        if self._has_ended:
            raise StartError("the session was stopped")
        number = self._host.next_number()
        process = self._processes[number] = Process(number=number, kind=kind, rank=rank)
        if kind == _RANKS:
            peer = self._peer(number)
            self._endpoint.expect(peer)
            address = self._keyring.invite(peer, control=self._endpoint.url, bulk=self._bulk.url)
            process.stack_file = f"{self.directory}/stack-{number}"
            spec = {**spec, "process": number, "address": asdict(address), "stack_file": process.stack_file}
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores others too
        everyone = {"kind": kind, "env": self._env, "cwd": environment.working_directory(), "sys_path": path}
        try:
            reply = self._host.start(number, {**everyone, **spec})
        except StartError:
            del self._processes[number]  # it does not run: the next try needs another one
            raise
        process.pid = reply["pid"]
        process.port = reply.get("port", 0)
        return process

    def _peer(self, number: int) -> str:
        return f"local/{number}"

    def _wait(self, stage: str, said: str, deadline: float, check: Check) -> None:
        """Wait until every rank has sent the message `said`."""
        with self._changed:
            while True:
                check()
                self._raise_failures(stage)
                missing = [rank for rank, process in self._ranks.items() if said not in process.said]
                if not missing:
                    return
                if time.monotonic() >= deadline:
                    raise StartTimeoutError(
                        f"this took too long: it was waiting for {stage}, and {name_ranks(missing)} did not answer. "
                        "Give it more time (--timeout, timeout_s), or look at the host's load and memory"
                    )
                self._changed.wait(max(0.0, min(_LOOK_S, deadline - time.monotonic())))

    def _raise_failures(self, stage: str) -> None:
        if not self._host.is_alive:
            raise StartError(f"the fork server ended while waiting for {stage}; try again with %ddp_start")
        if self._host.is_stopped:
            raise StartError(f"{self._host.trouble()} (it was waiting for {stage})")
        replaced = [p for p in self._processes.values() if p.kind == _RANKS and self._ranks.get(p.rank, p) is not p]
        for process in self._processes.values():
            if process in replaced:
                continue
            name = f"rank {process.rank}" if process.kind == _RANKS else f"the {process.kind}"
            if not process.is_alive and (process.kind == _RANKS or not self._started):
                raise StartError(f"{name} died while waiting for {stage}: {process.how_it_ended()}")
            if process.error:
                raise StartError(f"{name} failed while waiting for {stage}: {process.error}")

    def _wait_for_controller(self, deadline: float, check: Check) -> None:
        while not controller.is_up(self.directory):
            check()
            with self._changed:
                self._raise_failures("the controller")
            if time.monotonic() > deadline:
                raise StartTimeoutError("the start took too long: ipyparallel's controller did not come up")
            time.sleep(0.005)

    # ---- the ranks

    @property
    def is_running(self) -> bool:
        """Whether the host server lives, and so the ranks that have not died by themselves."""
        return self._host.is_alive

    def trouble(self) -> str:
        """Why the host server does not answer, in a sentence; "" if it does."""
        return self._host.trouble()

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has stopped the host server: no cell gets to the ranks then, and no text of them comes."""
        return self._host.is_stopped

    @property
    def ranks(self) -> list[int]:
        return sorted(self._ranks)

    def process(self, rank: int) -> Process:
        """The process that has this rank now."""
        return self._ranks[rank]

    @property
    def alive(self) -> list[int]:
        return [rank for rank in self.ranks if self._ranks[rank].is_alive]

    @property
    def gone(self) -> list[int]:
        """Ranks whose process has ended."""
        return [rank for rank in self.ranks if not self._ranks[rank].is_alive]

    def send(self, rank: int, message: Message) -> None:
        """Send a message to a rank, from any thread."""
        self._endpoint.send(message, self._peer(self._ranks[rank].number))

    def tell(self, message: RunCell | Comm, ranks: list[int]) -> None:
        """Put a message into inboxes of ranks; their main threads take it in this order, see `launch.host.pipes`."""
        [line] = message.encode()
        self._host.tell([self._ranks[rank].number for rank in ranks], line + b"\n")

    def signal(self, ranks: list[int], *numbers: int, value: int = 0) -> bool:
        """Send signals to ranks, in this order. They have them when this returns, also where the host server does not
        answer, which it tells by False. `value` goes with `RELEASE`."""
        return self._host.signal([self._ranks[rank].number for rank in ranks], *numbers, value=value)

    def silent_s(self, rank: int) -> float:
        """Seconds since the rank's agent was last heard."""
        return self._endpoint.silent_s(self._peer(self._ranks[rank].number))

    def hold_text(self, hold: bool) -> None:
        """Let text stay in the ranks' pipes, or come again."""
        self._host.hold_text(hold)

    def drop(self, rank: int, transfer: int) -> None:
        """Let a rank forget bulk data that is not wanted any longer. From any thread, and never waits."""
        self._bulk.drop(self._peer(self._ranks[rank].number), transfer)

    def fetch(self, rank: int, transfer: int, nbytes: int, check: Callable[[], None]) -> bytearray:
        """Fetch bulk data that a rank holds."""
        return self._bulk.fetch(self._peer(self._ranks[rank].number), transfer, nbytes, check)

    def put(self, rank: int, data: bytes, check: Callable[[], None]) -> int:
        """Put bulk data into a rank. Returns the number of the transfer, for `Push` or `drop`."""
        return self._bulk.put(self._peer(self._ranks[rank].number), data, check)

    # ---- ipyparallel

    def client_file(self, timeout_s: float = 20.0, check: Check = lambda: None) -> tuple[str, int]:
        """The connection file for `ipp.Client`, and the controller's process id. A controller that is gone is
        started again in its old place.

        Raises:
            ClientError: it does not come up.
        """
        try:
            running = self._find(_CONTROLLER)
            if running is None:
                running = self._start_process(_CONTROLLER, {**self._controller_spec, "restore": True})
            until = time.monotonic() + timeout_s
            while not controller.is_up(self.directory):
                check()
                if not running.is_alive or time.monotonic() > until:
                    raise StartError(
                        running.how_it_ended() if not running.is_alive else f"no answer in {timeout_s:g} s"
                    )
                time.sleep(0.01)
        except StartError as error:
            raise ClientError(
                f"ipyparallel's controller is gone and did not start again ({error}); cells go on without it, "
                "and %ddp_restart brings it back"
            ) from error
        return str(controller.connection_file(self.directory, "client")), running.pid

    def _find(self, kind: str) -> Process | None:
        living = [p for p in self._processes.values() if p.kind == kind and p.is_alive]
        return living[-1] if living else None

    def pids(self, kind: str) -> list[int]:
        """Ids of the living processes of a kind: "rank" (in their order), "store" or "controller"."""
        if kind == _RANKS:
            return [self._ranks[rank].pid for rank in self.alive]
        return [p.pid for p in self._processes.values() if p.kind == kind and p.is_alive]

    # ---- ending

    def stop(self, grace_s: float = 1.0) -> bool:
        """End every process and all below them. Whether that is done; if not, only the end of the host server helps."""
        self._has_ended = True
        left: list[int] = []
        self._host.resume()
        try:
            if self._host.trouble():
                raise StartError("it cannot end anything, and its own end is that of all")
            ranks = [p.number for p in self._processes.values() if p.kind == _RANKS]
            rest = [p.number for p in self._processes.values() if p.kind != _RANKS]
            left += self._host.end(ranks, grace_s, orphans=True) + self._host.end(rest, 0.0)
        except StartError:  # the host server is gone, and everything with it, or it does not answer
            left.append(self._host.pid)
        self._host.release()
        self._bulk.close()
        self._endpoint.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        return not left

    # ---- I/O threads

    def _on_message(self, peer: str, epoch: int, message: Message) -> None:
        process = self._processes.get(int(peer.rpartition("/")[2]))
        if process is None:
            return
        if isinstance(message, Hello | Formed | Ready):
            if isinstance(message, Formed) and message.epoch != self.epoch:
                return  # an answer to an earlier attempt
            with self._changed:
                process.said.add(type(message).__name__)
                if isinstance(message, Formed):
                    process.error, process.notes = message.error, message.notes
                self._changed.notify_all()
        elif isinstance(message, Listening):
            if epoch == self.epoch:
                self._on_listening(process.rank, message.ports)
        else:
            self._listener.on_message(process.rank, message)

    def _on_text(self, number: int, fd: int, data: bytes) -> None:
        process = self._processes.get(number)
        if process is None:
            return
        process.note_text(fd, data)
        if process.kind == _RANKS:
            self._listener.on_text(process.rank, fd, data)

    def _on_gone(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self._listener.on_gone()

    def _on_ended(self, number: int, status: int) -> None:
        process = self._processes.get(number)
        if process is None:
            return
        with self._changed:
            process.status = status
            self._changed.notify_all()
        if process.kind == _RANKS:
            if self._started:
                why = f"rank {process.rank} died ({describe_status(status)}); %ddp_heal replaces it"
                for rank in self.alive:
                    self.send(rank, Lost(why=f"{why}, and until then the ranks cannot communicate"))
            self._listener.on_ended(process.rank, status)
        elif process.kind == _CONTROLLER:
            self._listener.on_controller_ended()


def describe_status(status: int | None) -> str:
    """An exit status in words.

    Example:
        >>> describe_status(-9)
        'killed by SIGKILL'
    """
    if status is None:
        return "it runs"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
