"""End processes and their descendants step by step, since the server's loop must not wait."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection

import psutil

from ddp_notebook.launch import processes
from ddp_notebook.messages.hosts import EndReply
from ddp_notebook.wire.signals import END

_GIVE_UP_S = 3.0  # after SIGKILL, until the rest is reported as still running


class Ending:
    """Ends processes: sends `END` at once, and SIGKILL later.

    Args:
        leaders: process ids, each leading an OS session.
        grace_s: seconds between the two signals.
        children: ids of the server's living children, always up to date.
        adopted: finds descendants of ranks that have lost their parent; they end too.
    """

    def __init__(
        self,
        leaders: set[int],
        grace_s: float,
        children: Collection[int],
        adopted: Callable[[], list[psutil.Process]] = list,
    ) -> None:
        self._leaders = leaders
        self._children = children
        self._adopted = adopted
        self._members: list[psutil.Process] = []
        for pid in leaders:
            tree = processes.descendants(pid)
            self._members += tree
            for process in tree[:1]:  # only the leader gets the chance to end in order
                with contextlib.suppress(psutil.Error):
                    process.send_signal(END)
        self._kill_at = time.monotonic() + grace_s
        self._tidy_until = self._kill_at + processes.TIDY_S
        self._give_up_at = self._kill_at + _GIVE_UP_S

    def advance(self) -> EndReply | None:
        """Take the next step. Returns the reply when all have ended or the time is over, else None."""
        now = time.monotonic()
        leaders_left = self._leaders.intersection(self._children)
        if leaders_left and now < self._kill_at:
            return None
        # processes started in the meantime are found by the OS session of their leader
        alive = [p for p in {*self._members, *of_sessions(self._leaders), *self._adopted()} if is_alive(p)]
        others = [process for process in alive if not processes.tidies_up(process)]
        if leaders_left or others:
            self._tidy_until = now + processes.TIDY_S
        processes.kill(alive if now > min(self._tidy_until, self._give_up_at - processes.TIDY_S) else others)
        if (alive or leaders_left) and now <= self._give_up_at:
            return None
        return EndReply(left=[process.pid for process in alive])


def of_sessions(leaders: set[int]) -> list[psutil.Process]:
    """Return living processes below this one that belong to the OS sessions of these leaders."""
    found = []
    for process in processes.descendants(os.getpid())[1:]:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) in leaders and is_alive(process):
                found.append(process)
    return found


def adopted(ours: Collection[int]) -> list[psutil.Process]:
    """Return orphaned processes below this one: all children except `ours`, with their descendants."""
    orphans = [process for process in psutil.Process().children() if process.pid not in ours]
    return [process for orphan in orphans for process in processes.descendants(orphan.pid)]


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
