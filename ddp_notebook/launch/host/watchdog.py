"""The watchdog of a host server: ends it when the owner is gone and the server cannot notice.

A host server ends with its owner, and ends all its processes then. A server that hangs or was stopped (SIGSTOP, a
debugger) would stay forever, with its processes. The watchdog is a separate process, forked before torch is imported.
It does not wait for answers of other processes, and a rank that holds the GIL does not affect it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from ddp_notebook.launch import processes

_LOOK_S = 1.0
_END_S = 8.0  # time for a continued server to end all its processes


def start(owner_lives: Callable[[], bool], tidy_up: Callable[[], None], close_inherited: Callable[[], None]) -> int:
    """Fork the watchdog of this process, the host server. It ends with the server.

    Args:
        owner_lives: returns whether the owner is alive; the server ends with its owner.
        tidy_up: removes the server's folders.
        close_inherited: closes the server's stream to its owner, which only the server may keep open.

    Returns:
        Its process id.
    """
    server = os.getpid()
    if (pid := os.fork()) != 0:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # reset the handlers of a running server
        os.setsid()  # a signal that stops the server's process group does not stop this process
        processes.die_with_parent(server)
        close_inherited()
        _watch(server, owner_lives, tidy_up)
    finally:
        os._exit(0)


def _watch(server: int, owner_lives: Callable[[], bool], tidy_up: Callable[[], None]) -> None:
    while owner_lives():
        if os.getppid() != server:
            return
        time.sleep(_LOOK_S)
    if os.getppid() == server:
        os.kill(server, signal.SIGCONT)  # the server now notices the end of its owner, and ends all processes in order
    until = time.monotonic() + _END_S
    while os.getppid() == server:
        if time.monotonic() > until:
            tidy_up()
            _kill_all(server)
        time.sleep(0.1)


def _kill_all(server: int) -> None:
    """Kill the server's processes, then the server, with which this process ends.

    Processes that clean up after the others end by themselves.
    """
    family = [process for process in reversed(processes.descendants(server)) if process.pid != os.getpid()]
    processes.kill(process for process in family if not processes.tidies_up(process))
