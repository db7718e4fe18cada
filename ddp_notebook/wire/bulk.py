"""Large data: values as bytes, and bytes in pieces, on sockets of its own: nothing on the control socket ever waits
behind it.

The notebook drives both directions. It asks for a few pieces at a time, or puts a few, and repeats those that are not
answered, so a slow reader is never flooded and a cut connection costs one repeated piece. On the notebook's side the
Context's second I/O thread serves the sockets of this module. (Without it a small message sent behind 200 MB waited
0.85 to 1.2 s; measured on two cores.)

    fetcher -> server   GET   transfer, offset
    server -> fetcher   PIECE transfer, offset, bytes
    fetcher -> server   PUT   transfer, offset, size of the whole, bytes
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
from ddp_notebook.stdlib import io, itertools, math, pickle, struct, threading, time
from ddp_notebook.wire.buffers import split
from ddp_notebook.wire.keys import Bind, Keyring, on_loopback, unlock
from ddp_notebook.wire.memory import SealedMemory

PIECE_BYTES = 1 << 20
INLINE_BYTES = 64 << 10  # data up to this size travels inside its message
MOST_BYTES = 10**9  # a larger value is sent on explicit demand only
_WINDOW = 4  # pieces under way
_RETRY_S = 2.0
_HEADER = struct.Struct("!cQQQ")  # kind, transfer, offset, size of the whole (of PUT)
_GET, _PIECE, _PUT, _GOT, _DROP = b"G", b"P", b"T", b"A", b"D"
_SECOND_IO_THREAD = 0b10
_CURVE_BYTES = 1024  # more than encryption adds to a piece
Held = memoryview | SealedMemory  # data that a process keeps for another one


class BulkServer:
    """A rank's side: holds data to be fetched, and data that was put. The endpoint's thread calls `handle`."""

    def __init__(self, context: zmq.Context[Any], address: Address) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.IDENTITY, address.identity.encode())
        unlock(self.socket, address)
        self.socket.connect(address.bulk)
        self._numbers = itertools.count(1, 2)  # odd; the notebook's are even, so that one DROP serves both
        self._held: dict[int, Held] = {}
        self._put: dict[int, bytearray] = {}
        self._last_put = 0

    def hold(self, data: bytes | SealedMemory) -> int:
        """Keep `data` until it was fetched, in place of earlier data: a notebook fetches one value at a time. Returns
        the number of the transfer."""
        transfer = next(self._numbers)
        self._held = {transfer: held(data)}
        return transfer

    def take(self, transfer: int) -> bytearray:
        """Hand over the data that the notebook has put.

        Raises:
            LookupError: there is no such transfer, or no longer.
        """
        data = self._put.pop(transfer, None)
        if data is None:
            raise LookupError("the data was dropped, or there is no memory for it")
        return data

    def handle(self) -> None:
        """Answer one request."""
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
        if transfer > self._last_put:  # a repeated piece must not revive a transfer that is over
            self._last_put = transfer
            try:
                self._put = {transfer: bytearray(nbytes)}  # a notebook puts one value at a time
            except MemoryError:  # `take` will raise; this thread has other work too
                self._put = {}
        if (kept := self._put.get(transfer)) is not None:  # else the main thread has taken it
            kept[offset : offset + len(piece)] = piece


class BulkFetcher:
    """The notebook's side. Transfers run in the caller's thread, one after the other."""

    def __init__(self, context: zmq.Context[Any], keyring: Keyring, bind: Bind = on_loopback) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.AFFINITY, _SECOND_IO_THREAD)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(
            zmq.MAXMSGSIZE, PIECE_BYTES + _CURVE_BYTES
        )  # the connection of a peer that sends more is closed,
        self._socket.setsockopt(zmq.RCVHWM, 4 * _WINDOW)  # a limit for data that a peer sends without a request
        keyring.guard(self._socket)
        try:
            bind(self._socket)
        except BaseException:
            context.destroy(linger=0)  # the wire in it has not begun
            raise
        self._lock = threading.Lock()
        self._is_closing = False
        self._numbers = itertools.count(2, 2)
        self._to_drop: deque[tuple[bytes, int]] = deque()

    @property
    def url(self) -> str:
        """Where ranks connect to."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def fetch(self, peer: str, transfer: int, nbytes: int, check: Callable[[], None] = lambda: None) -> bytearray:
        """Fetch `nbytes` of a transfer.

        Args:
            peer: identity of the process that holds it.
            transfer: the number that its `BulkServer.hold` returned.
            nbytes: its size.
            check: called several times a second; raises to give up (the peer died, the user interrupted).

        Raises:
            ConnectionAbortedError: this end was closed in the meantime.
            ConnectionError: the process sent a piece of the wrong size.
            MemoryError: there is no memory for it.
        """
        data = bytearray(nbytes)

        def ask(offset: int) -> list[Any]:
            return [_HEADER.pack(_GET, transfer, offset, 0)]

        def keep(offset: int, piece: bytes) -> None:
            memoryview(data)[offset : offset + PIECE_BYTES] = piece  # ValueError unless it has the right size

        try:
            self._move(peer, (_PIECE, transfer), nbytes, ask, keep, check)
        finally:
            self.drop(peer, transfer)
        return data

    def put(self, peer: str, data: bytes | SealedMemory, check: Callable[[], None] = lambda: None) -> int:
        """Put data into a process. Returns the number of the transfer, with which its `BulkServer.take` gives it.

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
        """Let a peer forget a transfer. From any thread, and never waits."""
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
            answer: kind and transfer of the answers.
            ask: makes the request for the piece at an offset.
            take: takes the offset and the content of its answer.
        """
        identity = peer.encode()
        missing = list(range(0, nbytes, PIECE_BYTES))[::-1]
        asked: dict[int, float] = {}  # offset -> when
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
                        continue  # belongs to an earlier transfer, or is invalid
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
        """Send the pending drops, or leave them to the thread that has the socket: it calls this when it is done."""
        while self._to_drop and self._lock.acquire(blocking=False):
            try:
                identity, transfer = self._to_drop.popleft()
                if not self._socket.closed:
                    self._socket.send_multipart([identity, _HEADER.pack(_DROP, transfer, 0, 0)])
            finally:
                self._lock.release()

    def close(self) -> None:
        """End transfers under way and close the socket. To be called before the endpoint is closed, whose Context it
        shares."""
        self._is_closing = True
        with self._lock:
            self._socket.close(linger=0)


