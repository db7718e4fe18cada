"""A simulated training run, as its ranks would have recorded it: the tables of `ddp_notebook.records.schema`.

    run = simulate(world_size=4, steps=20, slow=2, phase="forward", extra_ms=50)
    run.rows("call"), run.text(7), run.group_of(3)     the interface of a real `Recording`
    run.batches()                                      the batches that each rank would send

In each step every rank runs input, forward, backward, optimizer. The all-reduce of a bucket starts when all ranks have
issued it and the previous one has finished. Waiting and transfer are thus as on a real network. The true parts of each
step are stored in `run.truth`, for comparison.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddp_notebook.records.codec import Batch
from ddp_notebook.records.schema import ORIGINS, SPANS, STATES, TABLES, TEXTS, Rows

MS = 1_000_000
BEGIN_NS = 1_000_000_000_000
MODEL, OPTIMIZER, LOADER = "DistributedDataParallel(Net)", "SGD", "DataLoader"


@dataclass
class Synthetic:
    """Replaces a `Recording`."""

    world_size: int
    clock_errors_ns: list[int] = field(default_factory=list)
    baseline: dict[str, Any] | None = None
    findings: dict[int, tuple[str, ...]] = field(default_factory=dict)
    same_draws: dict[int, tuple[str, ...]] = field(default_factory=dict)
    same_inputs: dict[int, list[list[int]]] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    prompts: dict[int, str] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    truth: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)  # by (rank, step): ns by part
    _texts: dict[str, int] = field(default_factory=lambda: {"": 0})
    _rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    _counts: dict[Any, int] = field(default_factory=lambda: defaultdict(int))
    _tables: dict[str, Rows] = field(default_factory=dict)

    # ---- as `Recording`

    def rows(self, table: str) -> Rows:
        if table not in self._tables:
            filled = np.zeros(len(self._rows[table]), TABLES[table])
            for name in TABLES[table].names or ():
                if self._rows[table] and name in self._rows[table][0]:
                    filled[name] = [row[name] for row in self._rows[table]]
            self._tables[table] = filled
        return self._tables[table]

    def text(self, number: int) -> str:
        return list(self._texts)[number]

    def group_of(self, number: int) -> dict[str, Any]:
        return json.loads(self.text(number))

    def clock_error_ns(self, rank: int) -> int:
        return self.clock_errors_ns[rank] if self.clock_errors_ns else 0

    # ---- as ranks

    def batches(self) -> list[Batch]:
        """Return one batch of each rank, with all its rows."""
        texts = {number: text for text, number in self._texts.items() if number}
        tables = {name: self.rows(name) for name in TABLES}
        return [
            Batch(
                rank=rank,
                stream=rank + 1,
                texts=texts,
                tables={name: rows[rows["rank"] == rank] for name, rows in tables.items()},
            )
            for rank in range(self.world_size)
        ]

    def add(self, table: str, **row: Any) -> dict[str, Any]:
        """Add a row. Texts are passed as strings."""
        for name in TEXTS[table]:
            row[name] = self._texts.setdefault(row.get(name, ""), len(self._texts))
        self._tables.pop(table, None)
        self._rows[table].append(row)
        return row

    def span(self, rank: int, kind: str, name: str, start_ns: int, end_ns: int, **more: Any) -> int:
        number = self._counts["span", rank] = self._counts["span", rank] + 1
        row = {"cell": 1, "step": 0, "samples": -1, "thread": 0, "is_training": kind == "forward"} | more
        self.add(
            "span",
            span=number,
            rank=rank,
            kind=SPANS.index(kind),
            name=name,
            start_ns=start_ns,
            end_ns=end_ns,
            **row,
        )
        return number

    def call(self, rank: int, op: str, issue_ns: int, end_ns: int, **more: Any) -> dict[str, Any]:
        """Add a call: `origin`, `group` (name), `ranks`, `nbytes` and columns of the table."""
        ranks = list(more.pop("ranks", range(self.world_size)))
        group = more.pop("group", "0")
        kind = op if op in ("send", "recv") else "collective"
        number = self._counts[group, kind, rank] = self._counts[group, kind, rank] + 1
        nbytes = more.pop("nbytes", 1024)
        row = {
            "api": op,
            "number": number,
            "reduce_op": 1,
            "peer": -1,
            "tag": 0,
            "dtype": "float32",
            "shapes": json.dumps([[nbytes // 4]]),
            "nbytes_in": nbytes,
            "nbytes_out": nbytes,
            "site": "cell line 7",
            "module": "",
            "bucket": -1,
            "backward": 0,
            "cell": 1,
            "step": 0,
            "start_ns": -1,
            "blocked_ns": 0 if more.get("is_async") else max(end_ns - issue_ns, 0),
            "state": STATES.index("done"),
            "is_async": False,
            "thread": 0,
        } | more
        row["origin"] = ORIGINS.index(row.get("origin", "user"))
        count = self._counts["call", rank] = self._counts["call", rank] + 1
        title = "default" if group == "0" else group
        return self.add(
            "call",
            call=count,
            rank=rank,
            op=op,
            group=json.dumps({"name": group, "title": title, "ranks": ranks}),
            issue_ns=issue_ns,
            end_ns=end_ns,
            **row,
        )


def simulate(
    *,
    world_size: int = 4,
    steps: int = 20,
    input_ms: float = 1.0,
    forward_ms: float = 10.0,
    backward_ms: float = 20.0,
    optimizer_ms: float = 2.0,
    between_ms: float = 0.5,
    buckets: int = 4,
    bucket_nbytes: int = 1 << 20,
    transfer_ms: float = 1.0,
    micro_steps: int = 1,
    synchronised: int = 1,
    samples: int = 32,
    slow: int | None = None,
    phase: str = "",
    extra_ms: float = 0.0,
    noise_ms: float = 0.0,
    clock_error_ns: int = 0,
    is_ddp: bool = True,
    origin: str = "user",
    has_optimizer: bool = True,
    cell: int = 1,
    seed: int = 0,
    into: Synthetic | None = None,
    threads: int = 1,
    has_calls: bool = True,
) -> Synthetic:
    """Simulate data-parallel training.

    Args:
        micro_steps: Forwards and backwards in each step.
        synchronised: Number of the last ones that synchronise.
        slow: Rank that loses `extra_ms` in each step, in `phase`: "input", "forward", "backward" (before its third
            bucket), "optimizer", "between" phases or "outside" of steps (a checkpoint).
        noise_ms: Mean of a random delay of a third of all phases, like that of a scheduler.
        clock_error_ns: Largest constant error of the ranks' times.
        is_ddp: If false, the program calls one blocking all-reduce between backward and optimizer.
        origin: Origin of that all-reduce, if it is not the user.
        has_optimizer: If false, there are only collectives, without spans and steps.
        threads: Number of threads that run the steps in alternation; 1 for the main thread only.
        has_calls: If false, nothing is sent.
    """
    random = np.random.default_rng(seed)
    run = into or Synthetic(world_size)
    run.clock_errors_ns = [clock_error_ns] * world_size
    offsets = random.integers(-clock_error_ns, clock_error_ns + 1, world_size)
    begin = max([BEGIN_NS, *(int(row["end_ns"]) + MS for row in run._rows["span"])])
    now = np.full(world_size, begin, np.int64)

    def takes(rank: int, name: str, ms: float) -> int:
        if rank == slow and name == phase:
            ms += extra_ms
        if noise_ms:
            ms *= random.normal(1.0, 0.03)
            if random.random() < 1 / 3:
                ms += random.exponential(noise_ms)
        return max(int(ms * MS), 1000)

    def work(kind: str, name: str, ms: float, step: int, **more: Any) -> None:
        for rank in range(world_size):
            start = int(now[rank])
            now[rank] += takes(rank, kind, ms)
            run.truth[rank, step][kind] += int(now[rank]) - start
            if kind != "between" and has_optimizer:
                at = offsets[rank]
                run.span(rank, kind, name, start + at, now[rank] + at, cell=cell, step=step, **more)

    def reduce_blocking(step: int) -> None:
        arrivals = now.copy()
        end = int(arrivals.max()) + int(transfer_ms * buckets * MS)
        for rank in range(world_size):
            run.truth[rank, step]["waiting"] += int(arrivals.max() - arrivals[rank])
            run.truth[rank, step]["exposed"] += end - int(arrivals.max())
            at = offsets[rank]
            nbytes = bucket_nbytes * buckets
            more = {"nbytes": nbytes, "cell": cell, "step": step, "origin": origin}
            run.call(rank, "all_reduce", arrivals[rank] + at, end + at, **more)
        now[:] = end

    def backward(step: int, is_synchronised: bool) -> None:
        count = (1 if step == 0 else buckets) if is_synchronised else 0  # one bucket until the first rebuild
        pieces = max(count, 1)
        starts, issues = now.copy(), np.zeros((world_size, count), np.int64)
        for rank in range(world_size):
            at = int(starts[rank])
            for piece in range(pieces):
                is_slow_piece = piece == min(2, pieces - 1)
                ms = backward_ms / pieces
                at += takes(rank, "backward" if is_slow_piece else "", ms)
                if count:
                    issues[rank, piece] = at
            now[rank] = at
            run.truth[rank, step]["backward"] += at - int(starts[rank])
        ends: list[int] = []
        for piece in range(count):
            # the first bucket contains all gradients
            took = transfer_ms * (buckets if count == 1 else 1)
            ends.append(max(int(issues[:, piece].max()), ends[-1] if ends else 0) + int(took * MS))
        if count:
            for rank in range(world_size):
                last_issue, last_arrival = int(now[rank]), int(issues[:, -1].max())
                run.truth[rank, step]["waiting"] += max(0, min(last_arrival, ends[-1]) - last_issue)
                run.truth[rank, step]["exposed"] += ends[-1] - max(last_issue, last_arrival)
            now[:] = ends[-1]
        for rank in range(world_size):
            at = offsets[rank]
            span = run.span(rank, "backward", "", starts[rank] + at, now[rank] + at, cell=cell, step=step)
            for piece in range(count):
                run.call(
                    rank,
                    "all_reduce",
                    int(issues[rank, piece]) + at,
                    ends[piece] + at,
                    nbytes=bucket_nbytes * (buckets if count == 1 else 1),
                    api="backward",
                    origin="ddp",
                    module=MODEL,
                    bucket=piece,
                    backward=span,
                    cell=cell,
                    step=step,
                    is_async=True,
                )

    for rank in range(world_size):
        if is_ddp:
            _layouts(run, rank, begin, buckets, bucket_nbytes)
    for step in range(steps):
        if step == 1 and is_ddp:
            for rank in range(world_size):
                _layouts(run, rank, int(now[rank]), buckets, bucket_nbytes, is_rebuilt=True)
        for rank in range(world_size):
            run.truth[rank, step] = defaultdict(int)
        if slow is not None and phase == "outside" and step:
            start = int(now[slow] + offsets[slow])
            now[slow] += int(extra_ms * MS)
            run.span(slow, "checkpoint", "torch.save", start, int(now[slow] + offsets[slow]), cell=cell)
        for micro in range(micro_steps):
            work("input", LOADER, input_ms, step, samples=samples)
            work("between", "", between_ms, step)
            work("forward", MODEL if is_ddp else "Net", forward_ms, step, samples=samples)
            if is_ddp:
                backward(step, is_synchronised=micro >= micro_steps - synchronised)
            else:
                work("backward", "", backward_ms, step)
        if not is_ddp:
            reduce_blocking(step)
        work("optimizer", OPTIMIZER, optimizer_ms, step)
    for rank in range(world_size):
        at = offsets[rank]
        run.span(rank, "cell", "", begin + at, int(now[rank]) + at, cell=cell)
    if not has_calls:
        run._rows["call"] = [row for row in run._rows["call"] if row["cell"] != cell]
    if threads > 1:
        for row in (*run._rows["span"], *run._rows["call"]):
            row["thread"] = 0 if row.get("kind") == SPANS.index("cell") else 1 + row["step"] % threads
    return run


def _layouts(run: Synthetic, rank: int, at_ns: int, buckets: int, nbytes: int, is_rebuilt: bool = False) -> None:
    names = [f"layers.{number}.weight" for number in reversed(range(buckets))]
    layout = [{"nbytes": nbytes, "parameters": [name]} for name in names]
    if not is_rebuilt:
        layout = [{"nbytes": nbytes * buckets, "parameters": names[::-1]}]
    run.add("layout", rank=rank, time_ns=at_ns, model=MODEL, buckets=json.dumps(layout), is_rebuilt=is_rebuilt)
