"""RPC of ranks beside torch's own in two plain processes: `python -m tests.benchmarks.rpc`.

idle       processor time of a rank that has called `init_rpc` and does nothing
init       the first `init_rpc`, and one that follows a `shutdown`
call       `rpc_sync` of a function that returns at once, from the one to the other
bandwidth  16 MB there and back
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil

import ddp_notebook
from tests.benchmarks.results import Figure, moment, table

BAR_IDLE_PERCENT, BAR_TIME = 2.0, 1.1
_IDLE_S = 3.0
_BLOCKS, _CALLS, _TRANSFERS = 8, 200, 5

WORKER = """
import time
from statistics import median
import torch
from torch.distributed import rpc
def nothing(): ...
def same(x): return x
big = torch.zeros(4 << 20)
def timed(times, *call):
    rpc.rpc_sync('worker1', *call)
    each = []
    for _ in range(times):
        began = time.perf_counter()
        rpc.rpc_sync('worker1', *call)
        each.append(time.perf_counter() - began)
    return median(each) * 1e3
"""
_BLOCK = f"[timed({_CALLS}, nothing), timed({_TRANSFERS}, same, (big,))]"
_PLAIN = """
import json, os, sys
{worker}
rank = int(sys.argv[1])
began = time.perf_counter()
rpc.init_rpc(f"worker{{rank}}", rank=rank, world_size=2)
print(json.dumps((time.perf_counter() - began) * 1e3), flush=True)
if rank == 0:
    for _ in sys.stdin:
        print(json.dumps({block}), flush=True)
rpc.shutdown()
"""


def measure() -> list[Figure]:
    """Both side by side, blocks alternating."""
    with ddp_notebook.start(2) as session, _plain() as (plain, torchs_init_ms):
        init = "began = time.perf_counter()\nrpc.init_rpc(f'worker{rank}', rank=rank, world_size=2)\n"
        init += "(time.perf_counter() - began) * 1e3"
        session.run(WORKER, quiet=True)
        first_ms = float(session.run(init, quiet=True)[0].result or 0)
        session.run("rpc.shutdown()", quiet=True)
        again_ms = float(session.run(init, quiet=True)[0].result or 0)
        ours: list[list[float]] = []
        theirs: list[list[float]] = []
        for _ in range(_BLOCKS):
            ours.append(json.loads(session.run(f"{_BLOCK} if rank == 0 else None", quiet=True)[0].result or ""))
            assert plain[0].stdin is not None
            plain[0].stdin.write("\n")
            plain[0].stdin.flush()
            theirs.append(_line(plain[0]))
        idle, torchs_idle = _idle_percent(session.pids()), _idle_percent([one.pid for one in plain])
    figures = [
        Figure(
            what="an idle rank with RPC, of a core",
            value=max(idle),
            unit="%",
            bar=BAR_IDLE_PERCENT,
            blocks=tuple(idle),
        ),
        Figure(
            what="... and a plain process with torch's default, which shares the two cores",
            value=max(torchs_idle),
            unit="%",
            bar=100.0,
            blocks=tuple(torchs_idle),
        ),
        _figure("the first `init_rpc` of two ranks", first_ms, torchs_init_ms),
        _figure("... after a `shutdown`", again_ms, torchs_init_ms),
    ]
    for number, what in enumerate(("`rpc_sync` of a function that does nothing", "16 MB there and back")):
        its, plain_its = [one[number] for one in ours], [one[number] for one in theirs]
        figures.append(_figure(what, median(its), median(plain_its), tuple(its)))
    return figures


def _figure(what: str, value: float, baseline: float, blocks: tuple[float, ...] = ()) -> Figure:
    return Figure(
        what=what, value=value, unit="ms", bar=BAR_TIME, baseline=baseline, against="two plain processes", blocks=blocks
    )


@contextmanager
def _plain() -> Iterator[tuple[list[subprocess.Popen[str]], float]]:
    """Two processes with torch's own RPC, and how many milliseconds its `init_rpc` took."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "worker.py"
        file.write_text(_PLAIN.format(worker=WORKER, block=_BLOCK))
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531", "PATH": "/usr/bin:/bin"}
        both = [
            subprocess.Popen(
                [sys.executable, file, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
            )
            for rank in range(2)
        ]
        try:
            yield both, max(_line(one) for one in both)
        finally:
            for one in both:
                assert one.stdin is not None
                one.stdin.close()
            for one in both:
                one.wait(timeout=60)


def _line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def _idle_percent(pids: list[int]) -> list[float]:
    before = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]
    time.sleep(_IDLE_S)
    return [
        100 * (sum(psutil.Process(pid).cpu_times()[:2]) - was) / _IDLE_S for pid, was in zip(pids, before, strict=True)
    ]


if __name__ == "__main__":
    print(moment(), "", *table(measure()), sep="\n")
