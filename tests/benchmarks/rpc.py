"""RPC of ranks compared with torch's RPC in plain processes: `python -m tests.benchmarks.rpc`.

idle       CPU time of an idle rank after `init_rpc`
init       the first `init_rpc`, and one after a `shutdown`
call       `rpc_sync` of a function that returns at once: compared with torch's default, which polls memory that both
           processes share, and with torch over sockets, which does not poll, like ours
bandwidth  16 MB there and back
recording  CPU time of a recorded call relative to one that is not recorded: of all threads of both ranks, and of those
           that make and run calls
stop       additional CPU time of an unrecorded call if its wait can be interrupted, compared with torch's wait; and
           with a call of plain processes over sockets, which includes the cost of making a cell repeatable
matched    share of 10,000 calls that only one side has recorded

CPU times are those of threads (the kernel's `schedstat`), and medians of differences between intervals in a random
order. The intervals are long enough to include batches of the recorder.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil

import ddp_notebook
from tests.benchmarks.results import Figure, moment, table

BAR_IDLE_PERCENT, BAR_TIME = 2.0, 1.1
BAR_RECORDING_US, BAR_STOP_US, BAR_UNMATCHED_PERCENT = 20.0, 50.0, 0.1
_IDLE_S = 3.0
_BLOCKS, _CALLS, _TRANSFERS = 8, 200, 5
_ROUNDS, _ALL_EVERY, _LEAD_S, _STRETCH_S = 48, 4, 0.3, 0.7  # recording needs the highest precision
_MATCHED = 10_000

WORKER = """
import os, time
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
def calls_for(s):
    n, until = 0, time.monotonic() + s
    while time.monotonic() < until:
        for _ in range(20): rpc.rpc_sync('worker1', nothing)
        n += 20
    return n
def used_us(pids):
    'Processor time of two processes that call each other, and of others: of those that make and run calls, of all'
    calls = every = others = 0
    for pid in pids:
        for task in os.listdir(f'/proc/{pid}/task'):
            with open(f'/proc/{pid}/task/{task}/schedstat') as file: used = int(file.read().split()[0]) / 1e3
            with open(f'/proc/{pid}/task/{task}/comm') as file: name = file.read()
            if pid not in pids[:2]: others += used; continue
            every += used
            if int(task) == pid or name.startswith(('pt_thread_pool', 'TP_')): calls += used
    return calls, every, every + others
def stretch(pids, lead_s, s):
    calls_for(lead_s)
    before = used_us(pids)
    made = calls_for(s)
    return [(now - was) / made for now, was in zip(used_us(pids), before)]
