"""File descriptors and memory that a rank holds back, so that it can work where a cell has used up the rest.

The reserve is held while code of the user runs. It is lent where the rank answers the notebook, shows a traceback or
forms a group, and is taken back afterwards, as far as there is room again.
"""

from __future__ import annotations

import errno
import mmap
import resource
from collections.abc import Callable, Iterator
from typing import TypeVar

from ddp_notebook.records import shortages
from ddp_notebook.stdlib import contextlib, fcntl, os, threading

_DESCRIPTORS = 48  # sockets and files of a group that forms, besides those to the other ranks
_MEMORY_BYTES = 24 << 20  # address space, without used pages. The stack of a thread takes 8 MiB
_SHARE = 4  # at most so much of the limit is held: a quarter
_TRIES = 3  # another thread may take what was lent
T = TypeVar("T")

_lock = threading.RLock()
_descriptors: list[int] = []
_wanted = 0
_file_number = -1  # inode of the file that all reserved descriptors refer to
_memory: mmap.mmap | None = None
_lent = 0  # to so many at the same time
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


@contextlib.contextmanager
def lent() -> Iterator[None]:
    """Let this process use the reserve."""
    global _lent
    with _lock:
        _lent += 1
        if _lent == 1:
            _note_and_give()
    try:
        yield
    finally:
        with _lock:
            _lent -= 1
            if not _lent:
                _take()


def use(function: Callable[[], T]) -> T:
    """Call a function, and again with the reserve where it fails for want of descriptors or memory.

    Raises:
        what the function raises.
    """
    for _ in range(_TRIES - 1):
        try:
            return function()
        except (OSError, MemoryError, RuntimeError) as error:
            if not shortages.kinds(error):
                raise
        with lent():
            try:
                return function()
            except (OSError, MemoryError, RuntimeError) as error:
                if not shortages.kinds(error):
                    raise
    with lent():
        return function()


def used_descriptors() -> int:
    """Return how many descriptors are in use, with those of the reserve, if none is left for a cell; 0: some are."""
    with _lock:
        if _lent:
            return _used
        if not _is_exhausted():
            return 0
        with lent():
            return _used


def _note_and_give() -> None:
    global _used
    is_exhausted, count = _is_exhausted(), len(_descriptors)
    _give()
    _used = 0
    if is_exhausted:
        with contextlib.suppress(OSError):
            _used = shortages.open_descriptors() + count


def _is_exhausted() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno == errno.EMFILE
    return False


def _give() -> None:
    global _memory
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):  # code of the user has closed it, and may have opened another file there
            if os.fstat(descriptor).st_ino == _file_number:
                os.close(descriptor)
    _descriptors.clear()
    if _memory is not None:
        _memory.close()
        _memory = None


def _take() -> None:
    global _memory, _file_number
    if _pid != os.getpid():
        return
    try:
        if not _descriptors:
            _descriptors.append(_new_file())
            _file_number = os.fstat(_descriptors[0]).st_ino
        while len(_descriptors) < _wanted:
            _descriptors.append(fcntl.fcntl(_descriptors[0], fcntl.F_DUPFD_CLOEXEC, 3))
        if _memory is None:
            _memory = mmap.mmap(-1, _MEMORY_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError):
        pass  # no room: the end of the next loan tries again


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
    _give()
