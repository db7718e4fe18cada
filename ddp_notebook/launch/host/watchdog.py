"""The watchdog of a host server: ends it when the owner is gone and the server cannot notice.

A host server ends by itself with its owner, and all processes end with it. A server that was stopped (SIGSTOP, a
debugger) or hangs would stay for ever, and they would too. The watchdog is a process of its own, forked before torch is
imported: it waits for nobody's answer, and no rank that holds the GIL can keep it from looking.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from ddp_notebook.launch import processes

_LOOK_S = 1.0
_END_S = 8.0  # what the server gets to end all that is below it, once it goes on


def start(owner_lives: Callable[[], bool], tidy_up: Callable[[], None], close_inherited: Callable[[], None]) -> int:
    """Fork the watchdog of this process, the host server. It ends with the server.

    Args:
        owner_lives: whether the owner lives, whose end is the server's.
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
        os.kill(server, signal.SIGCONT)  # now it sees that its owner is gone, and ends everything in order
    until = time.monotonic() + _END_S
    while os.getppid() == server:
        if time.monotonic() > until:
            tidy_up()
            _kill_all(server)
        time.sleep(0.1)


def _kill_all(server: int) -> None:
    """The server last: this process ends with it. Those that tidy up end by themselves when the others have gone."""
    family = [process for process in reversed(processes.descendants(server)) if process.pid != os.getpid()]
    processes.kill(process for process in family if not processes.tidies_up(process))
