"""Tables of a recording: they receive batches of all ranks, and number rows and texts consistently."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.tables.metric_thinning import Earlier
from ddp_notebook.observe.tables.ring_buffer import RingBuffer, as_whole
from ddp_notebook.observe.tables.text_table import TextTable, Translation
from ddp_notebook.records.codec import Batch, Tensor
from ddp_notebook.records.schema import SPANS, TABLES, TEXTS, Rows, as_array

CAPACITY = {  # number of rows of all ranks together: 237 MB when all tables are full
    "call": 1 << 19,
    "value": 1 << 19,
    "span": 1 << 18,
    "metric": 1 << 18,
    "resource": 1 << 17,
    "layout": 1 << 12,
    "loader": 1 << 12,
    "indices": 1 << 17,
    "rpc": 1 << 18,
    "reference": 1 << 16,
    "context": 1 << 16,
}
TENSOR_BYTES = 64 << 20  # limit of complete tensors
_PER_PROCESS = 1_000_000  # the call count of a rank's next process starts at the next multiple
_CELL = SPANS.index("cell")
_COUNTED = {"call": ("call", "backward"), "value": ("call",), "span": ("span", "pipeline")}
Key = tuple[int, int, int]  # rank, call, side


class Store:
    """Rows that the ranks have sent. One thread feeds, any number read.

    Args:
        capacity: number of kept rows, by table; default: `CAPACITY`.
    """

    def __init__(self, capacity: Mapping[str, int] | None = None) -> None:
        self.texts = TextTable()
        self.prompts: dict[int, str] = {}  # prompts by cell: "In [6]"
        self.dropped: Counter[int] = Counter()  # number of dropped rows, by rank
        self.left_out = 0  # number of calls whose values were not recorded, because steps were fast
        self.rings = {
            name: RingBuffer(dtype, (CAPACITY | dict(capacity or {}))[name]) for name, dtype in TABLES.items()
        }
        # One key for each row of values, at the same index, so that a search does not read all rows.
        self.value_keys = RingBuffer(np.dtype("<u8"), self.rings["value"].capacity)
        self.earlier = Earlier(TABLES["metric"])  # metrics that were dropped from their ring buffer
        self.tensors: OrderedDict[Key, tuple[Tensor, ...]] = OrderedDict()
        self._tensor_bytes = 0
        self._tensor_lock = threading.Lock()
        self._processes: dict[tuple[int, int], _Process] = {}  # processes by rank and stream

    def feed(self, batch: Batch) -> None:
        """Add a batch. Its rows are copied."""
        process = self.learn(batch)
        for name, rows in batch.tables.items():
            ours = rows.view(as_whole(rows.dtype)).copy().view(rows.dtype)
            for column in TEXTS[name]:
                ours[column] = process.translate(rows[column])
            process.count_on(name, ours)
            if name == "span":
                self._learn_prompts(ours)
            if name == "call":
                self.left_out += int(np.count_nonzero(ours["left_out"]))
            if name == "value":
                self.rings[name].append(ours)
                self.value_keys.append(keys_of(ours["rank"], ours["call"], ours["side"]))
            elif name == "metric":
                self._append_metrics(ours)
            else:
                self.rings[name].append(ours)
        for tensor in batch.tensors:
            self._keep(batch.rank, process.base + tensor.call, tensor)

    def _learn_prompts(self, spans: Rows) -> None:
        """Store the prompt of each cell, even of cells of an earlier kernel."""
        cells = spans[(spans["kind"] == _CELL) & (spans["name"] > 0)]
        for cell, name in cells[["cell", "name"]].tolist():
            self.prompts.setdefault(cell, self.texts[name])

    def _append_metrics(self, rows: Rows) -> None:
        """Add rows of metrics. A curve that is longer than the table keeps its early part, with fewer values."""
        ring = self.rings["metric"]
        over = len(ring) + len(rows) - ring.capacity
        if over > 0:  # before the rows are dropped, so that readers see each row once
            given_up = ring.since(ring.first, min(over, len(ring)))[0]
            self.earlier.add(given_up, ring.first)
            if over > len(given_up):
                self.earlier.add(rows[: over - len(given_up)], ring.end)
        ring.append(rows)

    def learn(self, batch: Batch) -> _Process:
        """Add the texts and the count of dropped rows. This is all that remains of a dropped batch."""
        process = self._processes.get((batch.rank, batch.stream))
        if process is None:
            process = self._processes[batch.rank, batch.stream] = self._new_process(batch.rank)
        process.translate.learn(batch.texts)
        if batch.dropped:
            self.dropped[batch.rank] += batch.dropped
        return process

    def _new_process(self, rank: int) -> _Process:
        before = [one for (its, _), one in self._processes.items() if its == rank]
        return _Process(self.texts, max((one.next_base() for one in before), default=0))

    def renumber(self, stayed: Mapping[int, int]) -> None:
        """Renumber the ranks of processes. Earlier rows keep the old numbers.

        Processes do not send their texts again. Do not call it while a batch is fed.

        Args:
            stayed: former number of each remaining rank, by its new number.
        """
        for now, before in stayed.items():
            for (rank, stream), process in list(self._processes.items()):
                if rank == before != now:
                    moved = self._processes[now, stream] = self._new_process(now)
                    moved.translate = process.translate

    def find_values(self, rank: int, call: int, side: int) -> np.void | None:
        """Return the row of values of one side of a call, the last one if there are several."""
        keys, end, _ = self.value_keys.since(0)
        found = np.flatnonzero(keys == keys_of(rank, call, side))
        return self.rings["value"].row(end - len(keys) + int(found[-1])) if len(found) else None

    def whole(self, rank: int, call: int, side: int) -> list[npt.NDArray[np.generic]]:
        """Return the complete tensors of one side of a call."""
        return [_array(one) for one in self.tensors.get((rank, call, side), ())]

    def _keep(self, rank: int, call: int, tensor: Tensor) -> None:
        if len(tensor.data) > TENSOR_BYTES:
            return
        with self._tensor_lock:
            key = (rank, call, tensor.side)
            self.tensors[key] = (*self.tensors.get(key, ()), tensor)
            self._tensor_bytes += len(tensor.data)
            while self._tensor_bytes > TENSOR_BYTES:
                _, oldest = self.tensors.popitem(last=False)
                self._tensor_bytes -= sum(len(one.data) for one in oldest)

    def kept_tensors(self) -> list[tuple[Key, Tensor]]:
        """Return all complete tensors."""
        with self._tensor_lock:
            return [(key, one) for key, tensors in self.tensors.items() for one in tensors]

    def restore(
        self,
        texts: Iterable[str],
        tables: Mapping[str, Rows],
        dropped: Mapping[int, int],
        tensors: Iterable[tuple[Key, Tensor]],
    ) -> None:
        """Add the contents of another store, with its numbers of texts and counts of calls."""
        self.texts = TextTable(texts)
        for name, rows in tables.items():
            self.rings[name].append(rows)
        self.left_out = int(np.count_nonzero(tables["call"]["left_out"]))
        values = tables["value"]
        self.value_keys.append(keys_of(values["rank"], values["call"], values["side"]))
        self.dropped.update(dropped)
        for key, tensor in tensors:
            self._keep(key[0], key[1], tensor)

    @property
    def nbytes(self) -> int:
        """Size of tables and tensors in bytes."""
        return sum(ring.nbytes for ring in (*self.rings.values(), self.value_keys)) + self._tensor_bytes


class _Process:
    """One process of a rank, which counts texts, calls and spans from 1."""

    def __init__(self, texts: TextTable, base: int) -> None:
        self.translate = Translation(texts)
        self.base = base  # added to its counts, so that they are unique for the rank after its process was replaced
        self._highest = 0

    def next_base(self) -> int:
        """Return the base of the next process of the rank."""
        return (self._highest // _PER_PROCESS + 1) * _PER_PROCESS

    def count_on(self, table: str, rows: Rows) -> None:
        """Convert counts of the process to counts of the rank, in place."""
        for column in _COUNTED.get(table, ()):
            counts = rows[column]
            if self.base:
                counts[counts > 0] += np.array(self.base).astype(counts.dtype)
            if len(counts):
                self._highest = max(self._highest, int(counts.max()))


def keys_of(rank: Any, call: Any, side: Any) -> npt.NDArray[np.uint64]:
    """Return one number for a side of a call: 2 bits for the side, 44 for the call count, 18 for the rank."""
    if isinstance(rank, int):
        return np.uint64(rank << 46 | call << 2 | side)  # type: ignore[return-value]
    return (rank.astype("<u8") << np.uint64(46)) | (call << np.uint64(2)) | side


def _array(tensor: Tensor) -> npt.NDArray[np.generic]:
    flat = as_array(tensor.data, tensor.dtype)
    fits = flat.size == np.prod(tensor.shape, dtype=np.int64)
    return flat.reshape(tensor.shape) if fits else flat  # bytes, if NumPy has no such type
