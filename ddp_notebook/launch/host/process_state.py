"""Inspect processes that cannot answer: whether they are stopped, and their stacks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from ddp_notebook.launch import processes
from ddp_notebook.messages.hosts import LookReply, Seen
from ddp_notebook.records.words import is_whole_stack
from ddp_notebook.wire import signals

POLL_S = 0.01
_STACK_S = 0.3  # time for a rank to write its stack


class ProcessInspector:
    """Makes ranks write their stacks. A signal handler in C does so, without the GIL.

    Args:
        pids: by number of the process.
        directory: of the stack files.
    """

    def __init__(self, pids: Mapping[int, int], directory: str) -> None:
        held = {process: processes.held(pid) for process, pid in pids.items()}
        self.seen = {
            process: Seen.of(processes.is_stopped_anywhere(pid), held[process]) for process, pid in pids.items()
        }
        self._held = {process: seen.stack for process, seen in self.seen.items()}
        self._files: dict[int, tuple[Path, int]] = {}  # with the size before
        self._until = time.monotonic() + _STACK_S
        for process, pid in pids.items():
            # A held process would write all its stacks together when it continues, which can crash it.
            if signals.STACK is not None and not self.seen[process].is_stopped and not held[process]:
                with contextlib.suppress(OSError):  # the process has ended
                    file = _where(pid, stack_file(directory, process))
                    self._files[process] = file, file.stat().st_size
                    signals.send(pid, signals.STACK, 0)

    def is_done(self) -> bool:
        """Check again. Return whether all stacks seem complete, or the time is over."""
        before = self.seen.copy()
        for process, (file, size) in self._files.items():
            with contextlib.suppress(OSError):
                stack = file.read_bytes()[size:].decode(errors="replace")
                self.seen[process] = Seen(False, self._held[process] + stack)
        are_whole = self.seen == before and all(is_whole_stack(self.seen[process].stack) for process in self._files)
        return are_whole or time.monotonic() > self._until

    def advance(self) -> LookReply | None:
        """Return the reply to a request for this inspection; None if it is not finished."""
        return LookReply(seen=self.seen) if self.is_done() else None


def stack_file(directory: str, process: int) -> str:
    """Return the path of the file for a rank's stacks."""
    return f"{directory}/stack-{process}"


def pymp_folder(directory: str, process: int) -> str:
    """Return the folder for the sockets of `multiprocessing` in a rank and in its children."""
    return f"{directory}/pymp-{process}"


def _where(pid: int, path: str) -> Path:
    """Return the path to read a process's stack file. A file that was removed is still open in the process."""
    if not os.path.exists(path):
        descriptors = f"/proc/{pid}/fd"
        for name in os.listdir(descriptors):
            with contextlib.suppress(OSError):  # it was closed just now
                if os.readlink(f"{descriptors}/{name}") == f"{path} (deleted)":
                    return Path(descriptors) / name
    return Path(path)