def many(to, times):
    for _ in range(times // 100):
        torch.futures.wait_all([rpc.rpc_async(to, nothing) for _ in range(50)])
        for _ in range(50): rpc.rpc_sync(to, nothing)
"""
_BLOCK = f"[timed({_CALLS}, nothing), timed({_TRANSFERS}, same, (big,))]"
_WAITS = """
from ddp_notebook.rank.group import waiting
_ours, _torchs = torch._C.Future.wait, waiting._wait_for_future
"""
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
    """Run all benchmarks. Compared blocks alternate. torch's default polls, so it only runs while it is measured."""
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
            idle, torchs_idle = _idle_percent(session.ranks.pids()), _idle_percent(default.pids)
        with _plain("uv") as sockets:
            beside_sockets = _in_turn(_BLOCKS, ours, lambda: sockets.run(_BLOCK))
            costs = _costs(session, sockets)
        unmatched = _unmatched_percent(session)
    return [
        *_idle_figures(idle, torchs_idle),
        _figure("first `init_rpc` of two ranks", first_ms, default_init_ms),
        _figure("`init_rpc` of two ranks after a `shutdown`", again_ms, default_init_ms),
        *_beside("plain torch, two processes", *beside_default),
        *_beside("plain torch over sockets, two processes", *beside_sockets),
        *_cost_figures(costs),
        Figure(
            what=f"share of {_MATCHED:,} calls of Python functions that only one side has recorded",
            value=unmatched,
            unit="%",
            bar=BAR_UNMATCHED_PERCENT,
        ),
    ]


def _in_turn(blocks: int, *runs: Callable[[], Any]) -> list[list[Any]]:
    """Return the results of each function, block by block."""
    found: list[list[Any]] = [[] for _ in runs]
    for _ in range(blocks):
        for results, run in zip(found, runs, strict=True):
            results.append(run())
    return found


# ---- times


def _beside(against: str, ours: list[list[float]], theirs: list[list[float]]) -> Iterator[Figure]:
    for number, what in enumerate(("`rpc_sync` of an empty function", "`rpc_sync` that sends and returns 16 MB")):
        its, plain_its = [one[number] for one in ours], [one[number] for one in theirs]
        yield _figure(what, median(its), median(plain_its), tuple(its), against)


def _figure(
    what: str,
    value: float,
    baseline: float,
    blocks: tuple[float, ...] = (),
    against: str = "plain torch, two processes",
) -> Figure:
    return Figure(what=what, value=value, unit="ms", bar=BAR_TIME, baseline=baseline, against=against, blocks=blocks)


def _idle_figures(idle: list[float], torchs_idle: list[float]) -> Iterator[Figure]:
    yield Figure(
        what="load of an idle rank with RPC, of one core",
        value=max(idle),
        unit="%",
        bar=BAR_IDLE_PERCENT,
        blocks=tuple(idle),
    )
    yield Figure(
        what="load of an idle plain process with the default transports of torch, of one core",
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


@dataclass(frozen=True, slots=True)
class _Cost:
    """Cost of a call, in microseconds of CPU time."""

    calls: float  # threads of both processes that make and run calls
    every: float  # all threads of both processes
    notebook: float  # all threads of both processes and of the notebook


def _costs(session: ddp_notebook.Session, sockets: _Plain) -> list[dict[str, _Cost]]:
    """Return the costs of each round, by kind, each time in a random order.

    An interval is one cell, without its start and its end, and without the time until the recorder's thread has
    started.
    """

    def ours(level: str, wait: str = "_ours") -> _Cost:
        session.record(level)
        session.run(f"torch._C.Future.wait = {wait}", quiet=True)
        stretch = _stretch([*session.ranks.pids(), os.getpid()])
        return _Cost(*json.loads(session.run(f"{stretch} if rank == 0 else None", quiet=True)[0].result or ""))

    runs = {
        "recorded": lambda: ours("values"),
        "not recorded": lambda: ours("off"),
        "torch's wait": lambda: ours("off", "_torchs"),
        "plain": lambda: _Cost(*sockets.run(_stretch(sockets.pids))),
    }
    session.run(_WAITS, quiet=True)
    found = []
    for n in range(_ROUNDS):
        done = list(runs)[: len(runs) if n % _ALL_EVERY == 0 else 2]
        found.append({what: runs[what]() for what in random.sample(done, len(done))})
    session.record("values")
    session.run("torch._C.Future.wait = _ours", quiet=True)
    return found


def _stretch(pids: Sequence[int]) -> str:
    return f"stretch({list(pids)}, {_LEAD_S}, {_STRETCH_S})"


def _cost_figures(costs: list[dict[str, _Cost]]) -> Iterator[Figure]:
    rows = (
        ("processor time that recording adds to a call: threads that make and run calls", "recorded", "calls"),
        ("processor time that recording adds to a call: all threads of both ranks", "recorded", "every"),
        ("processor time that recording adds to a call: both ranks and the notebook", "recorded", "notebook"),
        ("processor time that an interruptible wait adds to a call: both ranks", "not recorded", "every"),
        ("processor time that this package adds to an unrecorded call: both ranks", "not recorded", "every"),
    )
    than = ("not recorded", "not recorded", "not recorded", "torch's wait", "plain")
    unrecorded = "not recorded"
    words = unrecorded, unrecorded, unrecorded, "`wait` of torch", "plain torch over sockets"
    bars = *[BAR_RECORDING_US] * 3, BAR_STOP_US, BAR_RECORDING_US + BAR_STOP_US
    for (what, ours, of), theirs, against, bar in zip(rows, than, words, bars, strict=True):
        both = [(getattr(one[ours], of), getattr(one[theirs], of)) for one in costs if {ours, theirs} <= one.keys()]
        base, more = [one for _, one in both], [our - their for our, their in both]
        low, _, high = quantiles(more, n=4)
        # standard error of a median, for a normal distribution with outliers
        error = 1.2533 * (high - low) / 1.349 / len(more) ** 0.5
        words_of_pairs = f"{median(base):.0f} us; {len(more)} pairs, standard error {error:.1f} us"
        what = f"{what} ({against}: {words_of_pairs})"
        yield Figure(what=what, value=median(more), unit="us", bar=bar)


def _unmatched_percent(session: ddp_notebook.Session) -> float:
    """Let both ranks call each other. Return the share of unmatched calls in percent; missing calls count as
    unmatched."""
    began_ns = time.monotonic_ns()
    session.run(f"many(f'worker{{1 - rank}}', {_MATCHED // 2})\ndist.barrier()", quiet=True)
    found = [one for one in session.recording.calls() if one.function == "nothing" and one.sent_ns > began_ns]
    return 100 * (_MATCHED - sum(one.is_matched for one in found)) / _MATCHED


# ---- plain processes


class _Plain:
    """Two processes with torch's RPC."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self.pids = [one.pid for one in processes]
        self.init_ms = max(_line(one) for one in processes)  # time of its `init_rpc`

    def run(self, expression: str) -> Any:
        """Evaluate an expression on worker 0."""
        assert self._processes[0].stdin is not None
        self._processes[0].stdin.write(f"{expression}\n")
        self._processes[0].stdin.flush()
        return _line(self._processes[0])


@contextmanager
def _plain(transports: str) -> Iterator[_Plain]:
    """Start two processes that use these transports of torch; "" for its default."""
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
                assert one.stdout is not None
                one.stdout.close()


def _line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


if __name__ == "__main__":
    print(moment(), "", *table(measure()), sep="\n")
