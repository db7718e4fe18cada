"""Cost of the recorder and the guard for a collective: `python -m tests.benchmarks.collective`, from the root.

recorder   CPU time of an `all_reduce` of four floats in a group of one rank, with and without the recorder; blocks of
           calls alternate in one process
guard      wall time of an `all_reduce` of four floats on 2, 4 and 8 ranks, with and without the guard; blocks of calls
           alternate on the same ranks
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import ddp_notebook
from tests.benchmarks.results import Figure, moment, table

WORLD_SIZES = (2, 4, 8)
BAR_RECORDER_US, BAR_GUARD = 15.0, 1.5
_GUARD = """
import json, time
from ddp_notebook.rank.engine import RankEngine
_recorder = RankEngine.instance()._rank._network.recorder
_guard, _x, _taken = _recorder.guard, torch.ones(4), {True: [], False: []}
for _ in range(50): dist.all_reduce(_x)
for _ in range(BLOCKS):
    for _on in (True, False):
        dist.barrier()
        _recorder.guard = _guard if _on else None
        dist.barrier()
        _began = time.perf_counter()
        for _ in range(CALLS): dist.all_reduce(_x)
        _taken[_on].append((time.perf_counter() - _began) / CALLS * 1e3)
        _recorder.guard = None
        dist.barrier()
        _recorder.guard = _guard
if rank == 0: print(json.dumps([_taken[True], _taken[False]]))
"""
_RECORDER = """
import json, os, sys, time, torch, torch.distributed as dist
from ddp_notebook.rank.group.recorder import Recorder
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
x, taken = torch.ones(4), {True: [], False: []}
for _ in range(BLOCKS):
    for on in (True, False):
        recorder = Recorder()
        if on: recorder.install()
        for _ in range(100): dist.all_reduce(x)
        began = time.thread_time()
        for _ in range(CALLS): dist.all_reduce(x)
        taken[on].append((time.thread_time() - began) / CALLS * 1e6)
        if on: recorder.remove()
print(json.dumps([taken[True], taken[False]]), flush=True)
os._exit(0)
"""


def measure(blocks: int = 12) -> list[Figure]:
    """Run both benchmarks."""
    return [_measure_recorder(blocks), *(_measure_guard(world_size, blocks) for world_size in WORLD_SIZES)]


def _measure_recorder(blocks: int) -> Figure:
    code = f"BLOCKS, CALLS = {blocks}, 2000\n{_RECORDER}"
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=True)
    recorded, bare = json.loads(ran.stdout)
    # Use the minimum of the blocks, because other load only adds time.
    added = [max(0.0, one - min(bare)) for one in recorded]
    return Figure(
        what=f"processor time that the recorder adds to an `all_reduce` ({min(bare):.1f} us)",
        value=min(recorded) - min(bare),
        unit="us",
        bar=BAR_RECORDER_US,
        blocks=tuple(added),
    )


def _measure_guard(world_size: int, blocks: int) -> Figure:
    with ddp_notebook.start(world_size) as session:
        result: Any = session.run(f"BLOCKS, CALLS = {blocks}, 100\n{_GUARD}", quiet=True)
        guarded, plain = json.loads(result[0].stdout)
    return Figure(
        what=f"wall time of an `all_reduce` with the guard, {world_size} ranks",
        value=median(guarded),
        unit="ms",
        bar=BAR_GUARD,
        baseline=median(plain),
        against="without the guard",
        blocks=tuple(guarded),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.collective")
    parser.add_argument("--blocks", type=int, default=12)
    given = parser.parse_args()
    print(moment(), "", *table(measure(given.blocks)), sep="\n")


if __name__ == "__main__":
    main()
