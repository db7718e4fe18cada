"""Between a kernel and the agents of torchrun's that it starts: ends them and all below them, when it is told to or the
kernel has gone, however that went. `python -m ddp_notebook.launch.elastic.parent AGENTS FD OPTION-OF-TORCHRUN ...`,
where FD is the listening socket of the store at which the agents meet.

    stdin    "stop", or its end: end the agents as torchrun is ended, by SIGTERM; "kill": at once
    stdout   what agents and workers write; stderr likewise
    status   that of the agent that ended last
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil

from ddp_notebook.errors import UsageError
from ddp_notebook.launch import processes
from ddp_notebook.launch.elastic import rendezvous
from ddp_notebook.registry import entries

_LOOK_S = 0.1
_GRACE_S = 4.0  # what agents get to end their workers in order


def main() -> None:
    """Be it, until its agents have ended."""
    count, listener, options = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), sys.argv[3:]
    listener.set_inheritable(False)
    rendezvous.serve(listener)
    processes.adopt_orphans()  # a worker whose agent was killed is still below this process
    told: list[str] = []
    # VS Code's stop button sends SIGINT to all that is below the kernel; agents take it as torchrun does.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: told.append("stop"))
    command = [sys.executable, "-m", "ddp_notebook.launch.elastic.agent", *options]
    # If this process is killed, agents end their workers as ever.
    with_us = functools.partial(processes.die_with_parent, os.getpid(), signal.SIGTERM)
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True, "preexec_fn": with_us}
    agents = [subprocess.Popen(command, **how) for _ in range(count)]
    try:
        status = _wait(agents, told)
    finally:
        processes.end(psutil.Process().children(recursive=True))  # workers that do not end, and what has no parent
        with contextlib.suppress(OSError, UsageError):
            entries.entries()  # clears away those of workers that a signal has ended
    sys.exit(status)


def _wait(agents: Sequence[subprocess.Popen[bytes]], told: list[str]) -> int:
    """Until all have ended, or there is no more time for that. Returns the status of the one that ended last: a job
    may go on without one that was killed.

    Args:
        told: to end them, in words; handlers of signals tell that too.
    """
    ends_s, is_open, status = float("inf"), True, 1
    left = list(agents)
    while left and time.monotonic() < ends_s and "kill" not in told:
        for one in [one for one in left if one.poll() is not None]:
            left.remove(one)
            status = abs(one.returncode)
            if one.returncode < 0:
                _end_orphans(left)
        if told and ends_s == float("inf"):
            ends_s = time.monotonic() + _GRACE_S
            for one in left:
                one.terminate()
        if not is_open:
            time.sleep(_LOOK_S)
        elif select.select([0], [], [], _LOOK_S)[0]:
            said = os.read(0, 100).decode().split()
            is_open = bool(said)
            told += said or ["stop"]
    return status


def _end_orphans(agents: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the workers of an agent that was killed: with them the others would go on as if it were there, and never
    begin anew without it."""
    own = {one.pid for one in agents}
    for worker in psutil.Process().children():
        if worker.pid not in own:
            processes.end([worker, *worker.children(recursive=True)])


if __name__ == "__main__":
    main()
