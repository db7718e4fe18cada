"""A recording as one file: a zip of NumPy arrays (`.npz`, read with `allow_pickle=False`).

"head" is JSON of all that is no row; each table is a structured array, times as the ranks had them; "tensors" holds the
bytes of whole tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ddp_notebook.observe.clock import Clock
from ddp_notebook.observe.tables import store
from ddp_notebook.observe.tables.metric_thinning import Indexes
from ddp_notebook.observe.tables.recorded import FormerClock, RecordedTables
from ddp_notebook.observe.writing import in_a_folder, write_whole
from ddp_notebook.records.codec import Tensor
from ddp_notebook.records.schema import LATER, TABLES, upgraded

FORMAT = "ddp_notebook recording"
VERSION = 1
_T = TypeVar("_T", bound=RecordedTables)


class WrongFileError(Exception):
    """What is wrong with a file that can be read; the path goes before these words."""


def save(recorded: RecordedTables, path: str | os.PathLike[str]) -> Path:
    """Write a recording to one file. A file that is there is replaced once the new one is whole.

    Raises:
        UsageError: the folder is not there.
    """
    path = in_a_folder(path)
    kept = {name: ring.since(0) for name, ring in recorded.store.rings.items()}  # first: all of their texts are known
    rows: dict[str, Any] = {name: part for name, (part, _, _) in kept.items()}
    first = {name: end - len(part) for name, (part, end, _) in kept.items()}
    earlier, indexes = recorded.store.earlier.before(first["metric"])
    rows["metric"] = np.concatenate([earlier, rows["metric"]])
    tensors = recorded.store.kept_tensors()
    head = {
        "format": FORMAT,
        "version": VERSION,
        "tables": list(TABLES),
        "world_size": recorded.world_size,
        "hosts": recorded.hosts,
        "prompts": sorted(recorded.prompts.items()),
        "baseline": None if recorded.baseline is None else dict(recorded.baseline),
        "aside": sorted(recorded.aside),
        "dropped": sorted(recorded.store.dropped.items()),
        "clock": recorded.clock.to_json(),
        "former": [[one.rank, one.clock.to_json(), _in_file(one.ends, first, indexes)] for one in recorded.former],
        "texts": recorded.store.texts.all(),
        "tensors": [[*key, one.call, one.dtype, list(one.shape), len(one.data)] for key, one in tensors],
    }
    arrays: dict[str, Any] = {
        "head": np.frombuffer(json.dumps(head).encode(), np.uint8),
        "tensors": np.frombuffer(b"".join(one.data for _, one in tensors), np.uint8),
    }
    write_whole(path, lambda file: np.savez_compressed(file, **arrays, **rows))
    return path


def restore(arrays: Any, make: Callable[..., _T]) -> _T:
    """The recording that `save` has written.

    Args:
        arrays: of the file, by name.
        make: the class of the recording.

    Raises:
        WrongFileError: the file holds something else, or a recording of another version.
        Exception: whatever reading a damaged file raises.
    """
    if "head" not in arrays:
        raise WrongFileError(f"is not a recording: it holds {', '.join(list(arrays)[:4]) or 'nothing'}")
    head = json.loads(arrays["head"].tobytes())
    if head["format"] != FORMAT:
        raise WrongFileError(f"is not a recording but {head['format']!r}")
    if head["version"] != VERSION:
        raise WrongFileError(f"is a recording of version {head['version']}; this is version {VERSION}")
    # Files of before these tables were there have none. One that should have a table is damaged.
    own = set(head.get("tables", arrays))
    tables = {
        name: upgraded(name, np.zeros(0, dtype) if name in LATER and name not in own else arrays[name])
        for name, dtype in TABLES.items()
    }
    for name, rows in tables.items():
        if rows.dtype != TABLES[name]:
            raise WrongFileError(f"is a recording of another version: its table {name!r} has other columns")
    recorded = make(
        head["world_size"],
        capacity={name: max(store.CAPACITY[name], len(rows)) for name, rows in tables.items()},
        clock=Clock.from_json(head["clock"]),
    )
    recorded.former = [
        FormerClock(rank=rank, clock=Clock.from_json(clock), ends=ends) for rank, clock, ends in head.get("former", ())
    ]
    recorded.hosts = tuple(head.get("hosts", ()))
    recorded.prompts.update((int(cell), str(prompt)) for cell, prompt in head.get("prompts", ()))
    recorded.baseline = head["baseline"]
    recorded.aside.update(head.get("aside", ()))
    data, at = arrays["tensors"].tobytes(), 0
    tensors = []
    for rank, call, side, own_call, dtype, shape, nbytes in head["tensors"]:
        one = Tensor(call=own_call, side=side, dtype=dtype, shape=tuple(shape), data=data[at : at + nbytes])
        tensors.append(((rank, call, side), one))
        at += nbytes
    recorded.store.restore(head["texts"], tables, dict(head["dropped"]), tensors)
    return recorded


def _in_file(ends: Mapping[str, int], first: Mapping[str, int], earlier: Indexes) -> dict[str, int]:
    """Indexes of rows by table, as a file counts them: from 0 at the first that it has.

    Args:
        first: index of the first row of each table.
        earlier: indexes of the metrics before.
    """
    found = {table: max(0, index - first[table]) for table, index in ends.items()}
    found["metric"] += int(np.searchsorted(earlier, ends["metric"]))
    return found
