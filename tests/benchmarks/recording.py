"""Cost of recording for a rank: `python -m tests.benchmarks.recording`, from the root of the repository.

call       additional CPU time of a collective of four floats with the backend `fake`. Its operations finish at once, so
           that work that usually runs in other threads runs in the calling one. Measures synchronous calls, and
           asynchronous calls with `wait`. Blocks with and without the recorder alternate in one process
drain      CPU time of the recorder's thread for each collective
log        CPU time of a `log()` of a float and of a tensor
step       wall time and CPU time of a DDP step, with and without the recorder (its kernels are removed, and nothing is
           recorded). Short blocks alternate on the same ranks in a random order, because the speed of handing work
           between threads varies over time. There are several sessions, because the placement of memory and threads
           differs between sessions: by 0.02 of a step of 14 ms. (Rows of a block are sent at the next full second,
           which may be in a block of another mode: 0.002 at most.) The other modes are: `%ddp_record off`, where
           kernels and the guard stay; `%ddp_record all`; kernels that do nothing, or only note start and end of each
           operation, the minimum for a recorder in Python; and a second block without recording, which shows the
           variation between equal blocks. The cost depends on the number of collectives and steps and not on their
           size, so a tiny model, whose step takes some milliseconds, has the largest share
readable   from a `log()` on a rank until the notebook can read it

CPU times use the minimum of the blocks, because other load only adds time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, quantiles, stdev
from typing import Any

import ddp_notebook
from tests.benchmarks.results import Figure, moment, table

WORLD_SIZES = (2, 4)
BAR_META_US, BAR_VALUES_US, BAR_DRAIN_US, BAR_LOG_US = 15.0, 30.0, 10.0, 10.0
BAR_STEP, BAR_READABLE_MS = 1.03, 100.0
LONG_STEP_MS, BAR_LONG_STEP = 100.0, 1.01
_BLOCK_MS = 500.0  # duration of a block of steps, at least two
_SESSIONS = 6
_CALL = """
import json, os, time, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from ddp_notebook.records.codec import encode
from ddp_notebook.rank.record.batches import BatchMaker
from ddp_notebook.rank.record.metrics import MetricLogger
from ddp_notebook.rank.record.event_buffer import EventBuffer
from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.cell.current_line import CurrentLine
from ddp_notebook.messages.record_options import LEVELS

class Training:
    on_step = []
    has_several_optimizers = False

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
x, where, taken = torch.ones(4), CurrentLine(), {}
where.enter(__file__, 1)
maker = BatchMaker(lambda: 0, where.of_calls)

def keep(what, took_s, count):
    taken.setdefault(what, []).append(took_s / count * 1e6)

def sync(count):
    for _ in range(count): dist.all_reduce(x)

def later(count):
    for _ in range(count): dist.all_reduce(x, async_op=True).wait()

def of_calls(mode, event_buffer):
    for name, call in (("sync", sync), ("async", later)):
        call(50)
        if event_buffer is not None: event_buffer.pop(10**6)
        began = time.thread_time()
        call(CALLS)
        keep(f"{name} {mode}", time.thread_time() - began, CALLS)
        if event_buffer is not None and (records := event_buffer.pop(10**6)):
            began = time.thread_time()
            encode(maker.batch(records))
            keep(f"drain {mode}", time.thread_time() - began, len(records))

def of_logs(event_buffer):
    log = MetricLogger(event_buffer, Training, where.cells).log
    for name, loss in (("a float", 0.5), ("a tensor", torch.tensor(0.5, requires_grad=True) * 2)):
        began = time.thread_time()
        for _ in range(CALLS): log(loss=loss)
        keep(f"log {name}", time.thread_time() - began, CALLS)
        event_buffer.pop(10**6)

for _ in range(BLOCKS):
    for mode in ("bare", "off", "meta", "values"):
        recorder, event_buffer = Recorder(), None
        if mode != "bare":
            event_buffer = recorder.event_buffer = EventBuffer(where.cells)
            event_buffer.enter(1, 1, LEVELS.index(mode))
            recorder.install()
        of_calls(mode, event_buffer)
        if mode == "values": of_logs(event_buffer)
        if mode != "bare": recorder.remove()
print(json.dumps(taken), flush=True)
os._exit(0)
"""
# Wall and CPU time of a step in ms, by rank, block and mode.
OfRanks = list[list[dict[str, list[float]]]]
_Taken = list[list[dict[str, float]]]  # time of a step in ms, by session, block and mode
MODELS = {  # module, shape of the input, bucket_cap_mb
    "an MLP with 6 buckets of 26 MB (DDP default)": (
        "torch.nn.Sequential(*[torch.nn.Linear(1480, 1480) for _ in range(16)]), (8, 1480), None"
    ),
    "a transformer with 1.1 M parameters": """torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(152, 4, 608, batch_first=True, dropout=0.0), 4, enable_nested_tensor=False
    ), (16, 64, 152), None""",
    "a tiny MLP with 6 buckets of 1 MB": "torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)]), "
    "(32, 512), 1.0",
    "a tiny transformer": """torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0), 4, enable_nested_tensor=False
    ), (4, 32, 128), 1.0""",
}
# Kernels that do nothing: the cost of calling Python. And kernels that only note the start and the end of each
# operation, the minimum for a recorder in Python.
LEAST = """
import time
from torch._C._distributed_c10d import Work
from ddp_notebook.rank.group.calls import noting_time
def nothing(kernel):
    redispatch, after = kernel.redispatch, kernel.after
    return lambda keys, *arguments: redispatch(keys & after, *arguments)
