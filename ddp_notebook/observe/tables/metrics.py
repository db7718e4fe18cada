"""Metrics by name. The rows are sorted once, and a metric is made when it is read: there may be a name for each row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.views import Metric
from ddp_notebook.records.names import listed
from ddp_notebook.records.schema import Rows

_COLUMNS = {
    "ranks": "rank",
    "steps": "step",
    "values": "value",
    "times_ns": "time_ns",
    "cells": "cell",
    "is_given": "is_given",
    "units": "unit",
}


class MetricTable(Mapping[str, Metric]):
    """The metrics of some rows, in the order in which their names came first.

    Args:
        rows: (n,) of `records.METRIC`.
        texts: returns the texts of numbers.

    Example:
        >>> from ddp_notebook.records.schema import METRIC
        >>> rows = np.zeros(3, METRIC)
        >>> rows["name"], rows["value"] = [2, 1, 2], [5.0, 6.0, 7.0]
        >>> metrics = Metrics(rows, lambda numbers: [{1: "loss", 2: "accuracy"}[one] for one in numbers.tolist()])
        >>> list(metrics), metrics["accuracy"].values.tolist()
        (['accuracy', 'loss'], [5.0, 7.0])
    """

    def __init__(self, rows: Rows, texts: Callable[[npt.NDArray[Any]], list[str]]) -> None:
        order = np.argsort(rows["name"], kind="stable")
        self._rows = rows[order]
        numbers = self._rows["name"].astype(np.int64)
        begins = np.flatnonzero(np.diff(numbers, prepend=-1)) if len(rows) else np.zeros(0, np.int64)
        ends = np.append(begins[1:], len(rows))
        by_time = np.argsort(order[begins])  # a stable sort leaves the first row of each name in front
        self._begins, self._ends = begins[by_time], ends[: len(begins)][by_time]
        self._places = {name: place for place, name in enumerate(texts(numbers[self._begins]))}

    def __getitem__(self, name: str) -> Metric:
        place = self._places[name]
        rows = self._rows[self._begins[place] : self._ends[place]]
        return Metric(name=name, **{field: rows[column] for field, column in _COLUMNS.items()})

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __repr__(self) -> str:
        return f"<MetricTable: {listed(self)}>" if self else "<Metrics: none>"
