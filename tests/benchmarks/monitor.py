"""Cost of the monitor: `python -m tests.benchmarks.monitor`, from the root of the repository.

many       64 simulated ranks in DDP with 1000 events per second each (50 steps of 14 buckets, 4 spans and 2 metrics),
           all of whose collectives have values: bytes per second to the browser, bytes of the first message, and CPU
           time per message
training   a transformer with 1.3 million parameters in DDP on 4 ranks with an open monitor: CPU time of the publisher
           and of the ranks' senders (recorder and wire), relative to the CPU time of the ranks
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

import ddp_notebook
from ddp_notebook.observe.recording import Recording
from ddp_notebook.records.codec import Batch
from ddp_notebook.records.schema import METRIC, VALUE, Rows
from ddp_notebook.widgets.bundles import MONITOR
from ddp_notebook.widgets.feed.feed import Feed
from ddp_notebook.widgets.feed.messages import FeedMessage
from ddp_notebook.widgets.live_status import LiveStatus
from ddp_notebook.widgets.publisher import Publisher
from tests.benchmarks.results import Figure, moment, table
from tests.observe.synthetic import simulate

BAR_BYTES_PER_S, BAR_OPENING, BAR_SHARE = 60_000.0, 150_000.0, 0.03
BAR_TICK_MS = {4: 3.0, 64: 10.0}
_PERIOD_S = 0.04
_STEPS_PER_S, _BUCKETS = 50, 14
_TRAINS = """
import json, os, threading, time
from torch.nn.parallel import DistributedDataParallel
tasks = {t.name: t.native_id for t in threading.enumerate() if os.path.exists(f"/proc/self/task/{t.native_id}")}
def seconds(task):
    fields = open(f"/proc/self/task/{task}/stat").read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
layer = torch.nn.TransformerEncoderLayer(192, 6, 768, batch_first=True, dropout=0.0)
model = DistributedDataParallel(torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), bucket_cap_mb=1.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
x = torch.randn(16, 64, 192)
before, began = {n: seconds(t) for n, t in tasks.items()}, time.process_time()
until = time.monotonic() + SECONDS
step, stop = 0, torch.zeros(1)
while not stop.item():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    log(loss=loss, step=step)
    step += 1
    if step % 20 == 0:
        stop.fill_(time.monotonic() > until)
        dist.broadcast(stop, 0)