def least(kernel):
    redispatch, after, unbox, now = kernel.redispatch, kernel.after, Work.unbox, time.monotonic_ns
    def run(keys, *arguments):
        begin_ns, ends_ns = now(), []
        out = redispatch(keys & after, *arguments)
        if type(out) is tuple:
            unbox(out[-1]).get_future().add_done_callback(noting_time(ends_ns))
        return out
    return run
"""
_STEPS = (
    LEAST
    + """
import json, random, time
from torch.nn.parallel import DistributedDataParallel
from ddp_notebook.rank.engine import RankEngine
_rank = RankEngine.instance()._rank
_recorder, _event_buffer = _rank._network.recorder, _rank._core.recording.event_buffer
_model, _shape, _bucket_cap_mb = MODEL
_model = DistributedDataParallel(_model, bucket_cap_mb=_bucket_cap_mb)
_optimizer = torch.optim.SGD(_model.parameters(), lr=0.001)
_x, _taken = torch.randn(_shape), []
from ddp_notebook.rank.group.kernels.kernel import Kernel
from ddp_notebook.rank.record.event_buffer import ALL, OFF, VALUES
_whole, _away = Kernel.make, []
def _block(steps):
    dist.barrier()
    began, ran = time.perf_counter(), time.process_time()
    for _ in range(steps):
        _optimizer.zero_grad()
        _model(_x).square().mean().backward()
        _optimizer.step()
    return [(time.perf_counter() - began) / steps * 1e3, (time.process_time() - ran) / steps * 1e3]
def _switch(mode):
    _recorder.remove()
    if _event_buffer.level == VALUES: _away[:] = [time.monotonic_ns()]
    if mode == "recorded" and _away:  # exclude the time without recording from the sampling rate
        _event_buffer.thinning.since_ns += time.monotonic_ns() - _away[0]
    Kernel.make = {"nothing": nothing, "least": least}.get(mode, _whole)
    if mode not in ("bare", "again"): _recorder.install()
    _event_buffer.level, _event_buffer.thins = {"recorded": (VALUES, True), "all": (ALL, False)}.get(mode, (OFF, False))
_step_ms = torch.tensor(_block(20)[0])
dist.broadcast(_step_ms, 0)
_steps = max(2, round(BLOCK_MS / float(_step_ms)))
_turns = max(5, round(SECONDS * 1000 / float(_step_ms) / (_steps + 2) / len(MODES)))
for _turn in range(_turns):
    _ms = {}
    for _mode in random.Random(SEED + _turn).sample(MODES, len(MODES)):
        _switch(_mode)
        _block(2)
        _ms[_mode] = _block(_steps)
    _taken.append(_ms)
_switch("recorded")
print(json.dumps(_taken))
"""
)
_MODES = {
    "recorded": "recorded",
    "all": "recorded with `%ddp_record all`",
    "off": "with `%ddp_record off`",
    "nothing": "with empty Python kernels",
    "least": "with Python kernels that only note start and end (minimum)",
    "again": "not recorded, measured a second time (noise)",
}
_LOGS = """
import random, time
random.seed(rank)
for _ in range(COUNT):
    time.sleep(random.uniform(0.005, 0.045))
    log(sent=time.monotonic())
