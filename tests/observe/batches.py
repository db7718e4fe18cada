"""Batches like those of a rank, with different values in every column."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import numpy as np

from ddp_notebook.records.codec import Batch, Tensor
from ddp_notebook.records.schema import FIRST_BYTES, TABLES, TEXTS, Rows

T = TypeVar("T")
WORDS = ["all_reduce", "broadcast", "é\ud800\n", "", "float32", "loss", "weight"]


def some_rows(random: np.random.Generator, table: str, count: int, *, rank: int = 0, texts: int = 1) -> Rows:
    """Return rows of random bytes, but with a valid rank and valid numbers of texts and calls."""
    rows = np.frombuffer(random.bytes(count * TABLES[table].itemsize), TABLES[table]).copy()
    rows["rank"] = rank
    for column in TEXTS[table]:
        rows[column] = random.integers(0, texts + 1, count)
    for column in TABLES[table].names or ():
        if TABLES[table][column].kind == "f":
            rows[column] = random.random(count)
        elif TABLES[table][column].kind == "b":
            rows[column] = random.integers(0, 2, count)
    for column in {"call", "span", "backward"} & set(TABLES[table].names or ()):
        rows[column] = random.integers(1, 99, count)
    if table == "value":
        rows["first_count"] = random.integers(0, 9, count)
    return rows


def some_batch(random: np.random.Generator, *, rank: int = 0, stream: int = 1) -> Batch:
    """Return a batch of up to six tables, with texts and whole tensors."""
    texts = {number + 1: WORDS[int(at)] for number, at in enumerate(random.integers(0, len(WORDS), 5))}
    tables = {
        name: some_rows(random, name, int(random.integers(1, 20)), rank=rank, texts=len(texts))
        for name in TABLES
        if random.random() < 0.7
    }
    tensors = tuple(
        Tensor(call=int(random.integers(1, 9)), side=1, dtype="float32", shape=(2, 3), data=random.bytes(24))
        for _ in range(int(random.integers(0, 3)))
    )
    return Batch(
        rank=rank, stream=stream, dropped=int(random.integers(0, 5)), texts=texts, tables=tables, tensors=tensors
    )


def there(value: T | None) -> T:
    """Return a value, which must not be None."""
    assert value is not None
    return value


class Rank:
    """A rank that numbers its texts in the order of their use.

    rank = Rank(1)
    recording._feed(rank.batch(rank.call("all_reduce"), rank.values(1, 0, [1.0, 2.0])))
    """

    def __init__(self, rank: int, stream: int = 1) -> None:
        self.rank, self.stream = rank, stream
        self._numbers: dict[str, int] = {"": 0}
        self._told = 0
        self._calls = 0

    def text(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def batch(self, *rows: tuple[str, Rows], dropped: int = 0, tensors: tuple[Tensor, ...] = ()) -> Batch:
        tables: dict[str, Any] = {}
        for name, one in rows:
            tables.setdefault(name, []).append(one)
        texts = {number: text for text, number in self._numbers.items() if number > self._told}
        self._told = len(self._numbers) - 1
        joined = {name: np.concatenate(parts) for name, parts in tables.items()}
        return Batch(rank=self.rank, stream=self.stream, dropped=dropped, texts=texts, tables=joined, tensors=tensors)

    def row(self, table: str, **of: Any) -> tuple[str, Rows]:
        """Return one row. Texts are passed as strings."""
        row = np.zeros(1, TABLES[table])
        row["rank"] = self.rank
        for name, value in of.items():
            row[name] = self.text(value) if name in TEXTS[table] else value
        return table, row

    def call(self, op: str = "all_reduce", **of: Any) -> tuple[str, Rows]:
        self._calls += 1
        group = of.pop("group", {"name": "0", "title": "default", "ranks": [0, 1]})
        shapes = json.dumps(of.pop("shapes", [[2, 3]]))
        usual = {"bucket": -1, "peer": -1, "start_ns": -1, "end_ns": -1, "issue_ns": 5, "dtype": "float32"}
        usual |= {"call": self._calls, "number": self._calls, "api": op}
        return self.row("call", op=op, group=json.dumps(group), shapes=shapes, **(usual | of))

    def values(self, call: int, side: int, first: list[float], **of: Any) -> tuple[str, Rows]:
        array = np.array(first, "<f4")
        usual = {"numel": len(array), "looked_at": len(array), "low": array.min(), "high": array.max()}
        usual |= {"mean": array.mean(), "first_count": len(array), "dtype": "float32"}
        table, row = self.row("value", call=call, side=side, **(usual | of))
        row["first"] = array.tobytes().ljust(FIRST_BYTES, b"\0")
        return table, row