print(json.dumps([step, time.process_time() - began, {n: seconds(t) - before[n] for n, t in tasks.items()}]))
"""


class Stream:
    """A repeated step on `world_size` ranks.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        period_ms = 1000 / _STEPS_PER_S
        run = simulate(
            world_size=world_size,
            steps=3,
            buckets=_BUCKETS,
            input_ms=0.5,
            forward_ms=period_ms * 0.25,
            backward_ms=period_ms * 0.5,
            optimizer_ms=1.0,
            between_ms=0.2,
            transfer_ms=period_ms * 0.01,
            noise_ms=0.3,
        )
        self.texts = {number: run.text(number) for number in range(1, 64) if number < len(run._texts)}
        self.texts[200], self.texts[201] = "loss", "accuracy"
        self._layout = run.rows("layout")
        self._step = {name: self._of_step(run.rows(name), 2) for name in ("call", "span")}
        edges = [self._of_step(run.rows("span"), step)["end_ns"].max() for step in (1, 2)]
        self._begin_ns, self._period_ns = int(edges[0]), int(1e9 / _STEPS_PER_S)
        self._world_size = world_size
        self._counts = {name: len(self._step[name]) // world_size for name in self._step}
        calls = self._step["call"]
        self._values = np.zeros(2 * len(calls), VALUE)
        for side in (0, 1):
            rows = self._values[side::2]
            rows["rank"], rows["call"], rows["side"], rows["dtype"] = calls["rank"], calls["call"], side, calls["dtype"]
            rows["numel"], rows["looked_at"], rows["first_count"] = 1 << 18, 256, 32
            rows["low"], rows["high"], rows["mean"] = -1.25, 1.25, 0.125

    @staticmethod
    def _of_step(rows: Rows, step: int) -> Rows:
        return rows[rows["step"] == step]

    def layout(self) -> Rows:
        return self._layout

    def step(self, number: int, start_ns: int) -> dict[str, Rows]:
        """Return the rows of one step of all ranks."""
        found = {name: rows.copy() for name, rows in self._step.items()}
        later_ns = start_ns + number * self._period_ns - self._begin_ns
        for name, columns in (("call", ("issue_ns", "end_ns")), ("span", ("start_ns", "end_ns"))):
            rows = found[name]
            rows["step"] = number
            for column in columns:
                rows[column] += later_ns
            rows[name] += number * self._counts[name]
        found["call"]["number"] += number * self._counts["call"]
        found["call"]["backward"] += number * self._counts["span"]
        found["value"] = self._values.copy()
        found["value"]["call"] += number * self._counts["call"]
        found["metric"] = np.zeros(2 * self._world_size, METRIC)
        metrics = found["metric"]
        metrics["rank"] = np.tile(np.arange(self._world_size), 2)
        metrics["name"] = np.repeat([200, 201], self._world_size)
        metrics["cell"], metrics["step"] = 1, number
        metrics["value"] = np.exp(-number / 500) + 0.01 * np.random.default_rng(number).random(len(metrics))
        metrics["time_ns"] = found["span"]["end_ns"].max()
        return found

    def play(self, recording: Recording, seconds: float, start_ns: int, first: int = 0) -> None:
        """Feed the recording in real time, like ranks do."""
        feed(recording, self.texts, {"layout": self._layout})
        each = round(_STEPS_PER_S * _PERIOD_S)
        began_s = time.monotonic()
        for period in range(round(seconds / _PERIOD_S)):
            steps = [self.step(first + period * each + one, start_ns) for one in range(each)]
            tables = {name: np.concatenate([one[name] for one in steps]) for name in steps[0]}
            time.sleep(max(0.0, began_s + period * _PERIOD_S - time.monotonic()))
            feed(recording, {}, tables)


def feed(recording: Recording, texts: dict[int, str], tables: dict[str, Rows]) -> None:
    """Feed the rows of all ranks in one batch, which a recording accepts."""
    recording._feed(Batch(rank=0, stream=1, texts=texts, tables=tables))


def many(world_size: int = 64, seconds: float = 20.0) -> list[Figure]:
    """Measure the messages, and their cost."""
    recording, stream = Recording(world_size), Stream(world_size)
    start_ns = time.monotonic_ns()
    its_feed = Feed(recording)
    its_feed.start_ns = start_ns
    publisher = Publisher(its_feed, LiveStatus(its_feed, None, f"{world_size} ranks, simulated"))
    told: list[tuple[float, int, dict[str, Any]]] = []

    def sink(message: FeedMessage) -> None:
        told.append((time.monotonic(), message.nbytes, message.header))

    publisher.add(sink)
    stream.play(recording, seconds, start_ns)
    cpu_s = publisher.cpu_s
    snapshot = publisher.with_feed(lambda f, now_ns: f.snapshot(now_ns, {})).nbytes
    publisher.close()
    begin_s = told[0][0]
    seconds_told = [
        sum(n for at, n, _ in told if second <= at - begin_s < second + 1) for second in range(int(seconds))
    ]
    steady = seconds_told[2:]
    what = f"monitor, {world_size} ranks with 1000 events/s each"
    script = MONITOR.stat().st_size if MONITOR.exists() else 0
    return [
        Figure(
            what=f"{what}: most bytes in one of {len(steady)} seconds", value=max(steady), unit="B", bar=BAR_BYTES_PER_S
        ),
        Figure(what=f"{what}: bytes in the first second", value=seconds_told[0], unit="B", bar=BAR_BYTES_PER_S),
        Figure(what=f"{what}: bytes of a snapshot", value=snapshot, unit="B", bar=40_000),
        Figure(
            what=f"{what}: bytes when the monitor opens, {script} of them JavaScript",
            value=snapshot + script,
            unit="B",
            bar=BAR_OPENING,
        ),
        Figure(what=f"{what}: messages per second", value=len(told) / seconds, unit="", bar=20),
        Figure(
            what=f"{what}: processor time of the publisher per message",
            value=cpu_s / len(told) * 1000,
            unit="ms",
            bar=BAR_TICK_MS.get(world_size, 10.0),
        ),
        Figure(
            what=f"{what}: processor time of the publisher per second",
            value=cpu_s / seconds * 1000,
            unit="ms",
            bar=BAR_SHARE * 1000 * world_size,
        ),
    ]


def training(seconds: float = 20.0) -> list[Figure]:
    """Measure the publisher and the senders on four training ranks."""
    with ddp_notebook.start(4) as session:
        recording = session.recording
        its_feed = Feed(recording)
        publisher = Publisher(its_feed, LiveStatus(its_feed, session._cells, ""))
        nbytes: list[int] = []
        publisher.add(lambda message: nbytes.append(message.nbytes))
        result = session.run(f"SECONDS = {seconds}\n{_TRAINS}", quiet=True, timeout_s=seconds + 60)
        publisher.close()
    used_s = 0.0
    by_name: dict[str, float] = {}
    steps = 0
    for rank in range(4):
        steps, used, threads = json.loads(result[rank].stdout)
        used_s += used
        for name, seconds_of in threads.items():
            by_name[name] = by_name.get(name, 0.0) + seconds_of
    senders_s = sum(
        value for name, value in by_name.items() if name.startswith(("ddp-record", "ddp-agent", "ddp-wire"))
    )
    share = (publisher.cpu_s + senders_s) / used_s
    return [
        Figure(
            what=f"monitor, DDP on 4 ranks, {steps / seconds:.0f} steps/s: processor time of the publisher, "
            "relative to that of the ranks",
            value=publisher.cpu_s / used_s * 100,
            unit="%",
            bar=BAR_SHARE * 100,
        ),
        Figure(
            what=f"monitor, DDP on 4 ranks, {steps / seconds:.0f} steps/s: processor time of the publisher and of the "
            "sender threads of the ranks, relative to that of the ranks",
            value=share * 100,
            unit="%",
            bar=BAR_SHARE * 100,
        ),
        Figure(
            what=f"monitor, DDP on 4 ranks, {steps / seconds:.0f} steps/s: bytes per second",
            value=sum(nbytes) / seconds,
            unit="B",
            bar=BAR_BYTES_PER_S,
        ),
    ]


def measure(seconds: float = 20.0) -> list[Figure]:
    """Run all benchmarks."""
    return [*many(64, seconds), *many(4, seconds), *training(seconds)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.monitor")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--many-only", action="store_true")
    given = parser.parse_args()
    figures = [*many(64, given.seconds), *many(4, given.seconds)] if given.many_only else measure(given.seconds)
    print("", moment(), "", *table(figures), sep="\n")


if __name__ == "__main__":
    main()
