"""torch's tests of its distributed package, one by one on existing ranks: bare ones, or those of a session.

`python -m tests.libraries.torchs_own` with `environment(3)` runs all of them on three bare ranks. It forks the ranks
for each test, as torch's `MultiProcessTestCase` does. It prints the result on each rank as JSON.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import unittest
from pathlib import Path
from typing import Any

from tests.libraries.bare_ranks import on_bare_ranks

PASSED, SKIPPED = "passed", "skipped"
WAITS_S = 10  # timeout of a group, for tests that wait in vain on purpose


def environment(world_size: int) -> dict[str, str]:
    """Return the variables that torch's module reads during its import."""
    return {"BACKEND": "gloo", "WORLD_SIZE": str(world_size), "TEMP_DIR": tempfile.gettempdir()}


def names() -> list[str]:
    """Return the names of all torch tests."""
    return [name for name in dir(_case()) if name.startswith("test_")]


def run(name: str, rank: int, directory: str) -> str:
    """Run a test on this rank, which is in the default group.

    Args:
        name: Name of the test.
        directory: Directory for the rendezvous of the ranks; empty, and the same on all ranks.

    Returns:
        How it has ended: `PASSED`, `SKIPPED`, or the error.
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
    """Return torch's tests as a class. (Imported late: torch's module takes 2 s.)"""
    from torch.testing._internal.distributed import distributed_test

    class Case(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        """torch creates it in a script that is not in the wheel."""

    return Case


def _run_in(name: str, files: str, rank: int) -> str:
    return run(name, rank, files)


if __name__ == "__main__":
    ended = {}
    for each in names():
        with tempfile.TemporaryDirectory() as directory:
            one = functools.partial(_run_in, each, os.path.join(directory, "files"))
            ended[each] = on_bare_ranks(one, int(os.environ["WORLD_SIZE"]), Path(directory), WAITS_S)
    print(json.dumps(ended))
