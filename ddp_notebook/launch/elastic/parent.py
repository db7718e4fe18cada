"""The process between a kernel and its torchrun agents. It ends them and their descendants on request, or when the
kernel has ended in any way.

`python -m ddp_notebook.launch.elastic.parent AGENTS FD OPTION-OF-TORCHRUN ...`, with the listening socket of the
agents' rendezvous store in FD.

    stdin    "stop", or its end: end the agents like torchrun, by SIGTERM; "kill": at once
    stdout   output of agents and workers; the same for stderr
    status   exit status of the agent that ended last
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
_GRACE_S = 4.0  # time for agents to end their workers in order


def main() -> None:
    """Run the parent until its agents have ended."""
    count, listener, options = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), sys.argv[3:]
    listener.set_inheritable(False)
    rendezvous.serve(listener)
    processes.adopt_orphans()  # a worker whose agent was killed is then a child of this process
    told: list[str] = []
    # The stop button of VS Code sends SIGINT to all processes below the kernel. Agents handle it like torchrun.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: told.append("stop"))
    command = [sys.executable, "-m", "ddp_notebook.launch.elastic.elastic_agent", *options]
    # If this process is killed, the agents end their workers as usual.
    with_us = functools.partial(processes.die_with_parent, os.getpid(), signal.SIGTERM)
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True, "preexec_fn": with_us}
    agents = [subprocess.Popen(command, **how) for _ in range(count)]
    try:
        status = _wait(agents, told)
    finally:
        processes.end(psutil.Process().children(recursive=True))  # workers that do not end, and orphans
        with contextlib.suppress(OSError, UsageError):
            entries.entries()  # removes entries of workers that a signal has ended
    sys.exit(status)


def _wait(agents: Sequence[subprocess.Popen[bytes]], told: list[str]) -> int:
    """Wait until all agents have ended, or the grace period is over.

    A job may continue after one of its agents was killed.

    Args:
        agents: to wait for.
        told: requests to end them; signal handlers append to it too.

    Returns:
        The exit status of the agent that ended last.
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
    """End the workers of a killed agent: with them, the others would not notice its end and would never restart without
    it.
    """
    own = {one.pid for one in agents}
    for worker in psutil.Process().children():
        if worker.pid not in own:
            processes.end([worker, *worker.children(recursive=True)])


if __name__ == "__main__":
    main()