def held(data: bytes | SealedMemory) -> Held:
    return data if isinstance(data, SealedMemory) else memoryview(data)


def piece_of(data: Held, offset: int) -> Any:
    """The piece of some data that begins at an offset."""
    if isinstance(data, SealedMemory):
        return data.piece(offset, PIECE_BYTES)
    return data[offset : offset + PIECE_BYTES]


# ---- values as bytes


_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # torch's, by their size in bytes


def _dense(array: Any) -> Any:
    """The array, copied if its elements are not next to each other: the memory of others need not be copied."""
    return array if array.flags.c_contiguous or array.flags.f_contiguous else array.copy()


class ValuePickler(cloudpickle.Pickler):
    """Functions and classes of a cell travel by value, tensors through the CPU: the other side may have no GPU, or
    another one. (A tensor's own pickle takes twice as long: 0.45 and 0.42 s for 500 MB, instead of 0.23 and 0.19.)"""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")  # the notebook's side does not import it by itself
        if torch is None or not isinstance(obj, torch.Tensor):
            return super().reducer_override(obj)
        on_cpu = obj.device.type == "cpu"
        if type(obj) is not torch.Tensor or vars(obj):
            if on_cpu or isinstance(obj, torch.nn.Parameter):  # its pickle contains a plain tensor, which comes here
                return super().reducer_override(obj)
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(5)
        if obj.requires_grad:
            return torch.Tensor.requires_grad_, (obj.detach(),)
        values = (obj if on_cpu else obj.cpu()).resolve_conj().resolve_neg()
        try:
            return torch.from_numpy, (_dense(values.numpy()),)
        except (TypeError, RuntimeError):  # not in NumPy: bfloat16, sparse, quantized, ...
            pass
        try:  # the same memory, read as integers
            numbers = values.view(getattr(torch, _INTEGERS[values.element_size()]))
            return torch.Tensor.view, (torch.from_numpy(_dense(numbers.numpy())), values.dtype)
        except (KeyError, TypeError, RuntimeError):
            return values.__reduce_ex__(5)


class _Scale(ValuePickler):
    """Counts the bytes of a pickle without keeping it, and without copying tensors and arrays."""

    def __init__(self) -> None:
        super().__init__(self, protocol=5)
        self.nbytes = 0

    def write(self, data: Any) -> int:
        """The file that this pickler writes to."""
        size = memoryview(data).nbytes
        self.nbytes += size
        return size

    def reducer_override(self, obj: Any) -> Any:
        if size := _array_bytes(obj):
            self.nbytes += size
            return int, ()
        return super().reducer_override(obj)


def _array_bytes(obj: Any) -> int:
    """Bytes in a tensor or an array of numbers; 0 for everything else."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(obj, torch.Tensor) and obj.layout is torch.strided:
        return int(obj.nbytes)
    if numpy is not None and isinstance(obj, numpy.ndarray) and not obj.dtype.hasobject:
        return int(obj.nbytes)
    return 0


def weigh(value: Any) -> int:
    """The approximate size of a value's pickle in bytes. Takes no memory for it.

    Raises:
        TypeError, pickle.PicklingError, ...: it cannot be pickled.

    Example:
        >>> weigh(bytes(4_000_000)) // 1_000_000
        4
    """
    scale = _Scale()
    scale.dump(value)
    return scale.nbytes


class _Chunks(list[Any]):
    """A file to pickle into that keeps large `bytes` as they are."""

    def write(self, data: Any) -> int:
        """Keep what the pickler writes."""
        self.append(bytes(data))  # the same object if it is `bytes`; the memory of others may be gone soon
        return len(data)


def pickled(value: Any, pickler: type[cloudpickle.Pickler] = ValuePickler) -> list[list[Any]]:
    """Pickle a value without a copy of its arrays and tensors.

    Args:
        value: what to pickle.
        pickler: makes the pickle.

    Returns:
        Parts for `parts.join`: the pickle, then the memory of each array.

    Raises:
        TypeError, pickle.PicklingError, ...: it cannot be pickled.
    """
    file, buffers = _Chunks(), list[pickle.PickleBuffer]()
    pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return [file, *([buffer.raw()] for buffer in buffers)]


def unpickled(data: Any) -> Any:
    """The value that `pickled` and `parts.join` made this of. Its arrays use the memory of `data`."""
    first, *buffers = split(data)
    return pickle.loads(first, buffers=buffers)


def dumps(value: Any) -> bytes:
    """Pickle a value; `pickle.loads` unpickles it.

    Raises:
        TypeError, pickle.PicklingError, ...: it cannot be pickled.
    """
    buffer = io.BytesIO()
    ValuePickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()
