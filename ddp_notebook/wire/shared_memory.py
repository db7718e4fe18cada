"""Shared memory between processes of one user on one machine.

The sender writes the data into a memfd and seals it, so that no process can change or shrink it. It sends its process
id and the number of the file descriptor. The receiver opens `/proc/PID/fd/FD` and maps the data privately: without a
copy, and its own writes stay in its own pages. The kernel allows only the same user and root to open that path. A memfd
has no file name. The kernel frees it when no process has it open or mapped.

A receiver on another machine or in another process namespace cannot open the memfd. Then the data is sent over ZeroMQ.

Source: https://man7.org/linux/man-pages/man2/memfd_create.2.html,
https://man7.org/linux/man-pages/man5/proc_pid_fd.5.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import ctypes, fcntl, mmap, os, secrets, stat, weakref

_WRITE_BYTES = 64 << 20  # bytes per call; Linux writes at most 2 GB in one call
_MAP_FAILED = ctypes.c_void_p(-1).value
IS_POSSIBLE = hasattr(os, "memfd_create")  # Linux
_SEALS = (fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE) if IS_POSSIBLE else 0


class SealedMemory:
    """Data in a sealed memfd. The memory exists while this object exists or a process maps it.

    Args:
        name: name that the receiver checks.
        chunks: the data, in order.

    Raises:
        OSError: memory or file descriptors are exhausted, or the data exceeds the limit on file sizes.
    """

    def __init__(self, name: str, chunks: Sequence[Any]) -> None:
        if not IS_POSSIBLE:
            raise OSError("this system has no memfd_create")
        self.name = name
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.close = weakref.finalize(self, os.close, self.fd)
        self.nbytes = 0
        try:
            os.fchmod(self.fd, 0o600)
            for chunk in chunks:
                rest = memoryview(chunk).cast("B")
                self.nbytes += len(rest)
                while rest:
                    rest = rest[os.write(self.fd, rest[:_WRITE_BYTES]) :]
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return self.nbytes

    @property
    def place(self) -> list[Any]:
        """Return the process id, file descriptor and name with which another process opens the memory."""
        return [os.getpid(), self.fd, self.name]

    def piece(self, offset: int, nbytes: int) -> bytes:
        """Return a copy of a part, at most 1 GB, to send over ZeroMQ."""
        return os.pread(self.fd, nbytes, offset)

    def __bytes__(self) -> bytes:
        return b"".join(self.piece(offset, _WRITE_BYTES) for offset in range(0, self.nbytes, _WRITE_BYTES))


def new_name() -> str:
    """Return a random name for `SealedMemory` that other processes cannot guess."""
    return f"ddp_notebook-{secrets.token_hex(16)}"


def open_at(place: Sequence[Any], name: str, nbytes: int) -> memoryview | None:
    """Map the data of a `SealedMemory` of another process. Writes to it stay in this process.

    The memory must be a memfd with this name, and it must be sealed. If its process could shrink it, reading it could
    kill this process with SIGBUS.

    Args:
        place: `SealedMemory.place` of the sender.
        name: expected name.
        nbytes: expected size in bytes.

    Returns:
        The data, or None if this machine has no such memory.
    """
    match place:
        case [int(pid), int(fd), _] if IS_POSSIBLE and nbytes > 0:
            path = f"/proc/{pid}/fd/{fd}"
        case _:
            return None
    expected = f"/memfd:{name} (deleted)"
    try:
        if os.readlink(path) != expected:
            return None
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        found = os.fstat(opened)
        is_right = (
            os.readlink(f"/proc/self/fd/{opened}") == expected  # the descriptor number may have been reused
            and stat.S_ISREG(found.st_mode)
            and found.st_size == nbytes
            and fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        )
        return _mapped(opened, nbytes) if is_right else None
    except OSError:
        return None
    finally:
        os.close(opened)


def _mapped(fd: int, nbytes: int) -> memoryview | None:
    """Map a file privately, without keeping a file descriptor.

    Python's `mmap` before 3.13 keeps a descriptor for each mapping, so many mapped values would exhaust them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, 0)
    if address == _MAP_FAILED:
        return None
    data = (ctypes.c_ubyte * nbytes).from_address(address)
    # Values in the mapping may be used until the process exits, so do not unmap it at exit.
    weakref.finalize(data, libc.munmap, address, nbytes).atexit = False
    return memoryview(data).cast("B")
