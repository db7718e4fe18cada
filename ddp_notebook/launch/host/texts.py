"""Text of a host's processes that waits until the stream to the owner takes more."""

from __future__ import annotations

from ddp_notebook.messages import framing

_PIECE_BYTES = 64 << 10


class TextBuffer:
    """Text in the order in which each process wrote it. Small pieces become large ones: the owner's work is one step
    for each piece.

    Example:
        >>> texts = Texts()
        >>> texts.add(0, 1, b"a"); texts.add(1, 1, b"other"); texts.add(0, 1, b"b")
        >>> list(framing.Unpacker().feed(texts.pack()))
        [Text(process=0, fd=1, data=b'ab'), Text(process=1, fd=1, data=b'other')]
        >>> bool(texts)
        False
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._waiting: dict[int, tuple[int, int, bytearray]] = {}  # number -> (process, fd, bytes), oldest first
        self._count = 0  # numbers that were given
        self._last: dict[int, int] = {}  # process -> number of its newest text

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, process: int, fd: int, data: bytes) -> None:
        """A process has written this."""
        self.nbytes += len(data)
        last = self._waiting.get(self._last.get(process, 0))
        if last is not None and last[1] == fd and len(last[2]) < _PIECE_BYTES:
            last[2].extend(data)
            return
        self._count += 1
        self._last[process] = self._count
        self._waiting[self._count] = process, fd, bytearray(data)

    def pack(self, most_bytes: float = float("inf")) -> bytes:
        """Take frames of the oldest text, about so many bytes."""
        frames, nbytes = [], 0
        while self._waiting and nbytes < most_bytes:
            process, fd, data = self._waiting.pop(next(iter(self._waiting)))
            frames.append(framing.pack_text(process, fd, bytes(data)))
            nbytes += len(data)
        self.nbytes -= nbytes
        return b"".join(frames)
