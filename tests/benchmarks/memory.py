"""Memory of ranks and of the notebook: `python -m tests.benchmarks.memory`, from the root of the repository.

rank      memory of a rank that is not shared, after the first cell, an all_reduce; a rank shares most of its memory
          with its host server
notebook  growth in an hour of training on 64 simulated ranks: 4 steps per second on each, with 6 buckets with values,
          4 spans and a metric
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import numpy as np
import psutil

import ddp_notebook
from ddp_notebook.observe.recording import Recording
from ddp_notebook.records.codec import Batch, decode, encode
from ddp_notebook.records.schema import CALL, METRIC, RESOURCE, SPAN, VALUE
from tests.benchmarks.results import Figure, moment, table

WORLD_SIZE, RANKS, HOUR_S = 4, 64, 3600
BAR_RANK_MIB, BAR_NOTEBOOK_MIB = 60.0, 300.0
_STEPS_PER_S = 4
_OF_A_STEP = {"call": (CALL, 6), "value": (VALUE, 12), "span": (SPAN, 4), "metric": (METRIC, 1)}
_MIB = 2**20


def measure() -> list[Figure]:
    """Run both benchmarks."""
    return [_of_ranks(), _of_the_notebook()]


def _of_ranks() -> Figure:
    with ddp_notebook.start(WORLD_SIZE) as session:
        session.run("x = torch.ones(1)\ndist.all_reduce(x)", quiet=True)
        own = [psutil.Process(pid).memory_full_info().uss / _MIB for pid in session.ranks.pids()]
    return Figure(
        what="private memory of a rank after its first cell",
        value=median(own),
        unit="MiB",
        bar=BAR_RANK_MIB,
        blocks=tuple(own),
    )


def _of_the_notebook() -> Figure:
    process, recording = psutil.Process(), Recording(RANKS)
    before = process.memory_info().rss
    after = []
    for second, batches in enumerate(_seconds(HOUR_S)):
        for batch in batches:
            recording._feed(decode(batch))
        if second % (HOUR_S // 4) == HOUR_S // 4 - 1:
            after.append((process.memory_info().rss - before) / _MIB)
    return Figure(
        what=f"memory growth of the notebook in an hour of training on {RANKS} simulated ranks (after each quarter)",
        value=after[-1],
        unit="MiB",
        bar=BAR_NOTEBOOK_MIB,
        blocks=tuple(after),
    )


def _seconds(count: int) -> Iterator[list[bytes]]:
    """Yield the batches of all ranks for each second."""
    for second in range(count):
        yield [_batch(rank, second) for rank in range(RANKS)]


def _batch(rank: int, second: int) -> bytes:
    tables = {name: np.zeros(each * _STEPS_PER_S, dtype) for name, (dtype, each) in _OF_A_STEP.items()}
    tables["resource"] = np.zeros(1, RESOURCE)
    for rows in tables.values():
        rows["rank"] = rank
    calls = tables["call"]
    calls["call"] = np.arange(len(calls)) + second * len(calls)
    tables["value"]["call"] = np.repeat(calls["call"], 2)
    return encode(Batch(rank=rank, stream=1, tables=tables))


def main() -> None:
    print("", moment(), "", *table(measure()), sep="\n")


if __name__ == "__main__":
    main()
