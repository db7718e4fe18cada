"""End waits that gloo does not end.

When a connection fails, gloo notifies the buffers that are queued. It does not notify the buffer of a half-sent or
half-received message. That operation waits until its timeout, and no connection is left that could be closed. So once
all connections are closed, this module notifies the remaining buffers with gloo's own function.

Source: https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/pair.cc (`Pair::signalException`: for `tx_` it
notifies only bound buffers, for `rx_` none; torch uses unbound ones)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import ctypes, functools, os, struct, threading, time

_AFTER_S = 0.1  # operations that gloo notifies have ended long before
_TASKS, _MEMORY = "/proc/self/task", "/proc/self/mem"
_WORD = struct.calcsize("P")
_LARGEST_BYTES = 512  # upper bound of a buffer's size, which is 250
_BUFFER = "N4gloo9transport3tcp13UnboundBuffer"
_TELL = f"_Z{_BUFFER}15signalExceptionENSt15__exception_ptr13exception_ptrE"
WORDS = "this operation was aborted to end the cell"  # message of the error that such an operation raises


class StuckWaits:
    """Waits in gloo that remain after their connections were closed. Usable from any thread."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, int], float] = {}  # first seen, by system thread id and address of the buffer
        self._looking = threading.Lock()  # a notified buffer may be freed a moment later

    def tell(self) -> int:
        """End the waits that remain some time after all connections were closed. The first call ends none.

        Returns:
            Number of ended waits.
        """
        if (gloo := _gloo()) is None:
            return 0
        buffer_type, tell = gloo
        with self._looking:
            now = time.monotonic()
            self._since = {found: self._since.get(found, now) for found in _waits(buffer_type)}
            late = [found for found, since in self._since.items() if now - since >= _AFTER_S]
            for found in late:
                tell(found[1])
                del self._since[found]
        return len(late)


def _waits(buffer_type: int) -> Iterator[tuple[int, int]]:
    """Yield each thread that waits in a gloo buffer, with the buffer's address.

    In the kernel, a thread waits on a word of a condition variable, which is part of the buffer.
    """
    try:
        memory = os.open(_MEMORY, os.O_RDONLY)
    except OSError:
        return
    try:
        for thread in os.listdir(_TASKS):
            try:
                # Source: https://man7.org/linux/man-pages/man5/proc_pid_syscall.5.html
                call = Path(_TASKS, thread, "syscall").read_text().split()
                if len(call) > 1 and (buffer := _buffer_around(int(call[1], 16), memory, buffer_type)):
                    yield int(thread), buffer
            except OSError:
                continue  # the thread has ended, or the value is not an address
    finally:
        os.close(memory)


def _buffer_around(address: int, memory: int, buffer_type: int) -> int:
    """Return the address of the object of this type that contains `address`; 0 if there is none.

    An object starts with the address of the virtual function table of its type.
    """
    end = address - address % _WORD
    begin = end - _LARGEST_BYTES
    if begin <= 0:
        return 0
    words = os.pread(memory, _LARGEST_BYTES, begin)
    at = words.rfind(buffer_type.to_bytes(_WORD, sys.byteorder))
    return begin + at if at >= 0 and at % _WORD == 0 else 0


@functools.cache
def _gloo() -> tuple[int, Callable[[int], None]] | None:
    """Return the address of the buffers' virtual function table, and a function that makes the waits of a buffer raise.

    Returns None if torch's library does not contain these names.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        cpp = ctypes.CDLL(str(library))  # the library is loaded; its dependencies are searched too
        functions = ctypes.addressof(ctypes.c_char.in_dll(cpp, f"_ZTV{_BUFFER}E")) + 2 * _WORD
        signal_exception = cpp[_TELL]
        # Source: https://itanium-cxx-abi.github.io/cxx-abi/abi-eh.html, as in `std::make_exception_ptr`
        allocate, initialize = cpp["__cxa_allocate_exception"], cpp["__cxa_init_primary_exception"]
        construct, destroy = cpp["_ZNSt13runtime_errorC1EPKc"], cpp["_ZNSt13runtime_errorD1Ev"]
        point_to = cpp["_ZNSt15__exception_ptr13exception_ptrC1EPv"]
        type_info = ctypes.addressof(ctypes.c_char.in_dll(cpp, "_ZTISt13runtime_error"))
    except (OSError, ValueError, AttributeError):
        return None
    allocate.restype = ctypes.c_void_p

    def tell(buffer: int) -> None:
        error = ctypes.c_void_p(allocate(ctypes.c_size_t(2 * _WORD)))
        initialize(error, ctypes.c_void_p(type_info), destroy)
        construct(error, ctypes.c_char_p(WORDS.encode()))
        pointer = ctypes.c_void_p()
        point_to(ctypes.byref(pointer), error)
        signal_exception(ctypes.c_void_p(buffer), ctypes.byref(pointer))  # this moves the pointer's content

    return functions, tell
