"""Board in memory that the ranks of one machine share.

A rank writes its mark into its own slot and reads the slots of the others. So the last rank continues at once, within
microseconds. The others sleep until then, as they would in the operation itself. (One all_reduce of gloo would cost two
thirds of the operation that it checks.) The memory is a file without a name, which rank 0 creates and the others open
below `/proc`. So no file can be left behind.

A mark is one word, which a processor reads and writes atomically. A process can sleep until such a word changes (a
futex), so neither locks nor messages are needed. The checksum of a note shows that it is complete.
"""

from __future__ import annotations

import platform
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from ddp_notebook.rank.group.guard.board import Compared
from ddp_notebook.rank.group.guard.ledger import Ledger, count_bytes
from ddp_notebook.rank.group.guard.message_comparison import Messages, count_words
from ddp_notebook.rank.group.held_time import CLOCK
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import ctypes, mmap, os, time, zlib

# Source: https://man7.org/linux/man-pages/man2/futex.2.html, the number of the call in the kernel's tables
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)  # 0 if not known
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1
_SLICE_S = 0.2  # after this time, a waiting rank checks whether the board was cut: its wake-up may have been lost
# Asynchronous calls that a rank may post before a slower rank reads the first of them. Overwritten ones are not
# compared.
_DEPTH = 512
_NUMBER = 0x7FFFFFFF  # bits of a mark's word that contain the call's number
_BLOCKS = 0x80000000
_MARK_SHIFT = 32
_HEAD_BYTES = 64
_SPOILED, _CUT = 1, 2  # values of the head
_INTERRUPT_S = 2.0  # time within which a rank's own interrupt arrives after that of another rank
_WAS_CUT = "Connection closed by peer: the operations of this group were ended while ranks were compared"


class BoardCutError(RuntimeError):
    """The operations of the group were ended while a rank waited at the board."""


class BoardTimeoutError(RuntimeError):
    """A rank has not posted its call in time.

    Args:
        rank: that rank, in the group.
        limit_s: the timeout in seconds.
    """

    def __init__(self, rank: int, limit_s: float) -> None:
        super().__init__(
            f"Timed out waiting {limit_s:g} s for rank {rank} of the group to call a collective. Application timeout "
            "caused pair closure"
        )
        self.rank = rank
        self.limit_s = limit_s


