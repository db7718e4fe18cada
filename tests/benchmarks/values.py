"""Move 200 MB between the notebook and a rank: `python -m tests.benchmarks.values`, from the root of the repository.

Compare the kernel-mode CPU time of the notebook and one rank with that of two processes with a plain socket pair. Both
move the same bytes. Measurements alternate, and the minimum of the rounds counts, because other load only adds time.
"""

from __future__ import annotations

import os
import socket

import psutil

import ddp_notebook
from tests.benchmarks.results import Figure, moment, table

NBYTES, ROUNDS = 200_000_000, 5
BAR_RATIO = 2.0


def measure() -> list[Figure]:
    """Measure pull and push, each compared with a socket pair in the same run."""
    import torch

    pairs, pulls, pushes, in_all = [], [], [], []
    with ddp_notebook.start(1) as session:
        session.run(f"x = torch.ones({NBYTES // 4})", quiet=True)
        processes = [psutil.Process(), *map(psutil.Process, session.ranks.pids())]
        value = torch.ones(NBYTES // 4)
        session.pull("x")
        for _ in range(ROUNDS):
            pairs.append(_pair())
            before, notebook = _system_s(processes), sum(os.times()[:2])
            session.pull("x")
            pulls.append(_system_s(processes) - before)
            in_all.append(sum(os.times()[:2]) - notebook)
            before = _system_s(processes)
            session["y"] = value
            pushes.append(_system_s(processes) - before)
    return [
        *(
            Figure(
                what=f"kernel-mode processor time for a {what} of 200 MB, notebook and rank",
                value=min(spent),
                unit="s",
                bar=BAR_RATIO,
                baseline=min(pairs),
                against="a socket pair",
                blocks=tuple(spent),
            )
            for what, spent in (("pull", pulls), ("push", pushes))
        ),
        Figure(
            what="total processor time of the notebook for a pull of 200 MB",
            value=min(in_all),
            unit="s",
            bar=BAR_RATIO,
            baseline=min(pairs),
            against="a socket pair",
            blocks=tuple(in_all),
        ),
    ]


def _system_s(processes: list[psutil.Process]) -> float:
    return sum(process.cpu_times().system for process in processes)


def _pair() -> float:
    """Return the kernel-mode CPU time of sending the bytes to another process."""
    before = os.times()
    receiver, sender = socket.socketpair()
    if (child := os.fork()) == 0:
        receiver.close()
        sender.sendall(bytes(NBYTES))
        os._exit(0)
    sender.close()
    data, at = memoryview(bytearray(NBYTES)), 0
    while at < NBYTES:
        at += receiver.recv_into(data[at:])
    receiver.close()
    os.waitpid(child, 0)
    after = os.times()
    return after.system - before.system + after.children_system - before.children_system


if __name__ == "__main__":
    print(moment(), *table(measure()), sep="\n")
