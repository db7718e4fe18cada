"""Shared memory between processes of one user, and several buffers as one."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ddp_notebook.wire import shared_memory
from ddp_notebook.wire.buffers import join, split
from ddp_notebook.wire.shared_memory import SealedMemory, new_name, open_at

OPEN = """
import sys
from ddp_notebook.wire.shared_memory import open_at
data = open_at([int(sys.argv[1]), int(sys.argv[2]), ""], sys.argv[3], int(sys.argv[4]))
print(None if data is None else bytes(data[:5]))
"""


def opened_elsewhere(held: SealedMemory, **how) -> str:
    """Open some memory in another process, and return its output."""
    pid, fd, name = held.place
    command = [sys.executable, "-c", OPEN, str(pid), str(fd), name, str(len(held))]
    return subprocess.run(command, capture_output=True, text=True, check=True, **how).stdout.strip()


@pytest.mark.processes
def test_another_process_opens_the_memory_until_it_is_closed():
    held = SealedMemory(new_name(), [b"hello", bytes(100_000)])
    assert len(held) == 100_005 and bytes(held)[:6] == b"hello\0"
    assert opened_elsewhere(held) == "b'hello'"
    held.close()
    assert opened_elsewhere(held) == "None"


@pytest.mark.processes
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_no_other_user_can_open_it():
    held = SealedMemory(new_name(), [b"hello"])
    path = f"/proc/{os.getpid()}/fd/{held.fd}"
    code = f"import os\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\nos.open({path!r}, os.O_RDONLY)"
    tried = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "PermissionError" in tried.stderr, tried
    assert os.fstat(held.fd).st_mode & 0o777 == 0o600


def test_what_a_receiver_writes_stays_its_own():
    held = SealedMemory(new_name(), [b"hello"])
    first, second = (open_at(held.place, held.name, 5) for _ in range(2))
    assert first is not None and second is not None
    first[0] = ord("J")
    assert (bytes(first), bytes(second), bytes(held)) == (b"Jello", b"hello", b"hello")
    with pytest.raises(PermissionError):
        os.ftruncate(held.fd, 0)
    with pytest.raises(PermissionError):
        os.write(held.fd, b"x")


def test_a_mapping_outlives_its_sender_and_keeps_no_file_open():
    held = SealedMemory(new_name(), [bytes(range(256)) * 1000])
    files = len(os.listdir("/proc/self/fd"))
    data = open_at(held.place, held.name, len(held))
    assert data is not None and len(os.listdir("/proc/self/fd")) == files
    array = np.frombuffer(data, np.uint8)
    held.close()
    del held, data
    gc.collect()
    assert array[-1] == 255 and mapped() == 1
    del array
    gc.collect()
    assert mapped() == 0


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:ddp_notebook-")


def test_what_is_not_the_expected_memory_is_not_opened(tmp_path):
    held = SealedMemory(new_name(), [b"hello"])
    pid, fd, name = held.place
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for place, its_name, nbytes in [
            ([pid, fd, name], new_name(), 5),
            ([pid, fd, name], name, 4),
            ([pid, fd, name], name, 6),
            ([pid, fd, name], name, 0),
            ([pid, 10**6, name], name, 5),
            ([2**40, fd, name], name, 5),
            ([-1, fd, name], name, 5),
            ([pid, reader, name], name, 5),
            ([f"{pid}", fd, name], name, 5),
            ([pid, "../environ", name], name, 5),
            ([pid], name, 5),
            ([], name, 5),
        ]:
            assert open_at(place, its_name, nbytes) is None, (place, its_name, nbytes)
    finally:
        os.close(reader)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW])
def test_memory_that_its_process_can_still_change_is_not_opened(seals):
    """A file that is shortened while it is mapped ends its reader with SIGBUS."""
    name = new_name()
    fd = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, b"hello")
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        assert open_at([os.getpid(), fd, name], name, 5) is None
    finally:
        os.close(fd)


@pytest.mark.parametrize(("what", "most"), [(resource.RLIMIT_FSIZE, 1000), (resource.RLIMIT_NOFILE, 0)])
def test_a_system_that_refuses_leaves_nothing_open(what, most):
    before = resource.getrlimit(what)
    files = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(what, (most, before[1]))
    try:
        with pytest.raises(OSError):
            SealedMemory(new_name(), [bytes(100_000)])
    finally:
        resource.setrlimit(what, before)
    assert len(os.listdir("/proc/self/fd")) == files


def test_without_memfd_there_is_none(monkeypatch):
    monkeypatch.setattr(shared_memory, "IS_POSSIBLE", False)
    with pytest.raises(OSError, match="no memfd_create"):
        SealedMemory(new_name(), [b"x"])
    assert open_at([1, 2, ""], "", 5) is None


# ---- parts


def test_parts_are_aligned_and_come_apart_again():
    wanted = [b"", b"abc", bytes(64), b"", bytes(1000)]
    joined = b"".join(join([[part] for part in wanted]))
    came = split(joined)
    assert [bytes(part) for part in came] == wanted
    start = np.frombuffer(joined, np.uint8).ctypes.data
    assert [(np.frombuffer(part, np.uint8).ctypes.data - start) % 64 for part in came if part] == [0, 0, 0]


def test_a_damaged_table_is_an_error_or_stays_within_the_buffer():
    joined = b"".join(join([[b"abc"], [bytes(100)], [b""]]))
    dice = random.Random(0)
    for _ in range(5000):
        damaged = bytearray(joined[: dice.choice([len(joined), dice.randrange(len(joined) + 1)])])
        for _ in range(dice.randrange(4)):
            if damaged:
                damaged[dice.randrange(min(len(damaged), 40))] = dice.choice([0, 1, 2, 3, 127, 128, 255])
        try:
            parts = split(damaged)
        except ValueError:
            continue
        assert sum(map(len, parts)) <= len(damaged)