class _Interval(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class MemoryBoard:
    """Board in shared memory, see `board.Board`. The ticket of a call is its number.

    Args:
        memory: `_bytes(size, room)` bytes shared by the ranks, initially zeros.
        rank, size: in the group.
        room: maximum length of a note in bytes.
        timeout: how long a rank waits for the others.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int, room: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self._room = room
        self._timeout = timeout
        self._posted = 0
        view = memoryview(memory)
        self._head = view[:_HEAD_BYTES].cast("Q")  # 0 while the board is usable
        at_notes = _HEAD_BYTES + size * _DEPTH * 8
        self._marks = view[_HEAD_BYTES:at_notes].cast("Q")  # (size, _DEPTH): mark | blocks | number
        self._states = view[at_notes : at_notes + size * 8].cast("Q")  # (size,) state of notes: checksum | number
        self._waits = view[at_notes + size * 8 : at_notes + size * 16].cast("Q")  # (size,) offsets at which ranks sleep
        at_messages = at_notes + size * 16
        at_ledger = at_messages + count_words(size) * 8
        at_notes_text = at_ledger + count_bytes(size)
        self.ledger: Ledger | None = Ledger(view[at_ledger:at_notes_text], rank, size)
        self._notes = view[at_notes_text:]  # (size, 4 + room): length, text
        words = view[at_messages : at_messages + count_words(size) * 8].cast("Q")
        self.messages: Messages | None = Messages(words, rank, size)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._at_marks, self._at_states = self._base + _HEAD_BYTES, self._base + at_notes

    @classmethod
    def make(cls, store: Store, rank: int, size: int, room: int, timeout: timedelta) -> MemoryBoard | None:
        """Return the board of a new group. Returns None on all ranks if they do not share a machine.

        Args:
            store: store of the group.
        """
        at, mine, count = PrefixStore("board/", store), -1, _bytes(size, room)
        try:
            if rank == 0:
                mine = _new_file(count)
                at.set("place", _place_of(mine))
            memory = _mapped(_get(at, "place", timeout), count)
            # The last rank publishes whether all ranks have the memory. Then rank 0 may close its file.
            have = at.add("have", 1 if memory is not None else 1 << 32)
            if (have >> 32) + (have & 0xFFFFFFFF) == size:
                at.set("all have", "" if have >> 32 else "yes")
            if _get(at, "all have", timeout) and memory is not None:
                return cls(memory, rank, size, room, timeout)
            return None
        finally:
            if mine >= 0:
                os.close(mine)

    def post(self, mark: int, blocks: bool) -> int:
        self._refuse_if_cut()
        number = self._posted = self._posted + 1
        at = self.rank * _DEPTH + number % _DEPTH
        self._marks[at] = mark << _MARK_SHIFT | (_BLOCKS if blocks else 0) | number & _NUMBER
        _futex(self._at_marks + at * 8, _WAKE, _ALL)
        return number

    def compare(self, ticket: int) -> Compared:
        marks, number = self._marks, ticket & _NUMBER
        at = ticket % _DEPTH
        mine, is_same, all_block = marks[self.rank * _DEPTH + at], True, True
        if mine & _NUMBER != number:  # this rank is too far ahead of this call
            return Compared(True, False)
        began_ns = time.monotonic_ns()
        for place in range(at, self.size * _DEPTH, _DEPTH):
            # A slower rank has an older number here. A rank that is far ahead has a newer one, and cannot be compared
            # any more.
            while (word := marks[place]) & _NUMBER != number and (number - word) & _NUMBER <= _NUMBER >> 1:
                self._wait(self._at_marks + place * 8, word, began_ns, place // _DEPTH)
            if word & _NUMBER != number:  # the rank has continued without waiting for that call
                all_block = False
                continue
            is_same = is_same and word >> _MARK_SHIFT == mine >> _MARK_SHIFT
            all_block = all_block and bool(word & _BLOCKS)
        return Compared(is_same, all_block)

    def swap(self, ticket: int, note: bytes) -> list[bytes]:
        note = note[: self._room]
        stride, number = 4 + self._room, ticket & 0xFFFFFFFF
        at = self.rank * stride
        self._notes[at : at + 4 + len(note)] = len(note).to_bytes(4, "little") + note
        self._states[self.rank] = zlib.crc32(note) << 32 | number
        _futex(self._at_states + self.rank * 8, _WAKE, _ALL)
        began_ns = time.monotonic_ns()
        notes = []
        for rank in range(self.size):
            while True:
                state, at = self._states[rank], rank * stride
                if state & 0xFFFFFFFF == number:
                    length = int.from_bytes(self._notes[at : at + 4], "little")
                    text = bytes(self._notes[at + 4 : at + 4 + length])
                    if zlib.crc32(text) == state >> 32:
                        break
                self._wait(self._at_states + rank * 8, state, began_ns, rank)
            notes.append(text)
        return notes

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def hold_timeout(self, on: bool) -> None:
        """Do nothing: a wait reads the clock of limits itself."""

    @property
    def is_cut(self) -> bool:
        return self._head[0] != 0

    def spoil(self) -> None:
        if not self.is_cut:
            self._head[0] = _SPOILED

    def cut(self) -> None:
        self._head[0] = _CUT
        for offset in self._waits:
            if offset:
                _futex(self._base + offset, _WAKE, _ALL)

    def _refuse_if_cut(self) -> None:
        """Raise an error if the board was cut.

        If it was marked as unusable because of an interrupt, wait for this rank's own interrupt first. Then the rank
        counts as interrupted, not as failed.
        """
        until_s = time.monotonic() + _INTERRUPT_S
        while head := self._head[0]:
            if head == _CUT or time.monotonic() > until_s:
                raise BoardCutError(_WAS_CUT)
            time.sleep(_INTERRUPT_S / 200)

    def _wait(self, address: int, word: int, began_ns: int, rank: int) -> None:
        """Sleep while this word is unchanged, for a moment at most."""
        self._waits[self.rank] = address - self._base  # first: from now on a cut wakes this rank
        self._refuse_if_cut()
        left_s = self._timeout.total_seconds() - CLOCK.elapsed_s(began_ns)
        if left_s <= 0:
            self.cut()  # like gloo: later ranks must not start without this rank
            raise BoardTimeoutError(rank, self._timeout.total_seconds())
        _futex(address, _WAIT, word & 0xFFFFFFFF, min(left_s, _SLICE_S))


def _bytes(size: int, room: int) -> int:
    words = size * (_DEPTH * 8 + 8 + 8 + 4 + room) + count_words(size) * 8
    return _HEAD_BYTES + words + count_bytes(size)  # allocated at first use


def _machine() -> str:
    """Return an identifier of this machine and of its process id namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"


def _get(store: Store, key: str, timeout: timedelta) -> str:
    store.wait([key], timeout)
    return str(store.get(key).decode())


def _new_file(count: int) -> int:
    """Return a memory file without a name; -1 if the system has none."""
    if not _SYS_FUTEX or not hasattr(os, "memfd_create"):
        return -1
    try:
        file = os.memfd_create("ddp_notebook-board")
    except OSError:
        return -1
    try:
        os.ftruncate(file, count)
    except OSError:
        os.close(file)
        return -1
    return file


def _place_of(file: int) -> str:
    """Return how other ranks find and verify the file; "" if they cannot."""
    try:
        found = os.fstat(file)
        # The process id in /proc, which may belong to another namespace than `os.getpid`.
        return f"{_machine()} {os.readlink('/proc/self')} {file} {found.st_dev} {found.st_ino}"
    except OSError:
        return ""


def _mapped(place: str, count: int) -> mmap.mmap | None:
    """Return the memory at the place that rank 0 has published; None if it is not accessible."""
    try:
        *machine, process, file, device, inode = place.split()
        path = f"/proc/{process}/fd/{file}"
        if not _SYS_FUTEX or " ".join(machine) != _machine() or not _is(os.stat(path), device, inode):
            return None
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(opened, count) if _is(os.fstat(opened), device, inode) else None
        finally:
            os.close(opened)
    except (OSError, ValueError):
        return None


def _is(found: os.stat_result, device: str, inode: str) -> bool:
    return (str(found.st_dev), str(found.st_ino)) == (device, inode)


_libc = ctypes.CDLL(None, use_errno=True)
_futex_call: Any = _libc.syscall


def _futex(address: int, operation: int, value: int, timeout_s: float = 0.0) -> None:
    """Sleep while the word at this address has a value, up to a time limit; or wake the sleeping processes."""
    _futex_call(
        ctypes.c_long(_SYS_FUTEX),
        ctypes.c_void_p(address),
        ctypes.c_int(operation),
        ctypes.c_uint(value),
        ctypes.byref(_Interval(0, int(timeout_s * 1e9))),
        None,
        0,
    )
