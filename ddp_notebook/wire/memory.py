"""Shared memory between processes of one user on one machine.

The sender writes the data into a memfd and seals it, so that no process can change or shorten it any more. It reports
its process id and the number of the file descriptor; the receiver opens `/proc/PID/fd/FD` and maps the data privately:
no copy, and what the receiver writes stays in its own pages. The kernel lets only processes of the same user, and root,
open that path. A memfd has no name in any folder. It goes when the last process closes or unmaps it, or ends.

A receiver on another machine, or in another process namespace, does not find the memfd. Then the data travels on the
wire.

Source: https://man7.org/linux/man-pages/man2/memfd_create.2.html, https://man7.org/linux/man-pages/man5/proc_pid_fd.5.html
"""

from __future__ import annotations

import mmap
import secrets
import stat
from collections.abc import Sequence
from typing import Any

from ddp_notebook.stdlib import ctypes, fcntl, os, weakref

_WRITE_BYTES = 64 << 20  # at a time: Linux writes at most 2 GB
_MAP_FAILED = ctypes.c_void_p(-1).value
IS_POSSIBLE = hasattr(os, "memfd_create")  # Linux
_SEALS = (fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE) if IS_POSSIBLE else 0


class SealedMemory:
    """Data in a sealed memfd. It lasts as long as this object, and as long as a process has it mapped.

    Args:
        name: by which the receiver recognizes it.
        chunks: the data, in order.

    Raises:
        OSError: the system refuses: no memory, no file descriptor, or a limit on the size of files.
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
        """Return process id, file descriptor and name, by which another process opens it."""
        return [os.getpid(), self.fd, self.name]

    def piece(self, offset: int, nbytes: int) -> bytes:
        """A copy of a part, at most 1 GB, for the wire."""
        return os.pread(self.fd, nbytes, offset)

    def __bytes__(self) -> bytes:
        return b"".join(self.piece(offset, _WRITE_BYTES) for offset in range(0, self.nbytes, _WRITE_BYTES))


def new_name() -> str:
    """A name that no other process can guess, for `SealedMemory`."""
    return f"ddp_notebook-{secrets.token_hex(16)}"


def open_at(place: Sequence[Any], name: str, nbytes: int) -> memoryview | None:
    """Map data that another process holds in a `SealedMemory`. Changes to it stay in this process.

    Nothing is opened unless it is a memfd of this name. It must be sealed: if its process could shorten it, reading it
    would end this process (SIGBUS).

    Args:
        place: its `SealedMemory.place`.
        name: the name that it must have.
        nbytes: the size that it must have.

    Returns:
        The data, or None if there is none on this machine.
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
            os.readlink(f"/proc/self/fd/{opened}") == expected  # the number may have been used again
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
    """Map a file. Python's `mmap` before 3.13 keeps a file descriptor for each mapping, so values that are kept would
    use up those of the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, 0)
    if address == _MAP_FAILED:
        return None
    data = (ctypes.c_ubyte * nbytes).from_address(address)
    # Values in it may be used until the process ends, so it is not unmapped then.
    weakref.finalize(data, libc.munmap, address, nbytes).atexit = False
    return memoryview(data).cast("B")
