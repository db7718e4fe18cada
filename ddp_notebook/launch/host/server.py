"""The host server: one process per host that starts the ranks of that host, and ends with its owner.

It imports torch and the modules of the engine, and nothing more. It runs no tensor operation: after one matmul on two
threads, the first matmul of every forked rank hangs. It has no process group, no CUDA context and no thread. Ranks
forked from it are ready in hundredths of a second and share its memory.

It is the parent of the ranks. It reads the pipes of their fd 1 and 2, so the last output of a dying rank is kept, and
notices a death at once. When the stream ends or the transport reports that the owner is gone, it ends every process
below it. The notebook sends it requests about processes of this host.

The messages of both sides are in `messages.hosts`. An input frame puts a line, which is a cell, into the inboxes of
some ranks. It has no reply.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import psutil

from ddp_notebook.launch import environment, processes
from ddp_notebook.launch.host import kill_causes, open_files, preflight_checks, termination, watchdog
from ddp_notebook.launch.host.files import Files
from ddp_notebook.launch.host.kill_causes import OomKills
from ddp_notebook.launch.host.owner_channel import ServerEnd
from ddp_notebook.launch.host.pipes import ChildPipes, TextBuffer
from ddp_notebook.launch.host.preflight_checks import Reach
from ddp_notebook.launch.host.preload import preload, start_method
from ddp_notebook.launch.host.process_state import POLL_S, ProcessInspector, pymp_folder, stack_file
from ddp_notebook.launch.host.spawn import Child, fork, spawn
from ddp_notebook.launch.transports.base import LOOPBACK
from ddp_notebook.launch.transports.ports import first_free
from ddp_notebook.messages import framing
from ddp_notebook.messages.dispatch import Table
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.hosts import (
    DoneReply,
    EndRequest,
    ErrorReply,
    FactsReply,
    FactsRequest,
    HoldTextRequest,
    LookRequest,
    Notice,
    PingRequest,
    ProcessEnded,
    ProcessStopped,
    SignalRequest,
    StartReply,
    StartRequest,
    TrialRequest,
)
from ddp_notebook.messages.processes import RankSpec, Start, StoreSpec
from ddp_notebook.records import shortages
from ddp_notebook.registry import private
from ddp_notebook.wire import signals
from ddp_notebook.wire.store import listen_here

_READ_BYTES = 1 << 16
_HIGH_WATER_BYTES = 512 << 10  # ranks block on output above this amount of unsent text
_CHUNK_BYTES = 64 << 10  # the server sends this much text, then checks for replies
_OWNER_CHECK_S = 1.0
_END_ALL_S = 3.0
_NO_PROCESS = -1
_OF_PROCESSES = (LookRequest, EndRequest)  # requests that use the spare descriptors
_TRIAL_BYTES = 1 << 16
_SPARE = 8  # file descriptors for inspecting and ending processes
_SWEEPS = 50  # number of searches for processes that a dead rank's descendants fork while they are killed


class Work(Protocol):
    """A request that takes several steps."""

    def advance(self) -> Message | None:
        """Take the next step without a wait. Returns the reply, or None if it is not finished."""


class HostServer:
    """The server's loop. Single-threaded: a fork must copy no lock that another thread holds."""

    def __init__(
        self,
        control: ServerEnd,
        owner_lives: Callable[[], bool],
        facts: dict[str, Any],
        directory: str,
        watchdog_pid: int,
        own_env: Mapping[str, str],
        start_watchdog: Callable[[Callable[[], None]], int],
        carrier: processes.Identity | None = None,
    ) -> None:
        self._control = control
        self._carrier = carrier
        self._owner_lives = owner_lives
        self._directory = directory
        self._watchdog_pid = watchdog_pid  # 0 if it has ended
        self._own_env = own_env
        self._start_watchdog = start_watchdog
        self._facts = facts
        self._unpacker = framing.Unpacker()
        self._files = Files()
        self._out = bytearray()  # frames that are being sent
        self._texts = TextBuffer()  # text to send after `_out`
        self._waits = False  # registered for the stream to become writable
        self._children: dict[int, Child] = {}  # by process id
        self._under_way: list[tuple[int, Work]] = []  # with the number of the request
        self._serving = True
        self._reading_text = True
        self._owner_holds = False  # the owner has more text than it can show
        self._selector = selectors.DefaultSelector()
        self._reach = Reach(self._selector)
        self._oom_kills = OomKills()
        self._spare = open_files.Spare(_SPARE)
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        self._requests: Table[Message | Work] = Table(
            {
                FactsRequest: self._facts_of,
                PingRequest: lambda _: DoneReply(),
                TrialRequest: self._try_start,
                StartRequest: self._start,
                SignalRequest: self._signal,
                LookRequest: self._inspect,
                HoldTextRequest: self._hold,
                EndRequest: self._end,
                **self._files.handlers,
                **self._reach.handlers,
                **preflight_checks.HANDLERS,
            }
        )

    def serve(self) -> None:
        """Run until the owner closes the stream or is gone, then end every process below."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self._selector.register(self._control.incoming, selectors.EVENT_READ, self._read_control)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        next_owner_check = 0.0
        while self._serving:
            for key, _ in self._selector.select(POLL_S if self._under_way else _OWNER_CHECK_S):
                if key.fileobj == self._wake_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_r, 4096)
                    self._reap()
                elif isinstance(key.data, Child) and key.fd in key.data.pipes.outputs:
                    self._read_text(key.data, key.fd)
                elif isinstance(key.data, Child) and key.fd == key.data.pipes.inbox:
                    self._put_in_inbox(key.data, b"")
                elif callable(key.data):
                    key.data()
            if self._out or self._texts:
                self._flush()
            self._advance()
            if time.monotonic() > next_owner_check:
                next_owner_check = time.monotonic() + _OWNER_CHECK_S
                with self._spare:
                    self._serving &= self._owner_lives()
                    self._keep_watchdog()
                    self._keep_carrier()
                    self._oom_kills.look()
        self._spare.close()
        self._files.discard()
        until = time.monotonic() + _END_ALL_S
        while (left := processes.descendants(os.getpid())[1:]) and time.monotonic() < until:
            # repeat: processes forked in the meantime are now children of this server
            processes.end(left, deadline_s=1.0)

    # ---- the owner's side

    def _read_control(self) -> None:
        try:
            data = self._control.read(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._serving = False
            return
        for request in self._unpacker.feed(data):
            if isinstance(request, framing.Input):
                for known in self._known(request.processes):
                    self._put_in_inbox(known, request.data)
                continue
            assert isinstance(request, framing.Numbered), "the owner sends no text"
            try:
                with self._spare if isinstance(request.message, _OF_PROCESSES) else contextlib.nullcontext():
                    reply = self._requests.handle(request.message)
            except Exception as error:
                reply = ErrorReply(error=_in_words(error))
            if isinstance(reply, Message):
                self._send(reply, request.number)
            else:
                self._under_way.append((request.number, reply))

    def _advance(self) -> None:
        if self._under_way:
            self._reap()
        for entry in list(self._under_way):
            number, work = entry
            with self._spare:
                reply = work.advance()
            if reply is not None:
                self._under_way.remove(entry)
                self._send(reply, number)

    def _send(self, message: Message, number: int = 0, *, after_text: bool = False) -> None:
        """Send a reply before waiting text, or an event of a process after all its text."""
        if after_text:
            self._out += self._texts.pack()
        self._out += framing.pack_message(message, number)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._out or self._texts:
                if not self._out:
                    self._out += self._texts.pack(_CHUNK_BYTES)
                sent = self._control.write(memoryview(self._out)[: 1 << 20])
                del self._out[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._serving = False
        has_more = bool(self._out or self._texts)
        if has_more and not self._waits:
            self._selector.register(self._control.outgoing, selectors.EVENT_WRITE, self._flush)
        elif self._waits and not has_more:
            self._selector.unregister(self._control.outgoing)
        self._waits = has_more
        self._hold_back_text(self._owner_holds or len(self._out) + self._texts.nbytes > _HIGH_WATER_BYTES)

    # ---- requests

    def _facts_of(self, _: FactsRequest) -> FactsReply:
        return FactsReply(facts=self._facts)

    def _try_start(self, request: TrialRequest) -> DoneReply:
        private.restore(self._directory)
        file = stack_file(self._directory, _NO_PROCESS)
        try:
            with open(file, "wb", buffering=0) as opened:
                opened.write(bytes(_TRIAL_BYTES))
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file)
        pipes: list[ChildPipes] = []
        try:
            pipes += (ChildPipes(inbox=True) for _ in range(request.ranks))
        finally:
            for each in pipes:
                each.close_near()
                each.close_far()
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return DoneReply()

    def _start(self, request: StartRequest) -> StartReply:
        process, start, port, store_at = request.process, self._completed(request.start), 0, ""
        listeners: list[socket.socket] = []
        if isinstance(spec := start.spec, RankSpec):
            private.restore(self._directory)
            open_files.allow(spec.open_files)  # the rank inherits this limit
            stacks, pymp = stack_file(self._directory, process), pymp_folder(self._directory, process)
            spec = replace(spec, directory=self._directory, stack_file=stacks, pymp_folder=pymp)
            start = replace(start, spec=spec)
        elif isinstance(spec, StoreSpec):
            listeners, store_at = self._listen(spec)
            for_users, for_ranks = listeners
            port = for_users.getsockname()[1]
            start = replace(start, spec=replace(spec, port=port, fd=for_users.fileno(), store_fd=for_ranks.fileno()))
        try:
            if self._facts["start_method"] == "fork":
                started = fork(process, start, self._close_in_child)
            else:
                started = spawn(process, start)
        finally:
            for listener in listeners:
                listener.close()
        self._children[started.pid] = started
        if self._reading_text:
            for pipe in started.pipes.outputs:
                self._selector.register(pipe, selectors.EVENT_READ, started)
        started_s = processes.identity(started.pid)[1]
        return StartReply(pid=started.pid, started=started_s, port=port, store_at=store_at)

    def _completed(self, start: Start) -> Start:
        """Return the `Start` with the environment, the folder and the `sys.path` of this host."""
        env, cwd = start.env, start.cwd
        if start.sys_path is None:  # the notebook is on another machine
            env = environment.rank_env({**self._own_env, **env}, threads=start.threads)
            cwd = cwd if os.path.isdir(cwd) else os.path.expanduser("~")
        env = {**env, processes.TOKEN_VARIABLE: os.environ.get(processes.TOKEN_VARIABLE, "")}
        return replace(start, env=env, cwd=cwd, sys_path=start.sys_path or ["", *sys.path])

    def _listen(self, spec: StoreSpec) -> tuple[list[socket.socket], str]:
        """Return the sockets of the store for the user's programs and of the session's store, and the address of the
        latter.
        """
        family = socket.AF_INET6 if ":" in spec.host else socket.AF_INET

        def listen() -> socket.socket:
            return first_free(
                lambda port: socket.create_server((spec.host, port), family=family, backlog=1024),
                spec.host,
                range(*spec.ports),
            )

        for_users = listen()
        if spec.key:
            for_ranks = listen()
            return [for_users, for_ranks], f"{spec.host}:{for_ranks.getsockname()[1]}"
        for_ranks, place = listen_here(self._directory)
        return [for_users, for_ranks], place.at

    def _signal(self, request: SignalRequest) -> DoneReply:
        for known in self._known(request.processes):
            with contextlib.suppress(OSError):  # continue with the next process
                for number in request.signals:
                    signals.send(known.pid, number, request.value)
        return DoneReply()

    def _inspect(self, request: LookRequest) -> Work:
        return ProcessInspector({known.process: known.pid for known in self._known(request.processes)}, self._directory)

    def _hold(self, request: HoldTextRequest) -> DoneReply:
        self._owner_holds = request.hold
        return DoneReply()  # sending the reply applies the setting

    def _end(self, request: EndRequest) -> Work:
        leaders = {known.pid for known in self._known(request.processes)}
        orphans = self._adopted if request.orphans else list
        return termination.Ending(leaders, request.grace_s, self._children.keys(), orphans)

    def _known(self, numbers: Sequence[int]) -> list[Child]:
        asked = set(numbers)
        return [known for known in self._children.values() if known.process in asked]

    # ---- children

    def _close_in_child(self) -> None:
        self._spare.close()
        self._selector.close()
        self._control.close()
        for fd in (self._wake_r, self._wake_w):
            os.close(fd)
        for other in self._children.values():
            other.pipes.close_near()

    def _put_in_inbox(self, known: Child, data: bytes) -> None:
        """Put bytes into a child's inbox. Bytes that do not fit are kept here."""
        inbox = known.pipes.inbox
        if inbox is None:
            return
        waited = known.pipes.waits
        if known.pipes.put_in_inbox(data) == waited:
            if waited:
                self._selector.unregister(inbox)
            else:
                self._selector.register(inbox, selectors.EVENT_WRITE, known)

    def _read_text(self, owner: Child, pipe: int) -> None:
        """Pass on the content of a pipe."""
        for fd, data in owner.pipes.read(pipe):
            self._texts.add(owner.process, fd, data)  # flushed once per round
        for ended in list(owner.pipes.ended):
            self._close_pipe(owner, ended)

    def _close_pipe(self, owner: Child, pipe: int) -> None:
        if self._reading_text:
            self._selector.unregister(pipe)
        owner.pipes.close(pipe)

    def _hold_back_text(self, hold: bool) -> None:
        """Stop or resume reading the pipes, so that a flood of output blocks the rank instead of filling this process's
        memory.
        """
        if hold != self._reading_text:
            return
        self._reading_text = not hold
        for known in self._children.values():
            for pipe in known.pipes.outputs:
                if hold:
                    self._selector.unregister(pipe)
                else:
                    self._selector.register(pipe, selectors.EVENT_READ, known)

    def _reap(self) -> None:
        while True:
            try:
                changed = os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOHANG | os.WNOWAIT)
                if changed is None:
                    return
                by_limit = ""
                if changed.si_code == os.CLD_KILLED:
                    by_limit = kill_causes.explain(changed.si_pid, -changed.si_status)
                pid, status = os.waitpid(changed.si_pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return
            if pid == 0:  # the process has just been continued
                continue
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                self._on_stopped(pid, os.WIFSTOPPED(status))
            elif pid == self._watchdog_pid:
                self._watchdog_pid = 0  # `_keep_watchdog` starts another one
            elif (gone := self._children.get(pid)) is not None:  # else an orphan of a rank, adopted by this server
                with self._spare:
                    self._on_ended(gone, os.waitstatus_to_exitcode(status), by_limit)

    def _on_stopped(self, pid: int, is_stopped: bool) -> None:
        """Report that a child was stopped (SIGSTOP, SIGTSTP) or continued (SIGCONT). A stopped watchdog is continued at
        once.
        """
        if (child := self._children.get(pid)) is not None:
            self._send(ProcessStopped(process=child.process, is_stopped=is_stopped))
        elif is_stopped and pid == self._watchdog_pid:
            os.kill(pid, signal.SIGCONT)
            self._send(Notice(text=f"{_watchdog(pid)} was stopped and has been resumed; nothing is lost"))

    def _keep_watchdog(self) -> None:
        if self._watchdog_pid == 0:
            with contextlib.suppress(OSError):  # no process can be created: try again at the next check
                self._watchdog_pid = self._start_watchdog(self._close_in_child)
                text = f"{_watchdog(self._watchdog_pid)} replaces one that had ended; nothing is lost"
                self._send(Notice(text=text))

    def _keep_carrier(self) -> None:
        """Continue a stopped parent on a remote host: without its heartbeats the notebook would lose the host."""
        if self._carrier is None or not processes.is_stopped_anywhere(self._carrier[0]):
            return
        pid = self._carrier[0]
        if processes.is_running(self._carrier):
            os.kill(pid, signal.SIGCONT)
            name = f"the parent of the host server on {socket.gethostname()} (process {pid})"
            text = (
                f"{name}, which keeps its connection to the notebook, was stopped and has been resumed; nothing is lost"
            )
            self._send(Notice(text=text))

    def _on_ended(self, gone: Child, status: int, by_limit: str) -> None:
        why = by_limit or (self._oom_kills.explain() if status == -signal.SIGKILL else "")
        if gone.spawned is not None:
            gone.spawned.returncode = status
        for _ in range(_SWEEPS):  # also end the descendants that it leaves
            left = [process for process in termination.of_sessions({gone.pid}) if not processes.tidies_up(process)]
            if not left:
                break
            processes.kill(left)
        for fd, data in gone.pipes.rest():
            self._texts.add(gone.process, fd, data)
        for pipe in list(gone.pipes.outputs):  # a descendant may hold the other end open
            self._close_pipe(gone, pipe)
        if gone.pipes.inbox is not None and gone.pipes.inbox in self._selector.get_map():
            self._selector.unregister(gone.pipes.inbox)
        gone.pipes.close_inbox()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(stack_file(self._directory, gone.process))
        shutil.rmtree(pymp_folder(self._directory, gone.process), ignore_errors=True)
        del self._children[gone.pid]
        self._send(ProcessEnded(process=gone.process, status=status, why=why), after_text=True)

    def _adopted(self) -> list[psutil.Process]:
        """Return descendants of ranks that became children of this server because their parent ended."""
        return termination.adopted({*self._children, self._watchdog_pid})


def _in_words(error: Exception) -> str:
    """Return the error in words, after the exhausted resource if there is one."""
    wanted, paths = shortages.kinds(error), shortages.places(error)
    found = shortages.sentences("the host server", wanted, paths=paths) if wanted else []
    return "; ".join([*found, f"{type(error).__name__}: {error}"])


def _watchdog(pid: int) -> str:
    return f"the watchdog of the host server (process {pid}), which ends the ranks if their owner dies,"


@contextlib.contextmanager
def _ending_with(owner_lives: Callable[[], bool], tidy_up: Callable[[], None]) -> Iterator[None]:
    """Check every second whether the owner is alive, by a timer, since no thread may exist here."""

    def check(*_: object) -> None:
        if not owner_lives():
            tidy_up()
            os._exit(1)

    signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, _OWNER_CHECK_S, _OWNER_CHECK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def main(
    control: ServerEnd,
    owner_lives: Callable[[], bool],
    directory: str,
    large_directory: str | None = None,
    *,
    address: str = LOOPBACK,
    own_env: Mapping[str, str] | None = None,
    carrier: processes.Identity | None = None,
) -> None:
    """Run the host server.

    Args:
        control: the stream to the owner, which sends the messages of `messages.hosts`.
        owner_lives: called every second, in this process and in the watchdog.
        directory: holds small files of the host's processes, and is removed with the server.
        large_directory: the same for large files of the notebook.
        address: address of this host for other hosts.
        own_env: base environment of ranks, if the notebook is on another machine.
        carrier: the parent process, which sends heartbeats or carries the stream, if the notebook is on another
            machine.
    """
    signals.ignore_strangers()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STRANGERS)
    processes.adopt_orphans()

    def tidy_up() -> None:
        for folder in filter(None, (directory, large_directory)):
            shutil.rmtree(folder, ignore_errors=True)

    start_watchdog = partial(watchdog.start, owner_lives, tidy_up)
    watchdog_pid = start_watchdog(control.close)
    gc.disable()  # imports leave little garbage, and collecting takes a fifth of their time
    with _ending_with(owner_lives, tidy_up):
        facts = preload()
    facts["start_method"], facts["start_reason"] = start_method(os.environ.get("DDP_NOTEBOOK_START_METHOD", "fork"))
    facts["address"] = address
    gc.freeze()  # pages of these objects stay shared with the ranks
    gc.enable()
    server = HostServer(control, owner_lives, facts, directory, watchdog_pid, own_env or {}, start_watchdog, carrier)
    server.serve()
    tidy_up()