"""


def measure(blocks: int = 12, seconds: float = 60.0) -> list[Figure]:
    """Run all benchmarks.

    Args:
        seconds: Duration of the steps of each model and mode.
    """
    figures = _calls(blocks)
    for world_size in WORLD_SIZES:
        figures += [figure for model in MODELS for figure in steps_of(model, world_size, seconds)]
    with ddp_notebook.start(min(WORLD_SIZES)) as session:
        figures.append(_readable(session))
    return figures


def _calls(blocks: int) -> list[Figure]:
    code = f"BLOCKS, CALLS = {blocks}, 1000\n__file__ = 'benchmark.py'\n{_CALL}"
    code = f"exec(compile({code!r}, 'benchmark.py', 'exec'))"  # pretend that the code comes from a file of a cell
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600, check=True)
    taken: dict[str, list[float]] = json.loads(ran.stdout)
    figures = []
    for kind, words in (("sync", "an `all_reduce`"), ("async", "an `all_reduce` with `async_op` and `wait`")):
        bare = min(taken[f"{kind} bare"])
        for level, bar in (("off", BAR_META_US), ("meta", BAR_META_US), ("values", BAR_VALUES_US)):
            added = [one - bare for one in taken[f"{kind} {level}"]]
            what = f"processor time that `%ddp_record {level}` adds to {words} ({bare:.1f} us)"
            figures.append(_least(what, added, bar))
    figures += [
        _least(f"processor time of the recorder thread per call, `{level}`", taken[f"drain {level}"], BAR_DRAIN_US)
        for level in ("meta", "values")
    ]
    figures += [
        _least(f"processor time of `log()` of {what}", taken[f"log {what}"], BAR_LOG_US)
        for what in ("a float", "a tensor")
    ]
    return figures


def _least(what: str, blocks: list[float], bar: float) -> Figure:
    return Figure(what=what, value=min(blocks), unit="us", bar=bar, blocks=tuple(blocks))


def steps_of(model: str, world_size: int, seconds: float, modes: Sequence[str] = (*_MODES,)) -> list[Figure]:
    """Measure the cost of recording for a step.

    Args:
        model: A key of `MODELS`.
        seconds: Duration of each mode in all sessions together.
        modes: Keys of `_MODES`.
    """
    sessions = []
    for seed in range(_SESSIONS):
        with ddp_notebook.start(world_size) as session:
            sessions.append(_blocks(session, model, seconds / _SESSIONS, [*modes, "bare"], seed))
    return _figures(model, world_size, sessions)


def _blocks(session: Any, model: str, seconds: float, modes: Sequence[str], seed: int) -> OfRanks:
    """Run blocks of each mode in alternation."""
    code = f"MODEL, MODES, SEED = ({MODELS[model]}), {list(modes)}, {seed}\n"
    code += f"SECONDS, BLOCK_MS = {seconds * len(modes)}, {_BLOCK_MS}\n{_STEPS}"
    result = session.run(code, quiet=True, timeout_s=3600)
    return [json.loads(result[rank].stdout) for rank in result.ranks]


def _figures(model: str, world_size: int, sessions: list[OfRanks]) -> list[Figure]:
    """Return the figures from the blocks of some sessions."""
    # Ranks wait for each other, so one rank gives the wall time of all. CPU times are added.
    wall_ms = [[{mode: both[0] for mode, both in turn.items()} for turn in of_ranks[0]] for of_ranks in sessions]
    processor_ms = [
        [{mode: sum(one[mode][1] for one in turn) for mode in turn[0]} for turn in zip(*of_ranks, strict=True)]
        for of_ranks in sessions
    ]
    bar = BAR_LONG_STEP if _mean_ms(wall_ms, "bare") > LONG_STEP_MS else BAR_STEP
    return [
        _ratio(f"{what} per step: {model}, {world_size} ranks, {words}", taken_ms, mode, bar)
        for mode, words in _MODES.items()
        if mode in wall_ms[0][0]
        for what, taken_ms in (("wall time", wall_ms), ("processor time of all ranks", processor_ms))
    ]


def _ratio(what: str, sessions: _Taken, mode: str, bar: float) -> Figure:
    bare_ms = _mean_ms(sessions, "bare")
    added = [_added_ms(turns, mode) / _mean_ms([turns], "bare") for turns in sessions]
    words = ", ".join(f"{1 + one:.3f}" for one in added)
    return Figure(
        what=f"{what}; mean of {len(added)} sessions ({words}), standard error {stdev(added) / len(added) ** 0.5:.3f}",
        value=bare_ms * (1 + mean(added)),
        unit="ms",
        bar=bar,
        baseline=bare_ms,
        against="not recorded",
    )


def _mean_ms(sessions: _Taken, mode: str) -> float:
    return mean(turn[mode] for turns in sessions for turn in turns)


def _added_ms(turns: list[dict[str, float]], mode: str) -> float:
    """Return the additional time of a mode in a session, without 5 % of the blocks at either end, which had other
    load."""
    added = sorted(turn[mode] - turn["bare"] for turn in turns)
    return mean(added[len(added) // 20 : len(added) - len(added) // 20])


def _readable(session: Any, count: int = 300) -> Figure:
    """Measure the delay of `log()`. The clock of ranks on this machine is that of the notebook."""
    recording = session.recording
    _, index, _ = recording.follow("metric", 0)
    running = session.submit(f"COUNT = {count}\n{_LOGS}", quiet=True)
    took_ms: list[float] = []
    until = time.monotonic() + 60
    while len(took_ms) < count * session.world_size and time.monotonic() < until:
        rows, index, _ = recording.follow("metric", index)
        now = time.monotonic()
        took_ms += [(now - sent) * 1000 for sent in rows["value"].tolist()]
        time.sleep(0.001)
    running.result()
    return Figure(
        what=f"delay from `log()` until the notebook can read the value, p99 of {len(took_ms)}",
        value=quantiles(took_ms, n=100)[-1],
        unit="ms",
        bar=BAR_READABLE_MS,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.recording")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each model, recorded in each way")
    parser.add_argument("--calls-only", action="store_true", help="no sessions")
    given = parser.parse_args()
    figures = _calls(given.blocks) if given.calls_only else measure(given.blocks, given.seconds)
    print("", moment(), "", *table(figures), sep="\n")


if __name__ == "__main__":
    main()
