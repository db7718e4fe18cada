"""Another machine over ssh: the host server runs under one `ssh`, whose standard input and output are the stream.

ssh never asks for a password or an unknown host key: it fails with a message. The wire to the ranks uses the same
connection, through a forwarded port of the host. So the notebook may be behind a firewall, and listens on no network.

Both sides send a heartbeat each second. A host without a message for its lease ends all its processes. A notebook
without a message for the lease declares the host lost. On the host, `_stand_by` sends the heartbeats from the server's
parent, so they continue while the server imports torch or is stopped. The server itself uses the standard input and
output, so its parent writes heartbeats to standard error, which the notebook keeps in a file. They also report
whether the server is stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ddp_notebook.errors import HostError
from ddp_notebook.launch import processes
from ddp_notebook.launch.host import remote_server
from ddp_notebook.launch.host.owner_channel import ServerEnd
from ddp_notebook.launch.transports import folders, reconnecting, remote_python
from ddp_notebook.launch.transports.base import BEAT_S, LEASE_S, LOOPBACK, Transport, is_readable
from ddp_notebook.launch.transports.ssh_config import ssh_command
from ddp_notebook.messages.encoding import VERSION
from ddp_notebook.messages.first_messages import StartSshServer, from_line, to_line
from ddp_notebook.registry import modes, private
from ddp_notebook.wire import signals

_TABLES = "/proc/net/tcp", "/proc/net/tcp6"
_ESTABLISHED = "01"


def unacknowledged_bytes(connection: str) -> int | None:
    """Return the number of sent bytes that were not acknowledged; None if it is not known.

    Args:
        connection: value of SSH_CONNECTION: address and port of the client, then of the server.

    Source: proc_net_tcp.txt of Linux, https://docs.kernel.org/networking/proc_net_tcp.html: `tx_queue` of a connection.
    """
    words = connection.split()
    if len(words) != 4 or not (words[1].isdigit() and words[3].isdigit()):
        return None
    ends = f"{int(words[3]):04X}", f"{int(words[1]):04X}"
    for table in _TABLES:
        with contextlib.suppress(OSError), open(table) as lines:
            for line in lines:
                columns = line.split()
                its = columns[1].rpartition(":")[2], columns[2].rpartition(":")[2]
                if its == ends and columns[3] == _ESTABLISHED:
                    return int(columns[4].partition(":")[0], 16)
    return None


_BEATS = 5  # heartbeats per lease, at least
_END_S = 12.0  # time for the server to end its processes, before the connection is closed
_FORWARD_S = 10.0
_LOOK_S = 0.02
_BLOCKED_S = 1.0  # time for the link to accept a message that is being sent, before it is closed
_LAST_WORDS = 2000  # characters
_MOST_LOG_BYTES = 64 << 20
_MARK = b"\nddp_notebook speaks\n"  # output of a shell's start-up files comes before this mark
_BEAT = b"\0"  # heartbeat on standard error
_STOPPED = b"\1"  # follows a heartbeat while the host server is stopped
_GIVEN = "DDP_NOTEBOOK_GIVEN"
_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": "10",
    "ForwardX11": "no",
    "ControlPersist": "no",
    "RemoteCommand": "none",
}
_INSTALL = (
    "install them on that host (make dist in the repository builds a wheel for pip), or pass a Python with torch "
    "and ddp_notebook with --python"
)
_SSH_FAILED = 255  # exit status of ssh if ssh itself has failed
_FIXES = (
    ("Could not resolve hostname", "check the spelling of the name, and ~/.ssh/config"),
    (
        "has changed and you have requested strict checking",
        "its host key has changed; if you expect that, as after a new installation, remove the old key with the "
        "command that ssh {name} prints in a terminal, and connect again",
    ),
    ("Host key verification failed", "run ssh {name} once in a terminal and accept its host key"),
    ("Permission denied", "it asks for a password, which a notebook cannot type; set up a key: ssh-copy-id {name}"),
    (
        "No module named 'ddp_notebook.",
        "ddp_notebook is older there; install the notebook's version: {python} -m pip install",
    ),
    (
        "No module named",
        "install torch, ddp_notebook and its dependencies on that host, or pass another Python than {python} "
        "with --python",
    ),
    ("Connection refused", "no ssh server answers there"),
    ("timed out", "it does not answer; check that it is on and that this machine can reach it"),
)
_FIXES_OF_A_START = (  # causes before Python runs; later, the same words have another cause
    ("nknown option", "the Python there is older than 3.11; pass another one with --python"),
    ("not found", "pass the path of a Python with torch on that host: --python /path/to/python"),
    ("No such file", "pass the path of a Python with torch on that host: --python /path/to/python"),
)


class SshTransport(Transport):
    """A host server on a machine that `ssh` reaches.

    Args:
        destination: for ssh: a name of ~/.ssh/config, or user@host.
        python: the remote interpreter; None: see `remote_python.command`.
        env: variables on top of the host's environment.
        lease_s: seconds without a message until either side declares the other lost.
        lasts: use a stream that survives broken connections, see `reconnecting`.
    """

    is_here = False

    def __init__(
        self,
        destination: str,
        *,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        lease_s: float = LEASE_S,
        lasts: bool = False,
    ) -> None:
        self.name = self.machine = destination
        self.lease_s = lease_s
        self.beat_s = min(BEAT_S, lease_s / _BEATS)
        self._asked: dict[str, Any] = {"python": python, "env": env, "lease_s": lease_s, "lasts": lasts}
        self.directory = folders.make("ddp_notebook-")
        self._log_file = Path(self.directory) / "host_server.log"
        self._socket = os.path.join(self.directory, "ssh")  # control socket of the connection, for further requests
        self._ports: dict[int, int] = {}  # port of the notebook -> forwarded port on the host's loopback
        self._forwarding = threading.Lock()
        self._sending = threading.Lock()
        self._is_closed = False
        self._second: subprocess.Popen[bytes] | None = None  # second connection, only for further requests
        self._before_mark: bytearray | None = bytearray()
        self._heard_s = float("inf")
        self._hearing = threading.Lock()
        self._is_stopped = False  # according to the last heartbeat
        self._pid = 0
        command = remote_python.command(python, __name__)
        # longer than the package's own time limits
        patience = {"ServerAliveInterval": f"{lease_s:.0f}", "ServerAliveCountMax": "3"}
        if lasts:
            carrier = [*ssh_command(), "-T", "-S", "none", *_words(_OPTIONS), "--", destination]
            patience["ProxyCommand"] = reconnecting.proxy_command(carrier, python, secrets.token_hex(16), lease_s)
        options = _words(_OPTIONS | patience)
        try:
            with open(self._log_file, "wb", opener=modes.opener) as log, signals.held_back():
                self._ssh = subprocess.Popen(
                    [*ssh_command(), "-T", *options, "-M", "-S", self._socket, "--", destination, command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,  # an interrupt of the notebook is sent to its whole process group
                )
            self._log = open(self._log_file, "rb", buffering=0)  # noqa: SIM115
        except OSError as error:
            folders.remove(self.directory)
            raise HostError(f"ssh cannot be run: {error}; install it, or set DDP_NOTEBOOK_SSH") from error
        with contextlib.suppress(OSError):  # then `receive` returns the end of the stream
            self.send(to_line(StartSshServer(wire=VERSION, env=dict(env or {}), lease_s=lease_s)))

    # ---- the stream

    def send(self, data: bytes) -> None:
        with self._sending:
            if self._is_closed:
                raise OSError("the stream was closed")
            assert self._ssh.stdin is not None
            _write(self._ssh.stdin.fileno(), data)

    def _hang_up(self) -> None:
        """Close the stream, so that the host notices its end."""
        if not self._sending.acquire(timeout=_BLOCKED_S):
            self._ssh.kill()  # the link accepts no data: make the blocked send fail; `held_back` blocks SIGTERM in ssh
            self._sending.acquire()
        self._is_closed = True
        self._sending.release()
        assert self._ssh.stdin is not None
        with contextlib.suppress(OSError):
            self._ssh.stdin.close()

    def receive(self) -> bytes:
        while data := self._read():
            if self._before_mark is not None:
                self._before_mark += data
                _, mark, rest = bytes(self._before_mark).partition(_MARK)
                pid, newline, data = rest.partition(b"\n")
                if not (mark and newline):
                    continue
                self._pid, self._before_mark = int(pid), None
            self._heard_s = time.monotonic()
            if data:
                return data
        return b""

    @property
    def has_unread(self) -> bool:
        assert self._ssh.stdout is not None
        return not self._ssh.stdout.closed and is_readable(self._ssh.stdout.fileno())

    @property
    def silent_s(self) -> float:
        self._read_beats()
        return max(0.0, time.monotonic() - self._heard_s)

    @property
    def is_stopped(self) -> bool:
        self._read_beats()
        return self._is_stopped

    def _read_beats(self) -> None:
        with self._hearing, contextlib.suppress(OSError, ValueError):  # the log is closed
            _, beat, after = self._log.read().rpartition(_BEAT)
            if beat:
                self._heard_s = time.monotonic()
                self._is_stopped = after.startswith(_STOPPED)

    def again(self) -> SshTransport:
        return SshTransport(self.name, **self._asked)

    def _read(self) -> bytes:
        assert self._ssh.stdout is not None
        try:
            return os.read(self._ssh.stdout.fileno(), remote_server.READ_BYTES)
        except OSError:
            return b""

    def close(self) -> None:
        self._hang_up()
        assert self._ssh.stdout is not None
        self._ssh.stdout.close()
        self._log.close()

    # ---- the notebook's ports, as the host reaches them

    def reach(self, url: str) -> str:
        port = urlsplit(url).port
        assert port is not None
        with self._forwarding:
            if port not in self._ports:
                self._ports[port] = self._forward(port)
            return f"tcp://{LOOPBACK}:{self._ports[port]}"

    def unreach(self) -> None:
        with self._forwarding:
            for port in self._ports:
                # the connection is broken, and its ports with it
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    self._ask("cancel", port)
            self._ports.clear()

    def _forward(self, port: int) -> int:
        """Forward a port of the host's loopback to a local port. Returns its number."""
        try:
            done = self._ask("forward", port)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise HostError(f"ssh cannot forward a port of {self.name}: {error}") from error
        if done.returncode != 0 or not done.stdout.strip().isdigit():
            raise HostError(
                f"ssh cannot forward a port of {self.name}: {done.stderr.strip()}; its ssh server must allow it "
                "(AllowTcpForwarding)"
            )
        return int(done.stdout)

    def _ask(self, what: str, port: int) -> subprocess.CompletedProcess[str]:
        """Send the connection a request for a forwarded port ("forward"), or for its end ("cancel")."""
        self._restore_socket()
        # With the address: otherwise sshd chooses a port that is free on ::1 but may be in use on 127.0.0.1.
        ports = f"{LOOPBACK}:0:{LOOPBACK}:{port}"
        command = [*ssh_command(), "-S", self._socket, "-O", what, "-R", ports, "--", self.name]
        return subprocess.run(command, capture_output=True, text=True, timeout=_FORWARD_S, stdin=subprocess.DEVNULL)

    def _restore_socket(self) -> None:
        """Open a second connection for further requests if the control socket of the first was removed."""
        if os.path.exists(self._socket):
            return
        if self._second is not None:
            self._second.kill()
            self._second.wait()
        private.restore(self.directory)
        with signals.held_back():
            self._second = subprocess.Popen(
                [*ssh_command(), "-T", "-N", *_words(_OPTIONS), "-M", "-S", self._socket, "--", self.name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        until = time.monotonic() + _FORWARD_S
        while not os.path.exists(self._socket) and self._second.poll() is None and time.monotonic() < until:
            time.sleep(_LOOK_S)

    # ---- the server's process

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def why_silent(self) -> str:
        # Below ssh are the processes of `reconnecting`. Several may be stopped, such as all of a process group.
        stopped = [one.pid for one in processes.descendants(self._ssh.pid) if processes.is_stopped_anywhere(one.pid)]
        if not stopped:
            return ""
        pids = " ".join(map(str, stopped))
        if len(stopped) == 1:
            return f"its ssh (process {pids}) is stopped, and kill -CONT {pids} resumes it"
        return f"processes of its ssh are stopped, and kill -CONT {pids} resumes them"

    def how_it_ended(self, given_up: str = "") -> str:
        """Describe the end, with the messages of ssh and a remedy."""
        if given_up:
            return given_up
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._ssh.wait(timeout=1.0)
        try:
            # the file may have been removed
            words = os.pread(self._log.fileno(), _MOST_LOG_BYTES, 0).decode(errors="replace")
            words = words.replace(_BEAT.decode(), "").replace(_STOPPED.decode(), "").strip()[-_LAST_WORDS:]
        except (OSError, ValueError):  # closed
            words = ""
        if self._pid == 0 and (lacking := remote_python.lacking(words)):
            return f"no host server on {self.name}: reached, but {lacking}; {_INSTALL}"
        fixes = _FIXES if self._pid else (*_FIXES, *_FIXES_OF_A_START)
        text, fix = next(((text, fix) for text, fix in fixes if text in words), ("", ""))
        fix = fix.format(name=self.name, python=self._asked["python"] or "python3")
        if self._pid == 0 or fix:
            says = [line.strip() for line in words.splitlines() if text in line]
            status = self._ssh.poll()
            last = says[-1].rstrip(".") if says else f"ssh ended with status {status}"
            # ssh passes on the status of the remote command; its own is 255.
            reached = "reached, but " if self._pid == 0 and status is not None and 0 <= status < _SSH_FAILED else ""
            return f"no host server on {self.name}: {reached}{last}" + (f"; {fix}" if fix else "")
        last_words = f"; its last words:\n{words}" if words else ""
        return f"the host server on {self.name} ended, or the connection to it{last_words}"

    def end(self, *, at_once: bool = False) -> None:
        if at_once:
            self._ssh.kill()
        self._hang_up()
        try:
            self._ssh.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._ssh.kill()
            self._ssh.wait()

    def sweep(self, leaders: Sequence[processes.Identity]) -> None:
        """Remove local files. The host's processes cannot be reached; they end with their server or its lease."""
        if self._second is not None:
            self._second.kill()
            self._second.wait()
        folders.remove(self.directory)

    def files(self, directory: str, pattern: str) -> list[Path]:
        return []


def _words(options: Mapping[str, str]) -> list[str]:
    """Return options as arguments of ssh."""
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


# ---- on the host


def main() -> None:
    """Entry point of the remote command: fork the host server, which gets the stream, and send heartbeats for it."""
    try:
        given = from_line(os.environ.get(_GIVEN, "") or _first_line(), StartSshServer)
    except ValueError as error:
        raise SystemExit(f"ddp_notebook in {sys.prefix}: {error}") from None
    remote_server.settle_environment(given.env, {_GIVEN: to_line(given).decode()})
    os.environ.pop(_GIVEN, None)
    address = os.environ.get("SSH_CONNECTION", "").split(" ")[2:3]  # address and port of the client, then of the server
    stream = ServerEnd(os.dup(0), os.dup(1))
    server_pid = remote_server.start_server(
        given.env,
        address[0] if address else LOOPBACK,
        stream,
        lambda: stream.write(_MARK + b"%d\n" % os.getpid()),
    )
    _stand_by(server_pid, stream, given.lease_s, os.environ.get("SSH_CONNECTION", ""))
    os._exit(0)


def _first_line() -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)  # one byte at a time: the rest belongs to the server
        if not byte:
            os._exit(1)
        line += byte
    return bytes(line)


def _stand_by(server_pid: int, stream: ServerEnd, lease_s: float, connection: str) -> None:
    """Send heartbeats until the server has ended or the lease has expired. They report a stopped server.

    The notebook counts as alive if it has sent data, read by the server or not, or has acknowledged the last heartbeat.
    """
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wake_r, wake_w = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    poller = select.poll()
    poller.register(wake_r, select.POLLIN)
    poller.register(stream.incoming, 0)  # the end of the stream is reported without an event mask
    heard, heard_s, until_s = (0, 0), time.monotonic(), float("inf")
    while os.waitpid(server_pid, os.WNOHANG) == (0, 0) and time.monotonic() < min(until_s, heard_s + lease_s):
        if (hears := (stream.heard, _waiting_bytes(stream.incoming))) != heard:
            heard, heard_s = hears, time.monotonic()
        elif time.monotonic() > heard_s + 2 * BEAT_S and unacknowledged_bytes(connection) == 0:
            heard_s = time.monotonic()  # the last heartbeat was acknowledged
        with contextlib.suppress(OSError):
            if select.select([], [2], [], 0)[1]:  # must not block on a broken link
                os.write(2, _BEAT + _STOPPED if processes.is_stopped(server_pid) else _BEAT)
        for fd, _ in poller.poll(1000 * min(BEAT_S, lease_s / _BEATS)):
            if fd == wake_r:  # SIGCHLD: the server has ended, or was only stopped or continued
                os.read(wake_r, 4096)
            else:
                poller.unregister(fd)
                until_s = time.monotonic() + _END_S
                os.kill(server_pid, signal.SIGCONT)  # a stopped server would not notice the end of the stream


def _waiting_bytes(fd: int) -> int:
    """Return the number of readable bytes."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
