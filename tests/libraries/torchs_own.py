"""torch's own tests of its distributed package, one by one on ranks that exist: bare ones, or those of a session.

`python -m tests.libraries.torchs_own` with `environment(3)` runs all of them on three bare ranks, forked for each test
as torch's own `MultiProcessTestCase` starts them, and prints as JSON how each has ended on each rank.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

PASSED, SKIPPED = "passed", "skipped"
LIMIT_S = 60.0  # for one test
WAITS_S = 10  # a group's timeout, for tests that wait in vain on purpose


def environment(world_size: int) -> dict[str, str]:
    """What torch's module reads when it is imported."""
    return {"BACKEND": "gloo", "WORLD_SIZE": str(world_size), "TEMP_DIR": tempfile.gettempdir()}


def names() -> list[str]:
    """All of torch's tests."""
    return [name for name in dir(_case()) if name.startswith("test_")]


def run(name: str, rank: int, directory: str) -> str:
    """Run a test on this rank, which is in the default group.

    Args:
        name: of the test.
        directory: the ranks meet there in files; empty, and the same on all ranks.

    Returns:
        how it has ended: `PASSED`, `SKIPPED`, or what has gone wrong.
    """
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.distributed.distributed_test import Barrier

    os.environ["TEMP_DIR"] = directory
    for folder in ("barrier", "test_dir", "init_dir"):
        os.makedirs(os.path.join(directory, folder), exist_ok=True)
    Barrier.barrier_id = 0
    common_utils.set_rng_seed()
    test = _case()(name)
    test.rank, test.file_name = rank, os.path.join(directory, "group")
    try:
        getattr(test, name)()
    except unittest.SkipTest:
        return SKIPPED
    except SystemExit as end:
        return SKIPPED if end.code in {skip.exit_code for skip in TEST_SKIPS.values()} else f"exit {end.code}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return PASSED


def _case() -> Any:
    """torch's tests as a class. (Imported late: torch's module takes 2 s.)"""
    from torch.testing._internal.distributed import distributed_test

    class Case(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        """torch makes it in a script of its own, which is not in the wheel."""

    return Case


def on_bare_ranks(name: str, world_size: int, directory: Path) -> list[str]:
    """Run a test on processes that are forked for it.

    Returns:
        how it has ended on each rank.
    """
    forking = multiprocessing.get_context("fork")
    pipes = [forking.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        forking.Process(target=_bare_rank, args=(name, rank, world_size, str(directory), tell))
        for rank, (_, tell) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    until = time.monotonic() + LIMIT_S
    said = []
    for process, (hear, tell) in zip(ranks, pipes, strict=True):
        tell.close()
        process.join(max(0.0, until - time.monotonic()))
        try:
            said.append(str(hear.recv()) if process.exitcode is None or hear.poll() else f"ended {process.exitcode}")
        except EOFError:
            said.append(f"ended {process.exitcode}")
    return said


def _bare_rank(name: str, rank: int, world_size: int, directory: str, tell: Any) -> None:
    import torch.distributed as dist

    with open(os.path.join(directory, f"log{rank}"), "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ["RANK"] = str(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/first",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=WAITS_S),
    )
    tell.send(run(name, rank, os.path.join(directory, "files")))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    ended = {}
    for each in names():
        with tempfile.TemporaryDirectory() as directory:
            ended[each] = on_bare_ranks(each, int(os.environ["WORLD_SIZE"]), Path(directory))
    print(json.dumps(ended))
