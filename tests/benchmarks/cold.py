"""CPU time that recording costs the training thread with cold caches: `python -m tests.benchmarks.cold`.

Measures a step of DDP on one rank, whose buckets gloo reduces at once. 12 MB of other memory are written before each
part, so that the code is in no cache. The models are a tiny MLP with six buckets and a transformer with two. Only the
CPU time of the training thread counts, so other load hardly matters. Blocks of the following kinds run in a random
order:

- kernels in Python that do nothing: the cost of calling Python from torch
- kernels that note the start and the end of each operation
- our kernels without recording
- recording
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from tests.benchmarks.recording import LEAST, MODELS
from tests.benchmarks.results import Figure, moment, table

BAR = 1.03
_STEPS = {"a tiny MLP with 6 buckets of 1 MB": 12, "a transformer with 1.1 M parameters": 3}  # steps of a block
_WORDS = {
    "again": "not recorded, measured a second time (noise)",
    "nothing": "with empty Python kernels",
    "least": "with Python kernels that only note start and end (minimum)",
    "off": "with `%ddp_record off`",
    "recorded": "recorded",
    "all": "recorded with `%ddp_record all`",
}
_CODE = (
    LEAST
    + """
import json, os, random, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from ddp_notebook.rank.cell.current_line import CurrentLine
from ddp_notebook.rank.group.kernels.kernel import Kernel
from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.record.rank_recording import RankRecording
from ddp_notebook.rank.record.event_buffer import ALL, OFF, VALUES
from ddp_notebook.messages.record_options import RecordOptions

torch.set_num_threads(1)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
where, recorder = CurrentLine(), Recorder()
where.enter(__file__, 1)
recording = RankRecording(recorder, where, rank=lambda: 0, send=lambda data: None)
model, shape, bucket_cap_mb = MODEL()
model = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
x, other = torch.randn(shape), torch.randn(3_000_000)

kinds = {"nothing": nothing, "least": least}
whole, is_installed = Kernel.make, False

def switch(mode):
    global is_installed
    if is_installed: recorder.remove()
    is_installed = mode not in ("bare", "again")
    Kernel.make = kinds.get(mode, whole)
    if is_installed: recorder.install()
    event_buffer = recording.event_buffer
    event_buffer.level, event_buffer.thins = {"recorded": (VALUES, True), "all": (ALL, False)}.get(mode, (OFF, False))

class Ran:  # sum of the processor time of blocks that start with cold caches
    us = 0.0
    def __enter__(self):
        other.mul_(1.0000001)
        self.began_ns = time.thread_time_ns()
    def __exit__(self, *_):
        self.us += (time.thread_time_ns() - self.began_ns) / 1e3

def step():
    ran = Ran()
    optimizer.zero_grad()
    with ran: loss = model(x).square().mean()
    with ran: loss.backward()
    with ran: optimizer.step()
    return ran.us

recording.begin_cell(1, 1, RecordOptions(), {})
modes, taken = ["bare", *MODES], {}
for turn in range(BLOCKS):
    for mode in random.Random(turn).sample(modes, len(modes)):
        switch(mode)
        for _ in range(3): step()
        taken.setdefault(mode, []).append([step() for _ in range(STEPS)])
print(json.dumps(taken), flush=True)
os._exit(0)
"""
)


def measure(blocks: int = 40) -> list[Figure]:
    """Measure both models."""
    return [figure for model, steps in _STEPS.items() for figure in _measure(model, blocks, steps)]


def _measure(model: str, blocks: int, steps: int) -> list[Figure]:
    """Run blocks of steps of each kind in one process, in alternation."""
    settings = f"BLOCKS, STEPS, MODES = {blocks}, {steps}, {list(_WORDS)}\nMODEL = lambda: ({MODELS[model]})"
    code = f"{settings}\n__file__ = 'benchmark.py'\n{_CODE}"
    code = f"exec(compile({code!r}, 'benchmark.py', 'exec'))"  # pretend that the code comes from a file of a cell
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600, check=True)
    taken: dict[str, list[list[float]]] = json.loads(ran.stdout)
    middle_us = {mode: sorted(median(block) for block in of_mode) for mode, of_mode in taken.items()}
    bare_us = median(middle_us["bare"])
    return [
        Figure(
            what=f"processor time of the training thread with cold caches per step: {model}, 1 rank, {words}; "
            f"quartiles of {blocks} blocks {of_mode[blocks // 4]:.0f} and {of_mode[3 * blocks // 4]:.0f} us",
            value=median(of_mode),
            unit="us",
            bar=BAR,
            baseline=bare_us,
            against="not recorded",
        )
        for mode, words in _WORDS.items()
        for of_mode in (middle_us[mode],)
    ]


def main() -> None:
    print("", *table(measure()), "", moment(), sep="\n")


if __name__ == "__main__":
    main()
