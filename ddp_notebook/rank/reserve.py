"""File descriptors and memory that a rank holds back, so that it can work where a cell has used up the rest.

The reserve is held while code of the user runs. It is lent where the rank answers the notebook, shows a traceback or
forms a group, and is taken back afterwards, as far as there is room again. Memory is also lent between cells, since
almost every step of a rank needs some.
"""

from __future__ import annotations

import errno
import mmap
import resource
from collections.abc import Callable
from typing import TypeVar

from ddp_notebook.records import shortages
from ddp_notebook.stdlib import contextlib, fcntl, os, threading, time

_DESCRIPTORS = 48  # sockets and files of a group that forms, besides those to the other ranks
_MEMORY_BYTES = 64 << 20  # address space, without used pages. A group that forms starts threads with stacks of 8 MiB
_PIECE_BYTES = 4 << 20  # small pieces still fit if one large block does not
_KEPT = 2  # so many pieces are lent for the shortest steps only: threads of the user may take what is lent
_MEMORY_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
_SHARE = 4  # at most so much of the limit is held: a quarter
_TRIES = 3  # another thread may take what was lent
_PAUSE_S = 0.02
T = TypeVar("T")

_lock = threading.RLock()
_descriptors: list[int] = []
_wanted = 0
_file_number = -1  # inode of the file that all reserved descriptors refer to
_memory: list[mmap.mmap] = []
_kept: list[mmap.mmap] = []
_lent = 0  # to so many at the same time
_held_bytes = 0  # memory that was held last
_runs_cell = False
_used = 0  # descriptors when it was lent, if none was left then
_pid = 0


def hold(world_size: int) -> None:
    """Hold what groups of so many ranks need. A further call changes the number."""
    global _wanted, _pid
    with _lock:
        if not _pid:
            os.register_at_fork(after_in_child=_drop)
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = 1 << 20 if soft == resource.RLIM_INFINITY else soft
        _wanted, _pid = min(_DESCRIPTORS + 2 * world_size, limit // _SHARE), os.getpid()
        if not _lent:
            _take()


class Loan:
    """A block in which this process may use the reserve. A class, since a generator needs memory before it gives any.

    Example:
        >>> with lent():
        ...     pass
    """

    __slots__ = ("_is_last",)

    def __init__(self, *, is_last: bool) -> None:
        self._is_last = is_last

    def __enter__(self) -> None:
        global _lent
        with _lock:
            _lent += 1
            if _lent == 1:
                _note_and_give()
            if self._is_last:
                _close(_kept)

    def __exit__(self, *_: object) -> None:
        global _lent
        with _lock:
            _lent -= 1
            if not _lent:
                _take()


_LOAN, _LAST = Loan(is_last=False), Loan(is_last=True)


def lent() -> Loan:
    """Let this process use the reserve in a `with` block."""
    return _LOAN


def use(function: Callable[[], T]) -> T:
    """Call a function, and again with the reserve where it fails for want of descriptors or memory.

    Raises:
        what the function raises.
    """
    for _ in range(_TRIES - 1):
        try:
            return function()
        except (OSError, MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and not shortages.kinds(error):
                raise
        with _LOAN:
            try:
                return function()
            except (OSError, MemoryError, RuntimeError) as error:
                if not isinstance(error, MemoryError) and not shortages.kinds(error):
                    raise
    with _LAST:
        return function()


def use_patiently(function: Callable[[], T], until: float = float("inf")) -> T:
    """Call a function as `use` does, and again until a time: a thread of the user may take what was lent.

    Args:
        until: seconds of `time.monotonic`. Without it the call returns when there is memory again.

    Raises:
        what the function raises, and MemoryError after that time.
    """
    while True:
        try:
            return use(function)
        except MemoryError:
            if time.monotonic() > until:
                raise
        time.sleep(_PAUSE_S)


def used_descriptors() -> int:
    """Return how many descriptors are in use, with those of the reserve, if none is left for a cell; 0: some are."""
    with _lock:
        if _lent:
            return _used
        if not _is_exhausted():
            return 0
        with lent():
            return _used


def begin_cell() -> None:
    """Hold memory from now on: code of the user runs."""
    global _runs_cell
    with _lock:
        _runs_cell = True
        if not _lent:
            _take_memory()


def end_cell() -> None:
    """Lend most of the memory until the next cell if this process has a limit of memory. Without one this takes no
    time."""
    global _runs_cell
    with _lock:
        _runs_cell = False
        if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in _MEMORY_LIMITS):
            _close(_memory)


def lent_bytes() -> int:
    """Return how much memory is lent now. For a cell it counts as used."""
    return max(0, _held_bytes - sum(map(len, _memory)) - sum(map(len, _kept)))


def _close(pieces: list[mmap.mmap]) -> None:
    for piece in pieces:
        piece.close()
    pieces.clear()


def _take_memory() -> None:
    global _held_bytes
    if _pid != os.getpid():
        return
    with contextlib.suppress(OSError, MemoryError):
        while len(_kept) < _KEPT:
            _kept.append(_mapped(_PIECE_BYTES))
    if not _runs_cell or _memory:
        return
    with contextlib.suppress(OSError, MemoryError):
        _memory.append(_mapped(_MEMORY_BYTES))
    if not _memory:
        with contextlib.suppress(OSError, MemoryError):
            while len(_memory) * _PIECE_BYTES < _MEMORY_BYTES:
                _memory.append(_mapped(_PIECE_BYTES))
    _held_bytes = sum(map(len, _memory)) + sum(map(len, _kept))


def _mapped(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _note_and_give() -> None:
    global _used
    _close(_memory)
    is_exhausted, count = _is_exhausted(), len(_descriptors)
    _give()
    _used = 0
    if is_exhausted:
        try:
            _used = shortages.open_descriptors() + count
        except OSError:  # the limit is lower than the numbers of all that are open, so the reserve does not help
            _used = resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _is_exhausted() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno == errno.EMFILE
    return False


def _give() -> None:
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):  # code of the user has closed it, and may have opened another file there
            if os.fstat(descriptor).st_ino == _file_number:
                os.close(descriptor)
    _descriptors.clear()


def _take() -> None:
    global _file_number
    if _pid != os.getpid():
        return
    try:
        if not _descriptors:
            _descriptors.append(_new_file())
            _file_number = os.fstat(_descriptors[0]).st_ino
        while len(_descriptors) < _wanted:
            _descriptors.append(fcntl.fcntl(_descriptors[0], fcntl.F_DUPFD_CLOEXEC, 3))
    except (OSError, MemoryError):
        pass  # no room: the end of the next loan tries again
    _take_memory()


def _new_file() -> int:
    """Open a file that no other descriptor of this process is for."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ddp_notebook-reserve")
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def _drop() -> None:
    """In a forked child: it has its own limits, and nothing to do for the notebook."""
    global _lock, _lent, _wanted
    _lock, _lent, _wanted = threading.RLock(), 0, 0
    _close(_memory)
    _close(_kept)
    _give()
