"""A byte stream to another machine that survives broken connections, for hours.

    ssh ── ProxyCommand: `dial` ══ an ssh that may be cut, and the next one ══ `hold` ── sshd of the host

An ssh connection ends if its link is down for long: TCP times out after a quarter of an hour at the latest. So the ssh
of a kept session uses this stream to the host's own sshd, and does not notice broken connections. The stream is carried
by another ssh, which is started again when it has ended or is silent. Each side counts the bytes that it has received.
After a new connection, each side sends again the bytes that the other has not received. They wait in bounded memory; if
it is full, the sender blocks.

    frame      kind u1  number u8, then for DATA this number of bytes
    GOT        number of bytes received; sent first on a connection, and each second
    END        the owner has closed the stream, and no more bytes follow

On the host, a separate process, `hold`, owns the stream and listens on an abstract Unix socket. A new ssh passes it the
file descriptors of its standard input and output. Both check that the other belongs to the same user, since any user
may bind such a name. `hold` ends with the stream, or after the lease without data.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from ddp_notebook.launch.transports import remote_python
from ddp_notebook.messages.encoding import VERSION
from ddp_notebook.messages.first_messages import DialHost, StartCarrier, from_line, to_line

DATA, GOT, END = 1, 2, 3
_HEAD = struct.Struct("!BQ")
_READ_BYTES = 1 << 16
_MOST_BYTES = 16 << 20  # limit of bytes that wait for the other side
_BEAT_S = 1.0
_QUIET_S = 10.0  # silence until another connection is tried
_FIRST_S = 20.0  # time limit for a connection to start, and for `hold` to be found
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0  # pauses between attempts
_END_S = 10.0  # time limit to report the end to the other side
# output of a shell's start-up files comes before these
_HOLDS, _LOST = b"\nddp_notebook holds\n", b"\nddp_notebook lost\n"


class LastingStream:
    """One side of the stream.

    Args:
        source, sink: file descriptors that it reads from and writes to; they may be the same.
    """

    def __init__(self, source: int, sink: int) -> None:
        self.ended = threading.Event()
        self.heard_s = time.monotonic()
        self._source, self._sink = source, sink
        self._waiting = bytearray()  # bytes that the other side has not received
        self._gone = 0  # number of bytes before `_waiting`
        self._got = 0  # number of bytes from the other side
        self._has_closed = self._has_told_end = False
        self.closed_s = float("inf")
        self._number = 0  # number of the current connection
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        threading.Thread(target=self._take, name="ddp-source", daemon=True).start()

    def close(self) -> None:
        """Send no more data after the bytes that were read, and report the end to the other side."""
        with self._changed:
            self._close()

    def _close(self) -> None:
        self._has_closed = True
        self.closed_s = min(self.closed_s, time.monotonic())
        self._changed.notify_all()

    def carry(self, incoming: int, outgoing: int, number: int) -> bool:
        """Use a connection until it ends, is silent, or is replaced by one with a higher number.

        Returns:
            Whether no thread still writes to the connection.
        """
        with self._changed:
            self._number = max(self._number, number)
            self._changed.notify_all()
        self.heard_s = time.monotonic()
        begun = threading.Event()
        sender = threading.Thread(target=self._send, args=(outgoing, number, begun), name="ddp-carry", daemon=True)
        sender.start()
        buffer = bytearray()
        while self._number == number and not self.ended.is_set() and time.monotonic() < self.heard_s + _QUIET_S:
            if not select.select([incoming], [], [], _BEAT_S)[0]:
                continue
            try:
                data = os.read(incoming, _READ_BYTES)
            except OSError:
                data = b""
            if not data:
                if self._has_told_end:  # the other side has received the end
                    self.ended.set()
                break
            self.heard_s = time.monotonic()
            buffer += data
            self._on_frames(buffer, number, begun)
        with self._changed:
            if self._number == number:
                self._number = number + 1  # makes the sender of this connection stop
            self._changed.notify_all()
        sender.join(2 * _BEAT_S)
        return not sender.is_alive()

    # ---- there

    def _take(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._waiting) < _MOST_BYTES)
            try:
                data = os.read(self._source, _READ_BYTES)
            except OSError:
                data = b""
            with self._changed:
                self._waiting += data
                self._changed.notify_all()
                if not data:
                    self._close()
                    return

    def _send(self, outgoing: int, number: int, begun: threading.Event) -> None:
        """Send bytes that the other side has not received, and the number of received bytes each second."""
        try:
            _write(outgoing, _HEAD.pack(GOT, self._got))
            while not begun.wait(_BEAT_S):
                if self._number != number:
                    return
            sent, said_s, said = self._gone, time.monotonic(), self._got
            while True:
                with self._changed:
                    if self._gone + len(self._waiting) == sent and not self._has_closed and self._number == number:
                        self._changed.wait(max(0.0, said_s + _BEAT_S - time.monotonic()))
                    if self._number != number:
                        return
                    data = bytes(memoryview(self._waiting)[sent - self._gone :][:_READ_BYTES])
                    is_over = self._has_closed
                if data:
                    _write(outgoing, _HEAD.pack(DATA, len(data)) + data)
                    sent += len(data)
                elif is_over:
                    self._has_told_end = True
                    _write(outgoing, _HEAD.pack(END, 0))
                    return
                if time.monotonic() >= said_s + _BEAT_S or self._got > said + _MOST_BYTES // 8:
                    _write(outgoing, _HEAD.pack(GOT, self._got))
                    said_s, said = time.monotonic(), self._got
        except OSError:
            return  # the reader notices the end

    # ---- and back

    def _on_frames(self, buffer: bytearray, number: int, begun: threading.Event) -> None:
        while len(buffer) >= _HEAD.size:
            kind, count = _HEAD.unpack_from(buffer)
            end = _HEAD.size + (count if kind == DATA else 0)
            if len(buffer) < end:
                return
            data = bytes(memoryview(buffer)[_HEAD.size : end])
            del buffer[:end]
            with self._writing:  # keep the order of data between one connection and the next
                with self._changed:
                    if self._number != number:
                        return  # the next connection brings the data again
                    if kind == GOT:
                        del self._waiting[: count - self._gone]
                        self._gone = count
                        self._changed.notify_all()
                        begun.set()
                    elif kind == END:
                        self.ended.set()
                    else:
                        self._got += len(data)
                with contextlib.suppress(OSError):  # the reader of the sink is gone; its source reports the end
                    _write(self._sink, data)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# ---- from here


def proxy_command(ssh: Sequence[str], python: str | None, token: str, lease_s: float) -> str:
    """Return the ProxyCommand for ssh.

    Args:
        ssh: the command with all options and the destination, without the remote command.
        python: the remote interpreter; None: see `remote_python.command`.
        token: identifies the stream.
        lease_s: longest time without a connection, in seconds.
    """
    root = remote_python.ROOT
    here = (
        f"import sys; sys.path.append({root!r}); from ddp_notebook.launch.transports.reconnecting import dial; dial()"
    )
    command = [*ssh, remote_python.command(python, __name__)]
    given = to_line(DialHost(wire=VERSION, command=command, token=token, lease_s=lease_s)).decode().rstrip()
    words = [sys.executable, "-P", "-c", here, given]
    return " ".join(map(shlex.quote, words)).replace("%", "%%")


def dial() -> None:
    """Run the ProxyCommand: carry standard input and output to the host, over one connection after the other."""
    given = from_line(sys.argv[1], DialHost)
    stream = LastingStream(0, 1)
    for by in (signal.SIGHUP, signal.SIGTERM):  # the signals with which ssh ends this process
        signal.signal(by, lambda *_: stream.close())
    pause_s = _FIRST_PAUSE_S
    for number in range(1, sys.maxsize, 2):
        said = _carry_once(stream, given, number)
        pause_s = _FIRST_PAUSE_S if said == _HOLDS else min(_LONGEST_PAUSE_S, 2 * pause_s)
        if said == _LOST or (number == 1 and said != _HOLDS) or stream.ended.wait(pause_s):
            break
        if time.monotonic() > min(stream.heard_s + given.lease_s, stream.closed_s + _END_S):
            break
    os._exit(0)


def _carry_once(stream: LastingStream, given: DialHost, number: int) -> bytes:
    """Make a connection and use it. Returns the first word of the remote end; b"" if none came."""
    is_first = number == 1
    with subprocess.Popen(
        given.command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if is_first else subprocess.DEVNULL,
        start_new_session=True,
    ) as ssh:
        assert ssh.stdin is not None and ssh.stdout is not None
        try:
            asked = StartCarrier(wire=VERSION, token=given.token, lease_s=given.lease_s, is_first=is_first)
            _write(ssh.stdin.fileno(), to_line(asked))
            if (said := _first_word(ssh.stdout.fileno())) == _HOLDS:
                stream.carry(ssh.stdout.fileno(), ssh.stdin.fileno(), number)
            return said
        except OSError:
            return b""
        finally:
            ssh.kill()


def _first_word(fd: int) -> bytes:
    """Read the first word, and no byte after it. Returns b"" if none came in time."""
    said, until_s = b"", time.monotonic() + _FIRST_S
    while not said.endswith((_HOLDS, _LOST)):
        if not select.select([fd], [], [], max(0.0, until_s - time.monotonic()))[0]:
            return b""
        if not (byte := os.read(fd, 1)):
            return b""
        said = (said + byte)[-len(_HOLDS) :]
    return _HOLDS if said.endswith(_HOLDS) else _LOST


# ---- on the host


def main() -> None:
    """Run the remote command of a carrying ssh: pass its file descriptors to the stream's process, and wait for the
    end.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return
        line += byte
    try:
        given = from_line(line, StartCarrier)
    except ValueError as error:
        raise SystemExit(f"ddp_notebook in {sys.prefix}: {error}") from None
    name = f"\0ddp_notebook-{given.token}"
    if given.is_first:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(name)
        listener.listen(8)
        if os.fork() == 0:
            _hold(listener, given.lease_s)
        listener.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as holder:
        holder.settimeout(_FIRST_S)
        with contextlib.suppress(ConnectionRefusedError):
            holder.connect(name)
        if not _is_ours(holder):
            _write(1, _LOST)
            return
        _write(1, _HOLDS)
        socket.send_fds(holder, [b"\0"], [0, 1])
        holder.settimeout(None)
        holder.recv(1)  # wait for the end


