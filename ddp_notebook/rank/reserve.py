"""File descriptors and memory that a rank holds back, so that it still works when a cell has used up the rest.

The rank holds the reserve while user code runs. It lends the reserve while it answers the notebook, shows a traceback
or forms a group. Afterwards it takes back as much as there is room for. It also lends memory between cells, since
almost every step of a rank needs some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ddp_notebook.records import shortages
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, errno, fcntl, mmap, os, resource, threading, time

_DESCRIPTORS = 48  # sockets and files of a forming group, without those to the other ranks
_MEMORY_BYTES = 64 << 20  # address space, no used pages. A forming group starts threads with 8 MiB stacks
_PIECE_BYTES = 4 << 20  # small pieces still fit if one large block does not
_KEPT = 2  # number of pieces that are lent only for the shortest steps: user threads may take lent memory
_MEMORY_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
_SHARE = 4  # at most a quarter of the limit is held
_TRIES = 3  # another thread may take the lent resources
_PAUSE_S = 0.02
T = TypeVar("T")

_lock = threading.RLock()
_descriptors: list[int] = []
_wanted = 0
_file_number = -1  # inode of the file that all reserved descriptors refer to
_memory: list[mmap.mmap] = []
_kept: list[mmap.mmap] = []
_lent = 0  # number of current loans
_held_bytes = 0  # most recently held memory
_runs_cell = False
_used = 0  # descriptors in use at the time of the loan, if none was free
_pid = 0


def hold(world_size: int) -> None:
    """Hold resources for groups with this number of ranks. A further call changes the number."""
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
    """Block in which this process may use the reserve. A class, since a generator needs memory itself before it starts.

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
    """Return a context manager in which this process may use the reserve."""
    return _LOAN


def use(function: Callable[[], T]) -> T:
    """Call a function. If it fails for lack of descriptors or memory, call it again with the reserve.

    Raises:
        Any exception of the function.
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
    """Call a function as `use` does, and repeat it on MemoryError: a user's thread may take the lent memory.

    Args:
        until: time limit in seconds of `time.monotonic`. Without it, the call returns when there is memory again.

    Raises:
        Any exception of the function; MemoryError after the time limit.
    """
    while True:
        try:
            return use(function)
        except MemoryError:
            if time.monotonic() > until:
                raise
        time.sleep(_PAUSE_S)


def used_descriptors() -> int:
    """Return the number of used descriptors, including the reserve, if none is free for a cell; otherwise 0."""
    with _lock:
        if _lent:
            return _used
        if not _is_exhausted():
            return 0
        with lent():
            return _used


def begin_cell() -> None:
    """Hold memory from now on, while user code runs."""
    global _runs_cell
    with _lock:
        _runs_cell = True
        if not _lent:
            _take_memory()


def end_cell() -> None:
    """Lend most of the memory until the next cell if this process has a memory limit. Otherwise return at once."""
    global _runs_cell
    with _lock:
        _runs_cell = False
        if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in _MEMORY_LIMITS):
            _close(_memory)


def lent_bytes() -> int:
    """Return the number of lent bytes. For a cell they count as used."""
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
        except OSError:  # the limit is lower than the numbers of the open descriptors, so the reserve does not help
            _used = resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _is_exhausted() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno == errno.EMFILE
    return False


def _give() -> None:
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):  # user code has closed it, and may have opened another file with this number
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
    """Open a file that no other descriptor of this process refers to."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ddp_notebook-reserve")
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def _drop() -> None:
    """Release everything in a forked child: it has its own limits and does no work for the notebook."""
    global _lock, _lent, _wanted
    _lock, _lent, _wanted = threading.RLock(), 0, 0
    _close(_memory)
    _close(_kept)
    _give()
