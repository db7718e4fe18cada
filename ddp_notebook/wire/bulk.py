"""Serialize large values, and transfer them in pieces on separate sockets.

Messages on the control socket never wait for these transfers. The notebook drives both directions: it keeps a few
requests open and repeats requests without an answer. So a slow reader is never flooded, and a lost connection costs one
repeated piece. In the notebook, the second I/O thread of the ZeroMQ context serves these sockets. With a single I/O
thread, a small message sent after 200 MB waited about 1 s.

    fetcher -> server   GET   transfer, offset
    server -> fetcher   PIECE transfer, offset, bytes
    fetcher -> server   PUT   transfer, offset, total size, bytes
    server -> fetcher   GOT   transfer, offset
    fetcher -> server   DROP  transfer
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import cloudpickle
import zmq

from ddp_notebook.messages.processes import Address
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import ctypes, io, itertools, math, pickle, struct, threading, time, weakref
from ddp_notebook.wire.buffers import split
from ddp_notebook.wire.keys import Bind, Keyring, on_loopback, unlock
from ddp_notebook.wire.shared_memory import SealedMemory

PIECE_BYTES = 1 << 20
INLINE_BYTES = 64 << 10  # data up to this size travels inside its message
MOST_BYTES = 10**9  # a larger value is sent only if the user requests it explicitly
_WINDOW = 4  # open requests of a transfer
_RETRY_S = 2.0
_HEADER = struct.Struct("!cQQQ")  # kind, transfer, offset, total size (in PUT only)
_GET, _PIECE, _PUT, _GOT, _DROP = b"G", b"P", b"T", b"A", b"D"
_SECOND_IO_THREAD = 0b10
_CURVE_BYTES = 1024  # upper bound of the bytes that encryption adds to a piece
Held = memoryview | SealedMemory  # data that one process holds for another process


class BulkServer:
    """Transfer endpoint of a rank: holds data for the notebook to fetch, and data that the notebook sent.

    The thread of the rank's `Endpoint` calls `handle`.
    """

    def __init__(self, context: zmq.Context[Any], address: Address) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.IDENTITY, address.identity.encode())
        unlock(self.socket, address)
        self.socket.connect(address.bulk)
        self._numbers = itertools.count(1, 2)  # odd; the notebook's are even, so one DROP serves both
        self._held: dict[int, Held] = {}
        self._put: dict[int, bytearray] = {}
        self._last_put = 0

    def hold(self, data: bytes | SealedMemory) -> int:
        """Hold `data` until the notebook has fetched it, and return the transfer number.

        Earlier data is released, because a notebook fetches one value at a time.
        """
        transfer = next(self._numbers)
        self._held = {transfer: held(data)}
        return transfer

    def take(self, transfer: int) -> bytearray:
        """Return the data that the notebook sent, and release it.

        Raises:
            LookupError: the transfer does not exist or was dropped.
        """
        data = self._put.pop(transfer, None)
        if data is None:
            raise LookupError("the data was dropped, or there is no memory for it")
        return data

    def handle(self) -> None:
        """Handle one request of the notebook."""
        header, *piece = self.socket.recv_multipart()
        kind, transfer, offset, nbytes = _HEADER.unpack(header)
        if kind == _DROP:
            self._held.pop(transfer, None)
            self._put.pop(transfer, None)
        elif kind == _PUT:
            self._keep(transfer, offset, nbytes, piece[0])
            self.socket.send(_HEADER.pack(_GOT, transfer, offset, 0))
        elif (data := self._held.get(transfer)) is not None:  # the main thread may add a transfer at the same time
            wanted = piece_of(data, offset)
            self.socket.send_multipart([_HEADER.pack(_PIECE, transfer, offset, 0), wanted])

    def _keep(self, transfer: int, offset: int, nbytes: int, piece: bytes) -> None:
        if transfer > self._last_put:  # a repeated piece must not restart a finished transfer
            self._last_put = transfer
            try:
                self._put = {transfer: bytearray(nbytes)}  # a notebook sends one value at a time
            except MemoryError:  # `take` raises the error in the main thread; this thread must keep running
                self._put = {}
        if (kept := self._put.get(transfer)) is not None:  # None: the main thread has already taken it
            kept[offset : offset + len(piece)] = piece


class BulkFetcher:
    """Transfer endpoint of the notebook. A transfer runs in the caller's thread; a lock allows one at a time."""

    def __init__(self, context: zmq.Context[Any], keyring: Keyring, bind: Bind = on_loopback) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.AFFINITY, _SECOND_IO_THREAD)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(
            zmq.MAXMSGSIZE, PIECE_BYTES + _CURVE_BYTES
        )  # ZeroMQ closes the connection of a peer that sends more
        self._socket.setsockopt(zmq.RCVHWM, 4 * _WINDOW)  # limits the data of a peer that sends without a request
        keyring.guard(self._socket)
        try:
            bind(self._socket)
        except BaseException:
            context.destroy(linger=0)  # the endpoint that owns this context is not started yet
            raise
        self._lock = threading.Lock()
        self._is_closing = False
        self._numbers = itertools.count(2, 2)
        self._to_drop: deque[tuple[bytes, int]] = deque()

    @property
    def url(self) -> str:
        """Return the address that ranks connect to."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def fetch(self, peer: str, transfer: int, nbytes: int, check: Callable[[], None] = lambda: None) -> bytearray:
        """Fetch the data of a transfer.

        Args:
            peer: identity of the process that holds the data.
            transfer: number that `BulkServer.hold` returned in that process.
            nbytes: size of the data in bytes.
            check: function called several times per second. It raises an exception to cancel the transfer, for example
                because the peer died or the user interrupted the cell.

        Raises:
            ConnectionAbortedError: this endpoint was closed during the transfer.
            ConnectionError: the peer sent a piece of the wrong size.
            MemoryError: the data does not fit into memory.
        """
        data = bytearray(nbytes)

        def ask(offset: int) -> list[Any]:
            return [_HEADER.pack(_GET, transfer, offset, 0)]

        def keep(offset: int, piece: bytes) -> None:
            memoryview(data)[offset : offset + PIECE_BYTES] = piece  # ValueError if the piece has the wrong size

        try:
            self._move(peer, (_PIECE, transfer), nbytes, ask, keep, check)
        finally:
            self.drop(peer, transfer)
        return data

    def put(self, peer: str, data: bytes | SealedMemory, check: Callable[[], None] = lambda: None) -> int:
        """Send data to a process.

        Return the transfer number, with which `BulkServer.take` returns the data in that process.

        Args:
            peer: identity of the process.
            data: at least one byte.
            check: as for `fetch`.
        """
        transfer = next(self._numbers)
        whole = held(data)

        def give(offset: int) -> list[Any]:
            return [_HEADER.pack(_PUT, transfer, offset, len(whole)), piece_of(whole, offset)]

        try:
            self._move(peer, (_GOT, transfer), len(whole), give, lambda *_: None, check)
        except BaseException:
            self.drop(peer, transfer)
            raise
        return transfer

    def drop(self, peer: str, transfer: int) -> None:
        """Release a transfer on the peer. Thread-safe; does not block."""
        self._to_drop.append((peer.encode(), transfer))
        self._send_drops()

    def _move(
        self,
        peer: str,
        answer: tuple[bytes, int],
        nbytes: int,
        ask: Callable[[int], list[Any]],
        take: Callable[[int, bytes], None],
        check: Callable[[], None],
    ) -> None:
        """Request every piece and wait for its answer, with a few requests open at a time.

        Args:
            answer: kind and transfer number of the expected answers.
            ask: returns the request for the piece at an offset.
            take: processes the offset and the content of an answer.
        """
        identity = peer.encode()
        missing = list(range(0, nbytes, PIECE_BYTES))[::-1]
        asked: dict[int, float] = {}  # offset -> time of the last request
        try:
            with self._lock:
                while missing or asked:
                    while missing and len(asked) < _WINDOW:
                        asked[missing.pop()] = -math.inf
                    now = time.monotonic()
                    for offset in [offset for offset, when in asked.items() if now - when > _RETRY_S]:
                        asked[offset] = now
                        self._socket.send_multipart([identity, *ask(offset)])
                    check()
                    if self._is_closing:
                        raise ConnectionAbortedError(f"closed while {nbytes} bytes were moved from or to {peer}")
                    if not self._socket.poll(100):
                        continue
                    sender, header, *piece = self._socket.recv_multipart()
                    if sender != identity or len(header) != _HEADER.size:
                        continue  # answer of an earlier transfer, or invalid
                    kind, number, offset, _ = _HEADER.unpack(header)
                    if (kind, number) == answer and offset in asked:
                        del asked[offset]
                        try:
                            take(offset, piece[0] if piece else b"")
                        except ValueError as error:
                            raise ConnectionError(f"{peer} sent a piece of the wrong size at byte {offset}") from error
        finally:
            self._send_drops()

    def _send_drops(self) -> None:
        """Send the pending drops, unless another thread holds the lock: that thread sends them when it is done."""
        while self._to_drop and self._lock.acquire(blocking=False):
            try:
                identity, transfer = self._to_drop.popleft()
                if not self._socket.closed:
                    self._socket.send_multipart([identity, _HEADER.pack(_DROP, transfer, 0, 0)])
            finally:
                self._lock.release()

    def close(self) -> None:
        """Abort open transfers and close the socket.

        Call it before the endpoint is closed, because both share one ZeroMQ context.
        """
        self._is_closing = True
        with self._lock:
            self._socket.close(linger=0)


def held(data: bytes | SealedMemory) -> Held:
    return data if isinstance(data, SealedMemory) else memoryview(data)


def piece_of(data: Held, offset: int) -> Any:
    """Return the piece of `data` that starts at `offset`."""
    if isinstance(data, SealedMemory):
        return data.piece(offset, PIECE_BYTES)
    return data[offset : offset + PIECE_BYTES]


# ---- values as bytes


_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # torch dtypes, by element size in bytes


def _dense(array: Any) -> Any:
    """Return the array, copied only if its memory has gaps, so that no memory outside the array is sent."""
    return array if array.flags.c_contiguous or array.flags.f_contiguous else array.copy()


class ValuePickler(cloudpickle.Pickler):
    """Pickler that sends the functions and classes of a cell by value, and tensors through CPU memory.

    The receiver may have no GPU or a different one. Pickling a tensor as a NumPy array takes about half the time of
    torch's own pickle (0.23 instead of 0.45 s for 500 MB).
    """

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")  # the notebook does not import torch on its own
        if torch is None or not isinstance(obj, torch.Tensor):
            return super().reducer_override(obj)
        on_cpu = obj.device.type == "cpu"
        if type(obj) is not torch.Tensor or vars(obj):
            if on_cpu or isinstance(obj, torch.nn.Parameter):  # its pickle contains a plain tensor, handled below
                return super().reducer_override(obj)
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(5)
        if obj.requires_grad:
            return torch.Tensor.requires_grad_, (obj.detach(),)
        values = (obj if on_cpu else obj.cpu()).resolve_conj().resolve_neg()
        try:
            return torch.from_numpy, (_dense(values.numpy()),)
        except (TypeError, RuntimeError):  # dtype or layout that NumPy lacks: bfloat16, sparse, quantized, ...
            pass
        try:  # reinterpret the memory as integers
            numbers = values.view(getattr(torch, _INTEGERS[values.element_size()]))
            return torch.Tensor.view, (torch.from_numpy(_dense(numbers.numpy())), values.dtype)
        except (KeyError, TypeError, RuntimeError):
            return values.__reduce_ex__(5)


class _Scale(ValuePickler):
    """Pickler that counts the bytes of a pickle without storing them, and without copying tensors and arrays."""

    def __init__(self) -> None:
        super().__init__(self, protocol=5)
        self.nbytes = 0

    def write(self, data: Any) -> int:
        """Count the bytes that the pickler writes to its file, which is this object."""
        size = memoryview(data).nbytes
        self.nbytes += size
        return size

    def reducer_override(self, obj: Any) -> Any:
        if size := _array_bytes(obj):
            self.nbytes += size
            return int, ()
        return super().reducer_override(obj)


def _array_bytes(obj: Any) -> int:
    """Return the number of bytes in a tensor or numeric array; 0 for any other value."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(obj, torch.Tensor) and obj.layout is torch.strided:
        return int(obj.nbytes)
    if numpy is not None and isinstance(obj, numpy.ndarray) and not obj.dtype.hasobject:
        return int(obj.nbytes)
    return 0


