"""The pipes of a job that this notebook has started: those of each rank, and those of torchrun itself."""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import queue
import selectors
import socket
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_notebook.registry import unix_sockets
from ddp_notebook.wire.stream_order import StreamMerge

TORCHRUN = -1  # in place of a rank: text of torchrun and its agents
_READ_BYTES = 1 << 16
_MOST_WAITING = 200  # limit of pieces that were not shown; above it the ranks block in `print`
_GREETING_S = 2.0  # timeout for a rank to send its pipes
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Written:
    """A piece of output.

    Args:
        rank: that wrote it, or `TORCHRUN`.
        stream: "stdout" or "stderr".
        text: empty at the end of a pipe.
    """

    rank: int
    stream: str
    text: str


_STREAMS = {1: "stdout", 2: "stderr"}


def _decoder() -> Any:
    return codecs.getincrementaldecoder("utf-8")("replace")


@dataclass(slots=True)
class _Writer:
    """A rank or torchrun, with the text of its pipes that is not in the queue yet."""

    rank: int
    merge: StreamMerge
    decoders: dict[int, Any] = field(default_factory=lambda: {fd: _decoder() for fd in _STREAMS})
    open_pipes: int = len(_STREAMS)


class PipeReader:
    """Reads pipes in a thread, until `close`.

    Args:
        listener: the socket to which ranks send their pipes; it is closed at the end.
        own: the pipes of torchrun: file descriptors of stdout and stderr, which are closed at their ends.

    Attributes:
        output: queue of pieces.
        world_size: of the last rank that has sent its pipes; 0 if there is none.
    """

    def __init__(self, listener: socket.socket, own: Sequence[int]) -> None:
        self.output: queue.Queue[Written] = queue.Queue(_MOST_WAITING)
        self.world_size = 0
        self._listener = listener
        self._open: dict[int, int] = {}  # number of open pipes of each rank
        self._lock = threading.Lock()
        self._wakes, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._add(own, TORCHRUN, "")
        self._thread = threading.Thread(target=self._run, name="ddp-output", daemon=True)
        self._thread.start()

    @property
    def talking(self) -> list[int]:
        """The ranks whose pipes are open."""
        with self._lock:
            return sorted(rank for rank in self._open if rank != TORCHRUN)

    @property
    def is_open(self) -> bool:
        """True if there may be more output to read."""
        with self._lock:
            return bool(self._open)

    @property
    def has_ended(self) -> bool:
        """True if torchrun has closed its pipes."""
        with self._lock:
            return TORCHRUN not in self._open

    @property
    def most_waiting(self) -> int:
        """Upper limit of the pieces that are written and not yet taken from `output`.

        It counts a full queue, one piece that waits for room, and for each open pipe its content and its end.
        """
        with self._lock:
            return _MOST_WAITING + 1 + 2 * sum(self._open.values())

    def close(self) -> list[Written]:
        """Stop reading. Returns the pieces that are left in the queue."""
        self._wakes.close()
        left = []
        while self._thread.is_alive() or not self.output.empty():  # the thread may wait for room
            with contextlib.suppress(queue.Empty):
                left.append(self.output.get(timeout=0.01))
        return left

    def _add(self, pipes: Sequence[int], rank: int, token: str) -> None:
        writer = _Writer(rank, StreamMerge(token))
        with self._lock:
            self._open[rank] = self._open.get(rank, 0) + len(pipes)
        for pipe, fd in zip(pipes, _STREAMS, strict=True):
            self._selector.register(pipe, selectors.EVENT_READ, (writer, fd))

    def _run(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._woken:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._read(key.fd, *key.data)
        finally:
            for key in list(self._selector.get_map().values()):
                if key.data is not None:
                    os.close(key.fd)
            self._selector.close()
            self._listener.close()
            self._woken.close()

    def _accept(self) -> None:
        fds: list[int] = []
        try:
            connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(_GREETING_S)
                unix_sockets.check_user(connection)
                said, fds, _, _ = socket.recv_fds(connection, 100, 2)
                *numbers, token = said.decode().split()
                rank, world_size = map(int, numbers)
                if len(fds) != 2 or rank < 0:
                    raise ValueError(f"a process must send 2 pipes and its rank, got {len(fds)} pipes of rank {rank}")
                connection.send(b"+")
        except (OSError, ValueError) as error:
            _log.warning("a process has sent no pipes: %s", error)
            for fd in fds:
                os.close(fd)
            return
        self.world_size = world_size
        self._add(fds, rank, token)

    def _read(self, pipe: int, writer: _Writer, fd: int) -> None:
        data = os.read(pipe, _READ_BYTES)
        if data:
            self._put(writer, writer.merge.feed(fd, data))
            return
        self._selector.unregister(pipe)
        os.close(pipe)
        writer.open_pipes -= 1
        if not writer.open_pipes:  # flush incomplete marks and characters
            self._put(writer, writer.merge.rest())
            self._put(writer, [(each, b"") for each in _STREAMS], is_end=True)
        with self._lock:
            self._open[writer.rank] -= 1
            if not self._open[writer.rank]:
                del self._open[writer.rank]
        self.output.put(Written(writer.rank, _STREAMS[fd], ""))

    def _put(self, writer: _Writer, pieces: Iterable[tuple[int, bytes]], *, is_end: bool = False) -> None:
        """Put pieces of text into the queue. A piece may end within a character."""
        for fd, data in pieces:
            if text := writer.decoders[fd].decode(data, final=is_end):
                self.output.put(Written(writer.rank, _STREAMS[fd], text))
