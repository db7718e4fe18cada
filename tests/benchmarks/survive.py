"""Cost of `survive` for a training step: `python -m tests.benchmarks.survive`, from the root of the repository.

Blocks of steps of one transformer in DDP with Adam alternate on the same two ranks: in a plain loop, and in a `survive`
loop that replaces ranks. The latter keeps parameters and optimizer state in memory and copies the rest to the next
rank. Uses the minimum of the blocks, because other load only adds time, and the CPU time of rank 0.
"""

from __future__ import annotations

import json
from typing import Any

import ddp_notebook
from tests.benchmarks.results import Figure, moment, table

WORLD_SIZE, STEPS, BAR = 2, 12, 1.05
WIDTHS = (128, 256)
_TRAINING = """
import ddp_notebook, json, time
torch.manual_seed(0)
_layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
_model = torch.nn.parallel.DistributedDataParallel(torch.nn.TransformerEncoder(_layer, 4, enable_nested_tensor=False))
_optimizer = torch.optim.Adam(_model.parameters())
_batches = torch.randn(16, 8, 64, WIDTH)
_size = sum(p.numel() for p in _model.parameters())
_taken = {"survive": [], "plain": []}

def _train(batch):
    _model(batch).square().mean().backward()
    _optimizer.step()

def _now():
    return time.perf_counter(), time.process_time()

def _surviving():
    for step in ddp_notebook.survive(_model, _optimizer, steps=STEPS):
        with step:
            yield
            _train(_batches[int(step)])

def _plain():
    for step in range(STEPS):
        _optimizer.zero_grad()
        yield
        _train(_batches[step])

def _measured(loop):
    times = [_now() for _ in loop()]
    return [(last - first) / (STEPS - 3) * 1e3 for first, last in zip(times[2], times[-1])]

_measured(_plain)
for _block in range(BLOCKS):
    for _kind, _loop in (("survive", _surviving), ("plain", _plain))[:: 1 if _block % 2 else -1]:
        dist.barrier()
        _taken[_kind].append(_measured(_loop))
if rank == 0: print(json.dumps([_size, _taken["survive"], _taken["plain"]]))
"""


def measure(blocks: int = 12) -> list[Figure]:
    """Measure one model after the other."""
    with ddp_notebook.start(WORLD_SIZE) as session:
        return [figure for width in WIDTHS for figure in _measure(session, width, blocks)]


def _measure(session: Any, width: int, blocks: int) -> list[Figure]:
    code = f"WIDTH, STEPS, BLOCKS = {width}, {STEPS}, {blocks}\n{_TRAINING}"
    size, surviving, plain = json.loads(session.run(code, quiet=True)[0].stdout)
    return [
        Figure(
            what=f"one step in a `survive` loop, {size / 1e6:.1f} M parameters: {what}",
            value=min(one[clock] for one in surviving),
            unit="ms",
            bar=BAR,
            baseline=min(one[clock] for one in plain),
            against="a plain loop",
            blocks=tuple(one[clock] for one in surviving),
        )
        for clock, what in enumerate(("wall time, minimum of the blocks", "processor time of rank 0"))
    ]


def main() -> None:
    print(moment(), "", *table(measure()), sep="\n")


if __name__ == "__main__":
    main()
