"""This machine: the host server is a child of the notebook's process, and the stream to it is a socket pair.

Only with this transport, owner and server can check each other's processes, and share a directory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from ddp_notebook.launch import environment, processes
from ddp_notebook.launch.host.process_state import POLL_S, ProcessInspector
from ddp_notebook.launch.outbox import Outbox
from ddp_notebook.launch.transports import folders
from ddp_notebook.launch.transports.base import LOCAL, Transport, is_readable
from ddp_notebook.messages.hosts import Seen
from ddp_notebook.registry import modes
from ddp_notebook.wire import signals

_END_S = 5.0  # time for the server to end all its processes, before it is killed
_ENDS_S = 0.5  # from the end of the stream to the end of the process
_LAST_WORDS = 2000  # characters
_MOST_LOG_BYTES = 64 << 20
_ROOT = str(Path(__file__).parents[3])  # import path of the package


class LocalTransport(Transport):
    """A host server on this machine.

    Args:
        env: the environment to start it with.
        name: of the host in its session.
    """

    def __init__(self, env: Mapping[str, str], name: str = LOCAL) -> None:
        self.name = self.machine = name
        self.directory = folders.make("ddp_notebook-", is_guarded=False)  # the server removes both folders
        self.large_directory = folders.make("ddp_notebook-", is_large=True, is_guarded=False)
        self._log_file = Path(self.directory) / "host_server.log"  # empty in normal operation
        self._token = secrets.token_hex(16)
        self._import_time_env = environment.import_time(env)
        self._stream, theirs = socket.socketpair()
        self._outbox = Outbox(self._stream)
        with theirs:
            try:
                self._server, self._log = self._start(env, theirs.fileno())
            except BaseException:
                self._stream.close()
                self._remove_folders()
                raise

    def _start(self, env: Mapping[str, str], stream_fd: int) -> tuple[subprocess.Popen[bytes], BinaryIO]:
        owner_pid, owner_start = processes.identity(os.getpid())
        code = (
            f"import sys; sys.path.append({_ROOT!r}); from ddp_notebook.launch.transports.local import main; "
            f"main({stream_fd}, {owner_pid}, {owner_start!r}, {self.directory!r}, {self.large_directory!r})"
        )
        log = open(self._log_file, "w+b", buffering=0, opener=modes.opener)  # noqa: SIM115  # it is read though its folder was removed
        with signals.held_back():
            server = subprocess.Popen(
                # -P: a file in the user's directory must not shadow a module that is imported here
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=environment.working_directory(),
                env=environment.host_server_env(env, processes.TOKEN_VARIABLE, self._token),
                pass_fds=[stream_fd],
                start_new_session=True,  # an interrupt of the notebook is sent to its whole process group
            )
        return server, log

    # ---- the stream

    def send(self, data: bytes) -> None:
        self._outbox.send(data)

    def receive(self) -> bytes:
        try:
            return self._stream.recv(1 << 18)
        except OSError:
            return b""

    @property
    def has_unread(self) -> bool:
        return is_readable(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()
        self._log.close()

    # ---- the server's process

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def is_stopped(self) -> bool:
        return processes.is_stopped(self.pid)

    @property
    def held(self) -> str:
        return processes.held(self.pid)

    def resume(self) -> None:
        self._server.send_signal(signal.SIGCONT)

    def how_it_ended(self, given_up: str = "") -> str:
        if given_up:
            return given_up
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(timeout=_ENDS_S)
        status = self._server.poll()
        how = "" if status is None else f" with status {status}"
        try:
            words = os.pread(self._log.fileno(), _MOST_LOG_BYTES, 0).decode(errors="replace").strip()[-_LAST_WORDS:]
        except (OSError, ValueError):  # closed
            words = ""
        return f"the host server (pid {self.pid}) ended{how}" + (f"; its last words:\n{words}" if words else "")

    def fits(self, env: Mapping[str, str]) -> bool:
        """Return whether variables that torch or Python reads at import are the same. Forked ranks ignore later
        changes.
        """
        return environment.import_time(env) == self._import_time_env

    def end(self, *, at_once: bool = False) -> None:
        if at_once:
            self._server.kill()
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        try:
            self._server.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            below = processes.descendants(self.pid)[1:]  # before the kill: the process tree is still known
            self._server.kill()
            self._server.wait()
            processes.end(below)

    def sweep(self, leaders: Sequence[processes.Identity]) -> None:
        """End processes that have outlived a killed server, and remove the folders. Its children die with it;
        grandchildren may not.
        """
        processes.end(processes.relatives(self._token, [pid for pid, _ in leaders]))
        self._remove_folders()

    def _remove_folders(self) -> None:
        for folder in filter(None, (self.directory, self.large_directory)):
            folders.remove(folder)

    # ---- in place of a server that does not answer

    def signal(self, targets: Sequence[processes.Identity], numbers: Sequence[int], value: int) -> None:
        """Send signals to processes that still exist, by id and start time: their ids may have been reused."""
        for target in targets:
            if processes.is_running(target):
                with contextlib.suppress(OSError):  # continue with the next process, as the host server does
                    for number in numbers:
                        signals.send(target[0], number, value)

    def look(self, targets: Mapping[int, processes.Identity]) -> dict[int, Seen]:
        running = {process: who[0] for process, who in targets.items() if processes.is_running(who)}
        look = ProcessInspector(running, self.directory)
        while not look.is_done():
            time.sleep(POLL_S)
        return look.seen

    def files(self, directory: str, pattern: str) -> list[Path]:
        return list(Path(directory).glob(pattern))


def main(stream_fd: int, owner_pid: int, owner_start: float, directory: str, large_directory: str) -> None:
    """Run the host server: entry point of its process."""
    from ddp_notebook.launch.host import owner_channel, server

    owner = (owner_pid, owner_start)
    stream = owner_channel.ServerEnd.of(socket.socket(fileno=stream_fd))
    server.main(stream, lambda: processes.is_running(owner), directory, large_directory)
