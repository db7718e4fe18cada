"""Intake of recorded data in the notebook: `python -m tests.benchmarks.intake`, from the root of the repository.

64 simulated ranks send a batch every 40 ms into one intake. An event is a collective with the values of its input and
output: three rows, 534 bytes. All processes, including the simulated ranks, share one core.

steady    1000 events/s on each rank: lost events, CPU load, and the delay of a batch
ten times the same with 10 000 events/s on each rank
flood     as fast as possible, in batches of 40 events: whether all lost events are counted, and the growth of memory
          when tables and queue are full
batch     50 rows, decoded and fed
"""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from statistics import median, quantiles

import numpy as np
import psutil

from ddp_notebook.observe.intake import Intake
from ddp_notebook.observe.recording import Recording
from ddp_notebook.records.codec import Batch, decode, encode
from ddp_notebook.records.schema import CALL, TEXTS, VALUE
from tests.benchmarks.results import Figure, moment, table

RANKS = 64
EVENTS_PER_S = 1000
_PERIOD_S = 0.04
_TEXTS = {number: f"text {number}, as long as a list of shapes" for number in range(1, 41)}


class Watched(Recording):
    """A recording that measures the time of each batch."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.put_s: deque[float] = deque()
        self.took_ms: list[float] = []

    def _feed(self, batch: Batch) -> None:
        super()._feed(batch)
        if self.put_s:
            self.took_ms.append((time.monotonic() - self.put_s.popleft()) * 1000)


def events(rank: int, count: int, texts: dict[int, str] | None = None) -> bytes:
    """Return a batch of `count` events."""
    random = np.random.default_rng(rank)
    tables = {"call": np.zeros(count, CALL), "value": np.zeros(2 * count, VALUE)}
    for name, rows in tables.items():
        rows["rank"] = rank
        for column in TEXTS[name]:
            rows[column] = random.integers(1, len(_TEXTS), len(rows))
    return encode(Batch(rank=rank, stream=1, texts=texts or {}, tables=tables))


@contextmanager
def one_core() -> Iterator[None]:
    """Restrict this thread and the threads it starts to one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def send(intake: Intake, seconds: float, each: int, *, is_paced: bool = True) -> Iterator[int]:
    """Put batches of `each` events. Yield the number of events so far after each second."""
    batches = [events(rank, each) for rank in range(RANKS)]
    for rank in range(RANKS):
        intake.put(rank, events(rank, each, _TEXTS))
    intake.flush(10)
    sent = RANKS * each
    recording = intake.recording
    began = told = time.monotonic()
    period = 0
    while (now := time.monotonic()) < began + seconds:
        for rank, data in enumerate(batches):
            # Ranks do not send at the same moment.
            until = began + (period + rank / RANKS) * _PERIOD_S
            while is_paced and (left := until - time.monotonic()) > 0:
                time.sleep(left)
            if isinstance(recording, Watched):
                recording.put_s.append(time.monotonic())
            intake.put(rank, data)
        sent += RANKS * each
        period += 1
        if now - told > 1:
            told = now
            yield sent
    yield sent


def steady(seconds: float, times: int) -> list[Figure]:
    """Measure a multiple of 1000 events per second on each rank."""
    recording = Watched(RANKS) if times == 1 else Recording(RANKS)
    with closing(Intake(recording)) as intake:
        cpu_s, began_s = time.process_time(), time.monotonic()
        sent = list(send(intake, seconds, round(times * EVENTS_PER_S * _PERIOD_S)))[-1]
        took_s = time.monotonic() - began_s
        share = (time.process_time() - cpu_s) / took_s
        intake.flush(10)
    dropped, came = sum(recording.dropped.values()), recording.store.rings["call"].end
    rate = f"64 ranks with {times * EVENTS_PER_S} events/s each ({sent / took_s:.0f}/s in total)"
    if not isinstance(recording, Watched):
        what = f"{rate}, {100 * came / sent:.0f} % of them received: rows lost without being counted"
        return [Figure(what=what, value=abs(3 * (sent - came) - dropped), unit="", bar=0)]
    return [
        Figure(what=f"{rate}: lost events, of {sent}", value=sent - came, unit="", bar=0),
        Figure(what=f"{rate}: load of one core, including the simulated ranks", value=share * 100, unit="%", bar=100),
        Figure(
            what=f"{rate}: delay until a batch can be read, p99",
            value=quantiles(recording.took_ms, n=100)[-1],
            unit="ms",
            bar=100,
        ),
    ]


def flood(seconds: float) -> list[Figure]:
    """Measure more events than the intake can process."""
    # Small tables, which are full in the second half.
    capacity = {"call": 1 << 17, "value": 1 << 17}
    recording, process = Recording(RANKS, capacity=capacity), psutil.Process()
    memory_mib = []
    with closing(Intake(recording)) as intake:
        began_s = time.monotonic()
        sent = 0
        for put in send(intake, seconds, round(EVENTS_PER_S * _PERIOD_S), is_paced=False):
            sent = put
            memory_mib.append(process.memory_info().rss / 2**20)
        took_s = time.monotonic() - began_s
        intake.flush(30)
    came, dropped = recording.store.rings["call"].end, sum(recording.dropped.values())
    half = len(memory_mib) // 2
    return [
        Figure(
            what=f"{sent / took_s:.0f} events/s sent, {came / took_s:.0f}/s received: rows lost without being counted",
            value=abs(3 * (sent - came) - dropped),
            unit="",
            bar=0,
        ),
        Figure(
            what=f"{sent / took_s:.0f} events/s sent: memory growth in the second half",
            value=max(memory_mib[half:]) - memory_mib[half - 1],
            unit="MiB",
            bar=10,
        ),
    ]


def batch(count: int = 3000) -> list[Figure]:
    """Measure decoding and feeding of batches."""
    rows = np.zeros(50, CALL)
    data = encode(Batch(rank=0, stream=1, tables={"call": rows}))
    both = events(0, 50)
    figures = []
    for what, one in (("a batch of 50 calls", data), ("a batch of 50 calls and 100 values", both)):
        recording, blocks = Recording(1), []
        for _ in range(5):
            began_s = time.process_time()
            for _ in range(count // 5):
                recording._feed(decode(one))
            blocks.append((time.process_time() - began_s) / (count // 5) * 1e6)
        figures.append(
            Figure(
                what=f"processor time to decode and feed {what}",
                value=median(blocks),
                unit="us",
                bar=150,
                blocks=tuple(blocks),
            )
        )
    return figures


def measure(seconds: float = 20) -> list[Figure]:
    """Run all four benchmarks."""
    with one_core():
        return [*batch(), *steady(seconds, 1), *steady(seconds, 10), *flood(seconds)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.intake")
    parser.add_argument("--seconds", type=float, default=20)
    given = parser.parse_args()
    print("", moment(), "", *table(measure(seconds=given.seconds)), sep="\n")


if __name__ == "__main__":
    main()
