"""RPC of ranks beside torch's own in plain processes: `python -m tests.benchmarks.rpc`.

idle       processor time of a rank that has called `init_rpc` and does nothing
init       the first `init_rpc`, and one that follows a `shutdown`
call       `rpc_sync` of a function that returns at once, from the one to the other: beside torch's default, which
           polls memory that both processes share, and beside torch over sockets, where nobody polls, as in ours
bandwidth  16 MB there and back
recording  processor time of a call that is recorded over that of one that is not, of all threads of both ranks; and of
           those alone that make and run calls
stop       processor time that a call which is not recorded takes longer with a wait that can be stopped than with
           torch's; and than a call of plain processes over sockets, so what lets a cell run again is in it, too
matched    of 10,000 calls, those that only one side has told of

Processor times are medians of differences between blocks that follow each other.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil

import ddp_notebook
from tests.benchmarks.results import Figure, moment, table

BAR_IDLE_PERCENT, BAR_TIME = 2.0, 1.1
BAR_RECORDING_US, BAR_STOP_US, BAR_UNMATCHED_PERCENT = 20.0, 50.0, 0.1
_IDLE_S = 3.0
_BLOCKS, _CALLS, _TRANSFERS = 8, 200, 5
_COST_BLOCKS, _COST_CALLS = 10, 1000
_MATCHED = 10_000
_OF_CALLS = ("pt_thread_pool", "TP_")  # names of threads that run calls, and of those that send them

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
def often(times):
    for _ in range(times): rpc.rpc_sync('worker1', nothing)
def many(to, times):
    for _ in range(times // 100):
        torch.futures.wait_all([rpc.rpc_async(to, nothing) for _ in range(50)])
        for _ in range(50): rpc.rpc_sync(to, nothing)
"""
_BLOCK = f"[timed({_CALLS}, nothing), timed({_TRANSFERS}, same, (big,))]"
_OFTEN = f"often({_COST_CALLS})"
_TORCHS_WAIT = """
from ddp_notebook.rank.group import waiting as _waiting
torch._C.Future.wait = _waiting._wait_for_future
"""
_OUR_WAIT = "torch._C.Future.wait = _waiting.wait_for_future"
_PLAIN = """
import json, os, sys
{worker}
rank, transports = int(sys.argv[1]), sys.argv[2].split()
options = rpc.TensorPipeRpcBackendOptions(**(dict(_transports=transports) if transports else {{}}))
began = time.perf_counter()
rpc.init_rpc(f"worker{{rank}}", rank=rank, world_size=2, rpc_backend_options=options)
print(json.dumps((time.perf_counter() - began) * 1e3), flush=True)
if rank == 0:
    for line in sys.stdin:
        print(json.dumps(eval(line)), flush=True)
rpc.shutdown()
"""


def measure() -> list[Figure]:
    """All of it. Blocks that are compared take turns; torch's default polls, so it is not there meanwhile."""
    with ddp_notebook.start(2) as session:
        session.run(WORKER, quiet=True)
        init = "began = time.perf_counter()\nrpc.init_rpc(f'worker{rank}', rank=rank, world_size=2)\n"
        init += "(time.perf_counter() - began) * 1e3"
        first_ms = float(session.run(init, quiet=True)[0].result or 0)
        session.run("rpc.shutdown()", quiet=True)
        again_ms = float(session.run(init, quiet=True)[0].result or 0)

        def ours() -> Any:
            return json.loads(session.run(f"{_BLOCK} if rank == 0 else None", quiet=True)[0].result or "")

        with _plain("") as default:
            default_init_ms = default.init_ms
            beside_default = _in_turn(_BLOCKS, ours, lambda: default.run(_BLOCK))
            idle, torchs_idle = _idle_percent(session.pids()), _idle_percent(default.pids)
        with _plain("uv") as sockets:
            beside_sockets = _in_turn(_BLOCKS, ours, lambda: sockets.run(_BLOCK))
            costs = _costs(session, sockets)
        unmatched = _unmatched_percent(session)
    return [
        *_idle_figures(idle, torchs_idle),
        _figure("the first `init_rpc` of two ranks", first_ms, default_init_ms),
        _figure("... after a `shutdown`", again_ms, default_init_ms),
        *_beside("two plain processes", *beside_default),
        *_beside("two plain processes over sockets", *beside_sockets),
        *_cost_figures(costs),
        Figure(
            what=f"of {_MATCHED:,} calls of Python functions, told by one side only",
            value=unmatched,
            unit="%",
            bar=BAR_UNMATCHED_PERCENT,
        ),
    ]


def _in_turn(blocks: int, *runs: Callable[[], Any]) -> list[list[Any]]:
    """What each of them returns, block by block."""
    found: list[list[Any]] = [[] for _ in runs]
    for _ in range(blocks):
        for results, run in zip(found, runs, strict=True):
            results.append(run())
    return found


# ---- times


def _beside(against: str, ours: list[list[float]], theirs: list[list[float]]) -> Iterator[Figure]:
    for number, what in enumerate(("`rpc_sync` of a function that does nothing", "16 MB there and back")):
        its, plain_its = [one[number] for one in ours], [one[number] for one in theirs]
        yield _figure(what, median(its), median(plain_its), tuple(its), against)


def _figure(
    what: str, value: float, baseline: float, blocks: tuple[float, ...] = (), against: str = "two plain processes"
) -> Figure:
    return Figure(what=what, value=value, unit="ms", bar=BAR_TIME, baseline=baseline, against=against, blocks=blocks)


