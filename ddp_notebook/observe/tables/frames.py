"""Tables as pandas DataFrames, if pandas is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ddp_notebook.errors import MissingPackageError
from ddp_notebook.observe.steps.run import counted, runs
from ddp_notebook.observe.steps.steps import measure
from ddp_notebook.observe.tables.matching import label_of
from ddp_notebook.records.schema import (
    CONTEXT_EVENTS,
    ORIGINS,
    REDUCE_OPS,
    REFERENCE_EVENTS,
    RPC_KINDS,
    RPC_SIDES,
    SIDES,
    SPANS,
    STATES,
    STEP_UNITS,
    TEXTS,
    Rows,
    first_values,
)

if TYPE_CHECKING:
    from ddp_notebook.observe.tables.recorded import RecordedTables

_CODES = {
    ("call", "reduce_op"): REDUCE_OPS,
    ("call", "origin"): ORIGINS,
    ("call", "state"): STATES,
    ("value", "side"): SIDES,
    ("span", "kind"): SPANS,
    ("metric", "unit"): STEP_UNITS,
    ("rpc", "side"): RPC_SIDES,
    ("rpc", "kind"): RPC_KINDS,
    ("reference", "event"): REFERENCE_EVENTS,
    ("context", "event"): CONTEXT_EVENTS,
}


def to_pandas(recording: RecordedTables, table: str, rows: Rows) -> Any:
    """Return rows as a DataFrame: codes as text, times in nanoseconds of the notebook's clock, -1 if unknown.

    A group has two columns: `group`, its title, and `group_name`, its name in torch. `label` is the prompt of the cell,
    "In [6]".

    Raises:
        MissingPackageError: pandas is not installed.
    """
    columns: dict[str, Any] = {}
    for name in rows.dtype.names or ():
        column = rows[name]
        if (table, name) in _CODES:
            names = np.array(_CODES[table, name], object)
            columns[name] = names[np.minimum(column, len(names) - 1)]
        elif name == "group":
            columns["group"] = _in_words(column, lambda number: recording.group_of(number)["title"])
            columns["group_name"] = _in_words(column, lambda number: recording.group_of(number)["name"])
        elif name in TEXTS[table]:
            columns[name] = _in_words(column, recording.text)
        elif (table, name) == ("value", "first"):
            dtypes = recording.store.texts.of(rows["dtype"])
            columns[name] = [first_values(row, dtype) for row, dtype in zip(rows, dtypes, strict=True)]
        else:
            columns[name] = column
            if name == "cell":
                columns["label"] = _in_words(column, lambda cell: label_of(recording, cell))
    return _frame(columns)


def of_steps(recording: RecordedTables) -> Any:
    """Return all optimizer steps as a DataFrame: times in nanoseconds, and whether `ms_per_step` of their run includes
    them.
    """
    found = measure(recording)
    in_mean = np.zeros(len(found), bool)
    for cell in np.unique(found.cell).tolist():
        own = found.cell == cell
        in_mean[own] = np.isin(found.number[own], counted(found.number[own], found.duration_ns[own])[0])
    columns = {
        "rank": found.rank,
        "cell": found.cell,
        "label": _in_words(found.cell, lambda cell: label_of(recording, cell)),
        "step": found.number,
        "start_ns": found.start_ns,
        "duration_ns": found.duration_ns,
        "is_in_mean": in_mean,
        "samples": found.samples,
        **{f"{name}_ns": column for name, column in found.parts.items() if not name.startswith("own_")},
    }
    return _frame(columns)


def of_runs(recording: RecordedTables) -> Any:
    """Return all training runs as a DataFrame, with the numbers that every display shows."""
    rows = [
        {
            "cell": run.cell,
            "label": run.label,
            "ranks": run.ranks,
            "steps": run.steps,
            "ms_per_step": run.step_ns / 1e6,
            "definition": run.definition,
            "gradient_nbytes": run.gradient_nbytes,
        }
        for run in runs(recording)
    ]
    names = ("cell", "label", "ranks", "steps", "ms_per_step", "definition", "gradient_nbytes")
    return _frame({name: [row[name] for row in rows] for name in names})


def _frame(columns: dict[str, Any]) -> Any:
    try:
        import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingPackageError("to_pandas() needs pandas, which is not installed: %pip install pandas") from error
    return pandas.DataFrame(columns)


def _in_words(numbers: npt.NDArray[Any], text: Any) -> Any:
    unique, back = np.unique(numbers, return_inverse=True)
    return np.array([text(int(number)) for number in unique], object)[back]
