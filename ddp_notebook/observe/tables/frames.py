"""Tables as DataFrames of pandas, where it is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_notebook.errors import MissingPackageError
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
    ("rpc", "side"): RPC_SIDES,
    ("rpc", "kind"): RPC_KINDS,
    ("reference", "event"): REFERENCE_EVENTS,
    ("context", "event"): CONTEXT_EVENTS,
}


def to_pandas(recording: RecordedTables, table: str, rows: Rows) -> Any:
    """Rows as a DataFrame: texts and codes in words, times in nanoseconds of the notebook's clock, -1 where unknown.

    A group is two columns: `group`, its title, and `group_name`, torch's own name.

    Raises:
        MissingPackageError: pandas is not installed.
    """
    try:
        import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingPackageError("to_pandas() needs pandas, which is not installed: %pip install pandas") from error
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
        elif name == "first":
            dtypes = recording.store.texts.of(rows["dtype"])
            columns[name] = [first_values(row, dtype) for row, dtype in zip(rows, dtypes, strict=True)]
        else:
            columns[name] = column
    return pandas.DataFrame(columns)


def _in_words(numbers: Rows, text: Any) -> Any:
    unique, back = np.unique(numbers, return_inverse=True)
    return np.array([text(int(number)) for number in unique], object)[back]
