"""The host server: one process per host that starts the ranks of that host, and ends with its owner.

It imports torch and the engine's modules, and nothing else happens in it: no tensor operation (one matmul on two
threads, and the first matmul of every forked rank hangs), no process group, no CUDA, no thread. Ranks forked from
it are ready in hundredths of a second and share its memory.

It is the ranks' parent. It reads the pipes behind their fd 1 and 2, so that the last words of a dying rank are
kept; it learns of a death at once; and when its owner is gone, by end of stream or by id and start time, it ends
everything below it.

    request                                        reply or event
    {"op": "facts"}                                cores, GPUs, versions, backends, how ranks are started
    {"op": "ping"}                                 {}
    {"op": "start", "process", "spec"}             {"pid", "started"}, the process's identity; for a store also {"port"}
    {"op": "signal", "processes", "signals",       {} once the signals are delivered, in this order; the value goes with
     "value"}                                      a real-time one
    {"op": "hold", "hold"}                         {}; text stays in the ranks' pipes while hold is true
    {"op": "end", "processes", "grace_s",          {"left": [pids]} once the processes and all below them are gone;
     "orphans"}                                    with orphans also those whose rank is not known any more
                                                   {"event": "ended", "process", "status"} after its last text

Besides, a frame of input puts a line into the inboxes of some ranks: a cell. It has no reply.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from ddp_notebook.launch import processes
from ddp_notebook.launch.host import child, framing, watchdog
from ddp_notebook.launch.host.pipes import Pipes
from ddp_notebook.launch.host.preload import preload, start_method
from ddp_notebook.wire import signals

_READ_BYTES = 1 << 16
_HIGH_WATER_BYTES = 4 << 20  # text waiting for the owner above which ranks have to wait with theirs
_OWNER_CHECK_S = 1.0
_END_CHECK_S = 0.01
_END_ALL_S = 4.0
_SWEEPS = 50  # at most so many looks for what a dead rank's descendants fork while they are killed


@dataclass(slots=True)
class Child:
    """A process that this server started."""

    process: int
    pid: int
    pipes: Pipes
    spawned: subprocess.Popen[bytes] | None = None


@dataclass(slots=True)
class Ending:
    """A request to end some children, under way."""

    request: int
    leaders: set[int]  # process ids, each leading an OS session
    members: list[psutil.Process] = field(default_factory=list)
    orphans: bool = False  # also what has left its leader's session and lost its parent
    kill_at: float = 0.0
    give_up_at: float = 0.0


class HostServer:
    """The server's loop. Single-threaded: a fork must copy no lock that another thread holds."""

    def __init__(
        self, control: socket.socket, owner: processes.Identity, facts: dict[str, Any], watchdog_pid: int
    ) -> None:
        self._control = control
        self._owner = owner
        self._watchdog_pid = watchdog_pid
        self._facts = facts
        self._unpacker = framing.Unpacker()
        self._out = bytearray()
        self._children: dict[int, Child] = {}  # by process id
        self._endings: list[Ending] = []
        self._serving = True
        self._reading_text = True
        self._owner_holds = False  # it has more text than it can show
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        control.setblocking(False)

    def serve(self) -> None:
        """Run until the owner closes the stream or is gone, then end every process below."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        next_owner_check = 0.0
        while self._serving:
            for key, events in self._selector.select(_END_CHECK_S if self._endings else _OWNER_CHECK_S):
                if key.fileobj is self._control:
                    if events & selectors.EVENT_WRITE:
                        self._flush()
                    if events & selectors.EVENT_READ:
                        self._read_control()
                elif key.fileobj == self._wake_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_r, 4096)
                    self._reap()
                elif isinstance(key.data, Child) and key.fd in key.data.pipes.outputs:
                    self._read_text(key.data, key.fd)
                elif isinstance(key.data, Child) and key.fd == key.data.pipes.inbox:
                    self._tell(key.data, b"")
            if self._out:
                self._flush()
            self._advance_endings()
            if time.monotonic() > next_owner_check:
                next_owner_check = time.monotonic() + _OWNER_CHECK_S
                self._serving &= processes.is_running(self._owner)
        until = time.monotonic() + _END_ALL_S
        while (left := processes.descendants(os.getpid())[1:]) and time.monotonic() < until:
            processes.end(left, deadline_s=1.0)  # again: what was forked meanwhile has come back to us

    # ---- the owner's side

    def _read_control(self) -> None:
        try:
            data = self._control.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._serving = False
            return
        for request in self._unpacker.feed(data):
            if isinstance(request, framing.Input):
                for known in self._children.values():
                    if known.process in request.processes:
                        self._tell(known, request.data)
                continue
            assert isinstance(request, dict), "the owner sends no text"
            try:
                reply = getattr(self, f"_on_{request['op']}")(request)
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            if reply is not None:
                self._say({"id": request["id"], **reply})

    def _say(self, command: dict[str, Any]) -> None:
        self._out += framing.pack_command(command)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                sent = self._control.send(memoryview(self._out)[: 1 << 20])
                del self._out[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._serving = False
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        self._selector.modify(self._control, wanted)
        self._hold_back_text(self._owner_holds or len(self._out) > _HIGH_WATER_BYTES)

    # ---- requests

    def _on_facts(self, _: dict[str, Any]) -> dict[str, Any]:
        return self._facts

    def _on_ping(self, _: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _on_start(self, request: dict[str, Any]) -> dict[str, Any]:
        spec, reply = request["spec"], {}
        listener = None
        if spec["kind"] == "store":
            listener = socket.create_server((spec["host"], 0), backlog=1024)
            spec["fd"], spec["port"] = listener.fileno(), listener.getsockname()[1]
            reply["port"] = spec["port"]
        try:
            started = (self._fork if self._facts["start_method"] == "fork" else self._spawn)(request["process"], spec)
        finally:
            if listener is not None:
                listener.close()
        self._children[started.pid] = started
        if self._reading_text:
            for pipe in started.pipes.outputs:
                self._selector.register(pipe, selectors.EVENT_READ, started)
        return {"pid": started.pid, "started": processes.identity(started.pid)[1], **reply}

    def _on_signal(self, request: dict[str, Any]) -> dict[str, Any]:
        for known in list(self._children.values()):
            if known.process in request["processes"]:
                with contextlib.suppress(ProcessLookupError):
                    for number in request["signals"]:
                        signals.send(known.pid, number, request["value"])
        return {}

    def _on_hold(self, request: dict[str, Any]) -> dict[str, Any]:
        self._owner_holds = request["hold"]
        return {}  # saying so applies it

    def _on_end(self, request: dict[str, Any]) -> None:
        ending = Ending(request["id"], {c.pid for c in self._children.values() if c.process in request["processes"]})
        for pid in ending.leaders:
            tree = processes.descendants(pid)
            ending.members += tree
            for process in tree[:1]:  # the leader alone gets the chance to end in order
                with contextlib.suppress(psutil.Error):
                    process.terminate()
        ending.orphans = request["orphans"]
        ending.kill_at = time.monotonic() + request["grace_s"]
        ending.give_up_at = ending.kill_at + 3.0
        self._endings.append(ending)

    def _advance_endings(self) -> None:
        for ending in list(self._endings):
            now = time.monotonic()
            self._reap()
            leaders_left = ending.leaders & self._children.keys()
            if leaders_left and now < ending.kill_at:
                continue
            # whoever was started meanwhile is found by the OS session that its leader led
            adopted = self._adopted() if ending.orphans else []
            alive = [p for p in {*ending.members, *self._of_sessions(ending.leaders), *adopted} if _alive(p)]
            for process in alive:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if (not alive and not leaders_left) or now > ending.give_up_at:
                self._endings.remove(ending)
                self._say({"id": ending.request, "left": [p.pid for p in alive]})

    # ---- children

    def _fork(self, process: int, spec: child.Spec) -> Child:
        pipes = Pipes(inbox=spec["kind"] == "rank")
        spec["inbox"] = pipes.inbox_of_child
        server = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError:
            pipes.close_near()
            pipes.close_far()
            raise
        if pid == 0:
            status = 1
            try:
                pipes.close_near()
                self._close_in_child()
                child.enter(spec, pipes.stdout, pipes.stderr, server)
                child.main(spec)
                status = 0
            except SystemExit as stop:
                status = stop.code if isinstance(stop.code, int) else 1
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(status)
        pipes.close_far()
        return Child(process, pid, pipes)

    def _spawn(self, process: int, spec: child.Spec) -> Child:
        pipes = Pipes(inbox=spec["kind"] == "rank")
        spec["inbox"] = pipes.inbox_of_child
        spec_r, spec_w = os.pipe()
        code = f"import sys; sys.path[:] = {sys.path!r}; from ddp_notebook.launch.host.child import spawned; "
        code += f"spawned({spec_r}, {os.getpid()})"
        spawned = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=pipes.stdout,
            stderr=pipes.stderr,
            env=spec["env"],
            cwd=spec["cwd"],
            pass_fds=[fd for fd in (spec_r, spec["inbox"], spec.get("fd")) if fd is not None],
            start_new_session=True,
        )
        os.close(spec_r)
        with os.fdopen(spec_w, "w") as pipe:
            json.dump(spec, pipe)
        pipes.close_far()
        return Child(process, spawned.pid, pipes, spawned)

    def _close_in_child(self) -> None:
        self._selector.close()
        self._control.close()
        for fd in (self._wake_r, self._wake_w):
            os.close(fd)
        for other in self._children.values():
            other.pipes.close_near()

    def _tell(self, known: Child, data: bytes) -> None:
        """Put bytes into a child's inbox; what it does not take now waits here."""
        inbox = known.pipes.inbox
        if inbox is None:
            return
        waits = inbox in self._selector.get_map()
        if known.pipes.tell(data) == waits:
            if waits:
                self._selector.unregister(inbox)
            else:
                self._selector.register(inbox, selectors.EVENT_WRITE, known)

    def _read_text(self, owner: Child, pipe: int) -> bool:
        """Pass on what a pipe holds. False when it is empty or at its end."""
        found = False
        for fd, data in owner.pipes.read(pipe):
            self._out += framing.pack_text(owner.process, fd, data)  # flushed once per round
            found = True
        for ended in list(owner.pipes.ended):
            self._close_pipe(owner, ended)
        return found

    def _close_pipe(self, owner: Child, pipe: int) -> None:
        if self._reading_text:
            self._selector.unregister(pipe)
        owner.pipes.close(pipe)

    def _hold_back_text(self, hold: bool) -> None:
        """Stop or resume reading the pipes: a flood waits in the rank that makes it, not in our memory."""
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
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            gone = self._children.get(pid)
            if gone is None:
                continue  # an orphan of a rank, which this server has adopted
            if gone.spawned is not None:
                gone.spawned.returncode = os.waitstatus_to_exitcode(status)
            for _ in range(_SWEEPS):  # what it leaves behind goes with it
                left = self._of_sessions({pid})
                if not left:
                    break
                for process in left:
                    with contextlib.suppress(psutil.Error):
                        process.kill()
            for pipe in list(gone.pipes.outputs):
                while self._read_text(gone, pipe):
                    pass
            for pipe in list(gone.pipes.outputs):  # a descendant may hold the other end open
                self._close_pipe(gone, pipe)
            if gone.pipes.inbox is not None and gone.pipes.inbox in self._selector.get_map():
                self._selector.unregister(gone.pipes.inbox)
            gone.pipes.close_inbox()
            del self._children[pid]
            self._say({"event": "ended", "process": gone.process, "status": os.waitstatus_to_exitcode(status)})

    def _adopted(self) -> list[psutil.Process]:
        """Descendants of ranks that are below this server because their parent ended."""
        ours = {*self._children, self._watchdog_pid}
        adopted = [p for p in psutil.Process().children() if p.pid not in ours]
        return [process for orphan in adopted for process in processes.descendants(orphan.pid)]

    def _of_sessions(self, leaders: set[int]) -> list[psutil.Process]:
        found = []
        for process in processes.descendants(os.getpid())[1:]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) in leaders and _alive(process):
                    found.append(process)
        return found


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


@contextlib.contextmanager
def _ending_with(owner: processes.Identity, directory: str) -> Iterator[None]:
    """Look every second whether the owner lives, while nothing else does. A timer: no thread may exist here."""

    def check(*_: object) -> None:
        if not processes.is_running(owner):
            shutil.rmtree(directory, ignore_errors=True)
            os._exit(1)

    signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, _OWNER_CHECK_S, _OWNER_CHECK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def main(control_fd: int, owner_pid: int, owner_start: float, directory: str) -> None:
    """Entry of the host server's process. `directory` holds the session's files and goes with it."""
    processes.adopt_orphans()
    owner = (owner_pid, owner_start)
    watchdog_pid = watchdog.start(owner, directory, control_fd)
    with _ending_with(owner, directory):
        facts = preload()
    facts["start_method"], facts["start_reason"] = start_method(os.environ.get("DDP_NOTEBOOK_START_METHOD", "fork"))
    gc.collect()
    gc.freeze()  # pages of these objects stay shared with the ranks
    HostServer(socket.socket(fileno=control_fd), owner, facts, watchdog_pid).serve()
    shutil.rmtree(directory, ignore_errors=True)
