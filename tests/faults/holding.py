"""Hold threads like a debugger: they do not run, but their process is not stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

_SEIZE, _INTERRUPT, _ALL = 0x4206, 0x4207, 0x40000000  # ptrace(2), waitpid(2)
_CODE = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
for thread in map(int, sys.argv[1:]):
    if libc.ptrace({_SEIZE}, thread, None, None) or libc.ptrace({_INTERRUPT}, thread, None, None):
        sys.exit(os.strerror(ctypes.get_errno()))
    os.waitpid(thread, {_ALL})
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(threads: Sequence[int]) -> Iterator[int]:
    """Hold these threads in the block. Yield the process id of the debugger. Skip the test if this is not permitted."""
    command = [sys.executable, "-c", _CODE, *map(str, threads)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as debugger:
        assert debugger.stdout is not None and debugger.stdin is not None and debugger.stderr is not None
        if debugger.stdout.readline() != "held\n":
            pytest.skip(f"ptrace is not allowed here: {debugger.stderr.read()}")
        try:
            yield debugger.pid
        finally:
            debugger.stdin.close()  # the debugger ends, and the threads continue
            debugger.wait(10)


def threads_of(pid: int) -> list[int]:
    """Return all threads of a process."""
    return sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))
