"""Processes in a gloo group without this package, forked for one test like torch's own tests do."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

LIMIT_S = 60.0  # limit for one test


def on_bare_ranks(run: Callable[[int], str], world_size: int, directory: Path, waits_s: int) -> list[str]:
    """Run a test on processes that are forked for it.

    Args:
        run: Function that gets the rank and returns how the test has ended on it.
        directory: Directory for output, and for the file of the rendezvous.
        waits_s: Timeout of the group.

    Returns:
        How the test has ended on each rank.
    """
    forking = multiprocessing.get_context("fork")
    pipes = [forking.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        forking.Process(target=_rank, args=(run, rank, world_size, directory, waits_s, tell))
        for rank, (_, tell) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    until = time.monotonic() + LIMIT_S
    said = []
    for process, (hear, tell) in zip(ranks, pipes, strict=True):
        tell.close()
        try:
            said.append(str(hear.recv()) if hear.poll(max(0.0, until - time.monotonic())) else "not in time")
        except EOFError:
            process.join()
            said.append(f"ended {process.exitcode}")
    for process in ranks:
        process.join(max(0.0, until - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()
    return said


def _rank(run: Callable[[int], str], rank: int, world_size: int, directory: Path, waits_s: int, tell: Any) -> None:
    import torch.distributed as dist

    with open(directory / f"log{rank}", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ["RANK"] = str(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/first",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=waits_s),
    )
    tell.send(run(rank))
    sys.stdout.flush()
    os._exit(0)