def weigh(value: Any) -> int:
    """Return the approximate size of a value's pickle in bytes, without allocating memory for it.

    Raises:
        TypeError, pickle.PicklingError, ...: the value cannot be pickled.

    Example:
        >>> weigh(bytes(4_000_000)) // 1_000_000
        4
    """
    scale = _Scale()
    scale.dump(value)
    return scale.nbytes


class _Chunks(list[Any]):
    """File object for a pickler that keeps large `bytes` objects without a copy."""

    def write(self, data: Any) -> int:
        """Append the data that the pickler writes."""
        self.append(bytes(data))  # no copy of a `bytes` object; other memory is copied, since it may be released soon
        return len(data)


def with_text_as_buffer(value: Any) -> Any:
    """Return a value that pickles as the given one. A long text is a buffer in the pickle, which saves two copies.

    Example:
        >>> text = "ab" * 100_000
        >>> parts = pickled({"text": with_text_as_buffer(text)})
        >>> len(parts), pickle.loads(b"".join(parts[0]), buffers=parts[1]) == {"text": text}
        (2, True)
    """
    return _Text(value) if type(value) is str and len(value) > INLINE_BYTES else value


class _Text:
    """Pickles a text as a buffer."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return str, (pickle.PickleBuffer(_utf8(self._text)), "utf-8", "surrogatepass")


_as_utf8 = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.POINTER(ctypes.c_ssize_t))(
    ("PyUnicode_AsUTF8AndSize", ctypes.pythonapi)
)


def _utf8(text: str) -> Any:
    """Return a text in UTF-8: the memory of the text itself if it is ASCII, otherwise a copy.

    Source: https://docs.python.org/3/c-api/unicode.html#c.PyUnicode_AsUTF8AndSize
    """
    if not text.isascii():  # the function would keep the copy as long as the text
        return text.encode("utf-8", "surrogatepass")

    view = (ctypes.c_char * len(text)).from_address(_as_utf8(text, ctypes.c_ssize_t()))
    weakref.finalize(view, id, text).atexit = False  # the memory is valid as long as the text, which this keeps
    return view


def pickled(value: Any, pickler: type[cloudpickle.Pickler] = ValuePickler) -> list[list[Any]]:
    """Pickle a value without copying its arrays and tensors.

    Args:
        value: object to pickle.
        pickler: pickler class to use.

    Returns:
        The parts for `buffers.join`: the pickle, then the memory of each array.

    Raises:
        TypeError, pickle.PicklingError, ...: the value cannot be pickled.
    """
    file, buffers = _Chunks(), list[pickle.PickleBuffer]()
    pickler(file, protocol=5, buffer_callback=buffers.append).dump(with_text_as_buffer(value))
    return [file, *([buffer.raw()] for buffer in buffers)]


def unpickled(data: Any) -> Any:
    """Return the value that `pickled` and `buffers.join` serialized. Its arrays use the memory of `data`."""
    first, *buffers = split(data)
    return pickle.loads(first, buffers=buffers)


def dumps(value: Any) -> bytes:
    """Pickle a value into bytes that `pickle.loads` accepts.

    Raises:
        TypeError, pickle.PicklingError, ...: the value cannot be pickled.
    """
    buffer = io.BytesIO()
    ValuePickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()
