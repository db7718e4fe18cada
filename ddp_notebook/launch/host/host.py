"""A host server as its owner sees it: requests that are answered, text and deaths that are reported."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

from ddp_notebook.errors import StartError, StartTimeoutError
from ddp_notebook.launch import environment, processes
from ddp_notebook.launch.host import framing
from ddp_notebook.wire import signals

_log = logging.getLogger(__name__)
_ANSWER_S = 1.5  # what the server gets to answer what takes it a millisecond
_LOOK_S = 0.25  # whether it was stopped
_END_S = 8.0  # what it gets to end processes, beyond their grace
_ROOT = str(Path(__file__).parents[3])  # where the package is importable from
TextCallback = Callable[[int, int, bytes], None]  # process, fd, bytes
EndedCallback = Callable[[int, int], None]  # process, exit status (negative: signal)


class HostGoneError(StartError):
    """The host server ended, and all it had started with it."""


class HostSilentError(StartError):
    """The host server lives and does not answer: it was stopped, or hangs."""


class HostTimeoutError(HostSilentError, StartTimeoutError):
    """... and nobody knows why."""


class Host:
    """The host server of this machine: starts it, talks to it, and cleans up when it is gone.

    Args:
        env: the environment to start it with.

    The server starts in the background; `facts()` waits until it has imported torch. Callbacks run in this object's
    reader thread.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.token = secrets.token_hex(16)
        self.import_time_env = environment.import_time(env)
        self.directory = tempfile.mkdtemp(prefix="ddp_notebook-")  # mode 700
        self.release()
        self._leaders: dict[int, processes.Identity] = {}  # by process; each leads an OS session
        self._pending: dict[int, Future[dict[str, Any]]] = {}
        self._requests = 0
        self._lock = threading.Lock()
        self._gone = threading.Event()
        self._closing = False
        self._numbers = itertools.count()
        self._owner_pid = os.getpid()
        self._facts: dict[str, Any] | None = None
        ours, theirs = socket.socketpair()
        self._control = ours
        with theirs:
            self._server = self._launch(env, theirs)
        threading.Thread(target=self._read, name="ddp-host", daemon=True).start()

    def _launch(self, env: Mapping[str, str], control: socket.socket) -> subprocess.Popen[bytes]:
        owner_pid, owner_start = processes.identity(os.getpid())
        code = (
            f"import sys; sys.path.append({_ROOT!r}); from ddp_notebook.launch.host.server import main; "
            f"main({control.fileno()}, {owner_pid}, {owner_start!r}, {self.directory!r})"
        )
        with open(self.log_file, "wb") as log:
            return subprocess.Popen(
                # -P: a file of the user's directory must not shadow a module that is imported here
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=environment.working_directory(),
                env=environment.preloader_env(env, processes.TOKEN_VARIABLE, self.token),
                pass_fds=[control.fileno()],
                start_new_session=True,  # the notebook's interrupts go to its whole process group
            )

    @property
    def log_file(self) -> Path:
        """What the server itself writes: nothing, unless something is wrong."""
        return Path(self.directory) / "host_server.log"

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def stage(self) -> str:
        """That it is ready, and how it starts processes, in words. Its facts are known."""
        assert self._facts is not None
        is_forking = self._facts["start_method"] == "fork"
        return "fork server" if is_forking else f"ranks are spawned ({self._facts['start_reason']})"

    @property
    def is_alive(self) -> bool:
        return not self._gone.is_set()

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has stopped the server's process: then it answers nothing."""
        return self.is_alive and processes.is_stopped(self.pid)

    def trouble(self, timeout_s: float = _ANSWER_S) -> str:
        """Why the server does not answer, in a sentence; "" if it does.

        Args:
            timeout_s: what it gets to answer.
        """
        if not self.is_alive:
            return "the fork server ended, and all ranks with it; start afresh with %ddp_restart"
        try:
            self.request("ping", timeout_s=timeout_s)
        except HostGoneError:
            return self.trouble()
        except StartError as error:
            return str(error)
        return ""

    def resume(self) -> None:
        """Let a server go on that was stopped, so that it can end what it has started."""
        if self.is_stopped:
            self._server.send_signal(signal.SIGCONT)

    def facts(self, timeout_s: float = 120.0, check: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Cores, GPUs, versions, backends and start method of the host. Waits for the server's imports.

        Args:
            timeout_s: seconds.
            check: called often while it waits; what it raises ends the wait.
        """
        if self._facts is None:
            self._facts = self.request("facts", timeout_s=timeout_s, check=check)
        return self._facts

    def request(
        self, op: str, *, timeout_s: float = 30.0, check: Callable[[], None] = lambda: None, **arguments: Any
    ) -> dict[str, Any]:
        """Send a request and wait for its reply.

        Raises:
            HostGoneError: the server ended; the message holds its last words.
            HostSilentError: the server was stopped, or has not answered within `timeout_s`.
            StartError: the server could not do it.
        """
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            self._requests += 1
            number = self._requests
            command = framing.pack_command({"op": op, "id": number, **arguments})
            self._pending[number] = future
            if self._gone.is_set():
                self._fail_pending()
            else:
                with contextlib.suppress(OSError):  # then the reader sees the end of the stream
                    self._control.sendall(command)
        reply = self._wait_for(future, op, timeout_s, check)
        if "error" in reply:
            raise StartError(f"the host server could not {op!r}: {reply['error']}")
        return reply

    def _wait_for(
        self, reply: Future[dict[str, Any]], op: str, timeout_s: float, check: Callable[[], None]
    ) -> dict[str, Any]:
        until = time.monotonic() + timeout_s
        while True:
            try:
                return reply.result(max(0.0, min(_LOOK_S, until - time.monotonic())))
            except FutureTimeoutError:
                check()
            if self.is_stopped:
                raise HostSilentError(
                    f"the fork server (pid {self.pid}), through which the ranks get their cells, is stopped: "
                    f"kill -CONT {self.pid} lets it go on, and %ddp_restart starts all afresh"
                )
            if time.monotonic() > until:
                raise HostTimeoutError(
                    f"the fork server (pid {self.pid}) did not answer {op!r} in {timeout_s:g} s; %ddp_restart starts "
                    "all afresh"
                )

    def next_number(self) -> int:
        """A number for a new process; none is used twice."""
        return next(self._numbers)

    def _send(self, command: dict[str, Any]) -> None:
        """Send a request whose reply nobody waits for."""
        with self._lock, contextlib.suppress(OSError):  # then the reader sees the end of the stream
            self._control.sendall(framing.pack_command(command))

    def hold_text(self, hold: bool) -> None:
        """Let text stay in the processes' pipes, or come again. Does not wait."""
        self._send({"op": "hold", "id": 0, "hold": hold})

    def tell(self, targets: list[int], data: bytes) -> None:
        """Put bytes into the inboxes of ranks. Does not wait for them."""
        with self._lock, contextlib.suppress(OSError):  # then the reader sees the end of the stream
            self._control.sendall(framing.pack_input(targets, data))

    def start(self, process: int, spec: dict[str, Any]) -> dict[str, Any]:
        """Start a rank, the store or the controller. The reply holds its pid."""
        try:
            reply = self.request("start", process=process, spec=spec)
        except HostSilentError:  # should it start it later, nobody would own it
            self._send({"op": "end", "id": 0, "processes": [process], "grace_s": 0.0, "orphans": False})
            raise
        self._leaders[process] = (reply["pid"], reply["started"])
        return reply

    def signal(self, targets: list[int], *numbers: int, value: int = 0) -> bool:
        """Send signals to processes, in this order; they have them when this returns. `value` goes with `RELEASE`.

        Returns:
            Whether the server did it.

        Where the server does not answer this process sends them itself. (The server knows its children better: none of
        them can have ended and given its id to somebody else.)
        """
        if not self.is_stopped:
            with contextlib.suppress(HostSilentError):
                as_json = [int(number) for number in numbers]
                self.request("signal", timeout_s=_ANSWER_S, processes=targets, signals=as_json, value=value)
                return True
        for leader in [self._leaders[process] for process in targets if process in self._leaders]:
            if processes.is_running(leader):
                with contextlib.suppress(ProcessLookupError):
                    for number in numbers:
                        signals.send(leader[0], int(number), value)
        return False

    def end(self, targets: list[int], grace_s: float, *, orphans: bool = False) -> list[int]:
        """End processes and all below them: SIGTERM, then SIGKILL after `grace_s`.

        Args:
            targets: numbers of the processes.
            grace_s: seconds.
            orphans: also end descendants that have left their rank's process group and lost their parent.

        Returns:
            The ids of what could not be ended.
        """
        timeout_s = grace_s + _END_S
        reply = self.request("end", timeout_s=timeout_s, processes=targets, grace_s=grace_s, orphans=orphans)
        left: list[int] = reply["left"]
        return left

    def attach(self, on_text: TextCallback, on_ended: EndedCallback, on_gone: Callable[[], None]) -> None:
        """Report text, deaths and the server's own end to these."""
        self.on_text, self.on_ended, self.on_gone = on_text, on_ended, on_gone

    def release(self) -> None:
        """Report to nobody."""
        self.attach(lambda *_: None, lambda *_: None, lambda: None)

    def close(self) -> None:
        """End the server and everything below it, and remove its directory."""
        if os.getpid() != self._owner_pid:
            return  # a forked child of the notebook ends: the server is not its own
        self._closing = True
        self.resume()
        if self._facts is None:
            self._server.kill()  # it imports, and has started nothing yet
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._server.wait(timeout=5)
        except subprocess.TimeoutExpired:
            below = processes.descendants(self.pid)[1:]  # while it is known who they are
            self._server.kill()
            self._server.wait()
            processes.end(below)
        self._sweep()

    def _read(self) -> None:
        unpacker = framing.Unpacker()
        while True:
            try:
                data = self._control.recv(1 << 18)
            except OSError:
                data = b""
            if not data:
                break
            for frame in unpacker.feed(data):
                if isinstance(frame, tuple):
                    assert not isinstance(frame, framing.Input)
                    self._report(self.on_text, *frame)
                elif frame.get("event") == "ended":
                    self._leaders.pop(frame["process"], None)
                    self._report(self.on_ended, frame["process"], frame["status"])
                elif (future := self._pending.pop(frame.pop("id", 0), None)) is not None:
                    future.set_result(frame)
        with self._lock:
            self._gone.set()
            self._fail_pending()
        if not self._closing:
            self._server.wait()
            self._sweep()
            self._report(self.on_gone)
        self._control.close()

    def _report(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Call back. A failure there must not end the thread that hears of deaths."""
        try:
            callback(*arguments)
        except Exception:
            _log.exception("a report of the host server was lost: %.200r", arguments)

    def _fail_pending(self) -> None:
        for future in self._pending.values():
            future.set_exception(HostGoneError(self._last_words()))
        self._pending.clear()

    def _last_words(self) -> str:
        status = self._server.poll()
        how = "" if status is None else f" with status {status}"
        try:
            words = self.log_file.read_text(errors="replace").strip()[-2000:]
        except OSError:
            words = ""
        return f"the host server (pid {self.pid}) ended{how}" + (f"; its last words:\n{words}" if words else "")

    def _sweep(self) -> None:
        """End what a killed server could not end itself: its children die with it, theirs may not."""
        leaders, self._leaders = self._leaders, {}  # later their ids may be somebody else's
        processes.end(processes.relatives(self.token, [pid for pid, _ in leaders.values()]))
        shutil.rmtree(self.directory, ignore_errors=True)