def _idle_figures(idle: list[float], torchs_idle: list[float]) -> Iterator[Figure]:
    yield Figure(
        what="an idle rank with RPC, of a core",
        value=max(idle),
        unit="%",
        bar=BAR_IDLE_PERCENT,
        blocks=tuple(idle),
    )
    yield Figure(
        what="... and a plain process with torch's default, which shares the two cores",
        value=max(torchs_idle),
        unit="%",
        bar=100.0,
        blocks=tuple(torchs_idle),
    )


def _idle_percent(pids: Sequence[int]) -> list[float]:
    before = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]
    time.sleep(_IDLE_S)
    return [
        100 * (sum(psutil.Process(pid).cpu_times()[:2]) - was) / _IDLE_S for pid, was in zip(pids, before, strict=True)
    ]


# ---- processor time


def _costs(session: ddp_notebook.Session, sockets: _Plain) -> dict[str, list[tuple[float, float]]]:
    """Microseconds of both processes a call, by what is done, block by block: of threads of calls, and of all."""

    def ours(level: str) -> tuple[float, float]:
        session.record(level)
        return _used_us(session.pids(), lambda: session.run(f"{_OFTEN} if rank == 0 else None", quiet=True))

    def with_torchs_wait() -> tuple[float, float]:
        session.run(_TORCHS_WAIT, quiet=True)
        found = ours("off")
        session.run(_OUR_WAIT, quiet=True)
        return found

    runs = {
        "recorded": lambda: ours("values"),
        "not recorded": lambda: ours("off"),
        "torch's wait": with_torchs_wait,
        "plain": lambda: _used_us(sockets.pids, lambda: sockets.run(_OFTEN)),
    }
    for run in runs.values():
        run()
    found = dict(zip(runs, _in_turn(_COST_BLOCKS, *runs.values()), strict=True))
    session.record("values")
    return found


def _used_us(pids: Sequence[int], run: Callable[[], Any]) -> tuple[float, float]:
    before = [_used_ns(pid) for pid in pids]
    run()
    time.sleep(0.3)  # what was recorded is on its way
    after = [_used_ns(pid) for pid in pids]
    calls, every = (sum(now[of] - was[of] for now, was in zip(after, before, strict=True)) for of in (0, 1))
    return calls / _COST_CALLS / 1e3, every / _COST_CALLS / 1e3


def _used_ns(pid: int) -> tuple[int, int]:
    """Processor time of a process: of the threads that make and run calls, and of all."""
    of_calls = every = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        used = int((task / "schedstat").read_text().split()[0])
        every += used
        if int(task.name) == pid or (task / "comm").read_text().startswith(_OF_CALLS):
            of_calls += used
    return of_calls, every


def _cost_figures(costs: dict[str, list[tuple[float, float]]]) -> Iterator[Figure]:
    rows = (
        ("a recorded call: processor time of the threads of both ranks that make and run calls", "recorded", 0),
        ("... of all threads", "recorded", 1),
        ("a wait that can be stopped: processor time of both ranks", "not recorded", 1),
        ("all that is ours in a call but its recording: processor time of both ranks", "not recorded", 1),
    )
    than = ("not recorded", "not recorded", "torch's wait", "plain")
    words = "one that is not recorded", "one that is not recorded", "torch's own", "plain processes over sockets"
    bars = BAR_RECORDING_US, BAR_RECORDING_US, BAR_STOP_US, BAR_RECORDING_US + BAR_STOP_US
    for (what, ours, of), theirs, against, bar in zip(rows, than, words, bars, strict=True):
        more = [one[of] - other[of] for one, other in zip(costs[ours], costs[theirs], strict=True)]
        what = f"{what}, more than of {against} ({median(one[of] for one in costs[theirs]):.0f} us)"
        yield Figure(what=what, value=median(more), unit="us", bar=bar, blocks=tuple(more))


def _unmatched_percent(session: ddp_notebook.Session) -> float:
    """Both ranks call each other. What is missing counts as unmatched."""
    began_ns = time.monotonic_ns()
    session.run(f"many(f'worker{{1 - rank}}', {_MATCHED // 2})\ndist.barrier()", quiet=True)
    found = [one for one in session.recording.calls() if one.function == "nothing" and one.sent_ns > began_ns]
    return 100 * (_MATCHED - sum(one.is_matched for one in found)) / _MATCHED


# ---- plain processes


class _Plain:
    """Two processes with torch's own RPC."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self.pids = [one.pid for one in processes]
        self.init_ms = max(_line(one) for one in processes)  # what its `init_rpc` took

    def run(self, expression: str) -> Any:
        """Its value on worker 0."""
        assert self._processes[0].stdin is not None
        self._processes[0].stdin.write(f"{expression}\n")
        self._processes[0].stdin.flush()
        return _line(self._processes[0])


@contextmanager
def _plain(transports: str) -> Iterator[_Plain]:
    """They talk over these transports of torch's; "": its default."""
    with tempfile.TemporaryDirectory() as directory, socket.create_server(("127.0.0.1", 0)) as free:
        file = Path(directory) / "worker.py"
        file.write_text(_PLAIN.format(worker=WORKER))
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        free.close()
        both = [
            subprocess.Popen(
                [sys.executable, file, str(rank), transports],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            yield _Plain(both)
        finally:
            for one in both:
                assert one.stdin is not None
                one.stdin.close()
            for one in both:
                one.wait(timeout=60)


def _line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


if __name__ == "__main__":
    print(moment(), "", *table(measure()), sep="\n")
