"""A host server as its owner sees it: requests that are answered, text and deaths that are reported."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

from ddp_notebook.errors import StartError, StartTimeoutError
from ddp_notebook.launch import environment, framing, processes

_log = logging.getLogger(__name__)
_ROOT = str(Path(__file__).parents[2])  # where the package is importable from
TextCallback = Callable[[int, int, bytes], None]  # process, fd, bytes
EndedCallback = Callable[[int, int], None]  # process, exit status (negative: signal)


class HostGoneError(StartError):
    """The host server ended, and all it had started with it."""


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
        self._leaders: dict[int, int] = {}  # process -> pid, which leads an OS session
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
            f"import sys; sys.path.append({_ROOT!r}); from ddp_notebook.launch.host_server import main; "
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
    def is_alive(self) -> bool:
        return not self._gone.is_set()

    def facts(self, timeout_s: float = 120.0) -> dict[str, Any]:
        """Cores, GPUs, versions, backends and start method of the host. Waits for the server's imports."""
        if self._facts is None:
            self._facts = self.request("facts", timeout_s=timeout_s)
        return self._facts

    def request(self, op: str, *, timeout_s: float = 30.0, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its reply.

        Raises:
            HostGoneError: the server ended; the message holds its last words.
            StartTimeoutError: no reply within `timeout_s`.
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
        try:
            reply = future.result(timeout_s)
        except FutureTimeoutError:
            raise StartTimeoutError(
                f"the host server (pid {self.pid}) did not answer {op!r} in {timeout_s:g} s"
            ) from None
        if "error" in reply:
            raise StartError(f"the host server could not {op!r}: {reply['error']}")
        return reply

    def next_number(self) -> int:
        """A number for a new process; none is used twice."""
        return next(self._numbers)

    def hold_text(self, hold: bool) -> None:
        """Let text stay in the processes' pipes, or come again. Does not wait."""
        with self._lock, contextlib.suppress(OSError):
            self._control.sendall(framing.pack_command({"op": "hold", "id": 0, "hold": hold}))

    def tell(self, targets: list[int], data: bytes) -> None:
        """Put bytes into the inboxes of ranks. Does not wait for them."""
        with self._lock, contextlib.suppress(OSError):  # then the reader sees the end of the stream
            self._control.sendall(framing.pack_input(targets, data))

    def start(self, process: int, spec: dict[str, Any]) -> dict[str, Any]:
        """Start a rank, the store or the controller. The reply holds its pid."""
        reply = self.request("start", process=process, spec=spec)
        self._leaders[process] = reply["pid"]
        return reply

    def signal(self, targets: list[int], *numbers: int, value: int = 0) -> None:
        """Send signals to processes, in this order; they have them when this returns. `value` goes with `RELEASE`."""
        self.request("signal", processes=targets, signals=[int(number) for number in numbers], value=value)

    def end(self, targets: list[int], grace_s: float, *, orphans: bool = False) -> list[int]:
        """End processes and all below them: SIGTERM, then SIGKILL after `grace_s`.

        Args:
            targets: numbers of the processes.
            grace_s: seconds.
            orphans: also end descendants that have left their rank's process group and lost their parent.

        Returns:
            The ids of what could not be ended.
        """
        left: list[int] = self.request("end", processes=targets, grace_s=grace_s, orphans=orphans)["left"]
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
        if self._facts is None:
            self._server.kill()  # it imports, and has started nothing yet
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._server.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
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
        processes.end(processes.relatives(self.token, leaders.values()))
        shutil.rmtree(self.directory, ignore_errors=True)
