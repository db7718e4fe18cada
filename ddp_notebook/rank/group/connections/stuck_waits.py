"""Waits that gloo forgets to end.

When a connection fails, gloo tells the buffers that wait for their turn. Of a message that is half sent, or half
received, it tells nobody: that operation waits until its timeout, and no connection is left that could be cut. So once
all connections are cut, what still waits is told here, in gloo's stead and by its own function.

Source: https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/pair.cc (`Pair::signalException`: of what is in
`tx_` it tells the bound buffers alone, of `rx_` none; torch uses unbound ones)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ddp_notebook.stdlib import ctypes, functools, os, struct, threading, time

_AFTER_S = 0.1  # an operation that is told by gloo has long ended then
_TASKS, _MEMORY = "/proc/self/task", "/proc/self/mem"
_WORD = struct.calcsize("P")
_LARGEST_BYTES = 512  # of a buffer: it has 250
_BUFFER = "N4gloo9transport3tcp13UnboundBuffer"
_TELL = f"_Z{_BUFFER}15signalExceptionENSt15__exception_ptr13exception_ptrE"
WORDS = "the connection of this operation was cut"  # the message of the error that such an operation raises


class StuckWaits:
    """What waits in gloo although its connections have been cut. From any thread."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, int], float] = {}  # by thread of the system and address of the buffer
        self._looking = threading.Lock()  # a buffer that was told may be gone a moment later

    def tell(self) -> int:
        """All connections have been cut. End what has waited for a while in spite of that: at the first call nothing.

        Returns:
            How many waits were ended.
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
    """Each thread that waits in a buffer of gloo's, with the address of that. What a thread waits for in the kernel is
    a word of a condition variable, which is part of its buffer."""
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
                continue  # ended meanwhile, or no address
    finally:
        os.close(memory)


def _buffer_around(address: int, memory: int, buffer_type: int) -> int:
    """The object of this type that the address is part of: an object begins with the address of its type's functions.
    0: there is none."""
    end = address - address % _WORD
    begin = end - _LARGEST_BYTES
    if begin <= 0:
        return 0
    words = os.pread(memory, _LARGEST_BYTES, begin)
    at = words.rfind(buffer_type.to_bytes(_WORD, sys.byteorder))
    return begin + at if at >= 0 and at % _WORD == 0 else 0


@functools.cache
def _gloo() -> tuple[int, Callable[[int], None]] | None:
    """The address of the functions of gloo's buffers, and what lets one raise in whoever waits in it. None: torch's
    library does not have them by these names."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        cpp = ctypes.CDLL(str(library))  # it is loaded; its own libraries are searched too
        functions = ctypes.addressof(ctypes.c_char.in_dll(cpp, f"_ZTV{_BUFFER}E")) + 2 * _WORD
        signal_exception = cpp[_TELL]
        # Source: https://itanium-cxx-abi.github.io/cxx-abi/abi-eh.html; what `std::make_exception_ptr` does.
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
        signal_exception(ctypes.c_void_p(buffer), ctypes.byref(pointer))  # which takes the pointer's content

    return functions, tell