def _hold(listener: socket.socket, lease_s: float) -> None:
    """Run the process that owns the stream."""
    os.setsid()
    for by in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(by, signal.SIG_IGN)
    address, port = os.environ["SSH_CONNECTION"].split(" ")[2:4]
    to_sshd = socket.create_connection((address, int(port)))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    stream = LastingStream(to_sshd.fileno(), to_sshd.fileno())
    listener.settimeout(_BEAT_S)
    number = 1
    while not stream.ended.is_set() and time.monotonic() < stream.heard_s + lease_s:
        with contextlib.suppress(OSError):  # no connection in time
            connection, _ = listener.accept()
            threading.Thread(target=_carry, args=(stream, connection, number), daemon=True).start()
            number += 2
    os._exit(0)


def _is_ours(connection: socket.socket) -> bool:
    """Return whether the other end belongs to this user. (unix(7), SO_PEERCRED: uid -1 if there is no peer.)"""
    _, _, uid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())


def _carry(stream: LastingStream, connection: socket.socket, number: int) -> None:
    with connection:
        if not _is_ours(connection):
            return
        connection.settimeout(_FIRST_S)
        _, fds, _, _ = socket.recv_fds(connection, 1, 2)
        if stream.carry(fds[0], fds[1], number):
            for fd in fds:
                os.close(fd)
