"""A recording as one file: a zip of NumPy arrays (`.npz`, read with `allow_pickle=False`).

"head" is JSON with everything except rows. Each table is a structured array, with times of the ranks' clocks. "tensors"
contains the bytes of complete tensors.
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
    """A readable file with wrong contents. The message follows the path."""


def save(recorded: RecordedTables, path: str | os.PathLike[str]) -> Path:
    """Write a recording to one file. An existing file is replaced when the new one is complete.

    Raises:
        UsageError: the folder does not exist.
    """
    path = in_a_folder(path)
    # first, so that all texts of these rows are known
    kept = {name: ring.since(0) for name, ring in recorded.store.rings.items()}
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
        "findings": sorted(recorded.findings.items()),
        "same draws": sorted(recorded.same_draws.items()),
        "same inputs": sorted(recorded.same_inputs.items()),
        "out of memory": sorted(recorded._out_of_memory.items()),
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
    """Read the recording that `save` has written.

    Args:
        arrays: arrays of the file, by name.
        make: class of the recording.

    Raises:
        WrongFileError: the file has other contents, or a recording of another version.
        Exception: any error from reading a damaged file.
    """
    if "head" not in arrays:
        raise WrongFileError(f"is not a recording: it contains {', '.join(list(arrays)[:4]) or 'nothing'}")
    head = json.loads(arrays["head"].tobytes())
    if head["format"] != FORMAT:
        raise WrongFileError(f"is not a recording but {head['format']!r}")
    if head["version"] != VERSION:
        raise WrongFileError(f"is a recording of version {head['version']}; this is version {VERSION}")
    # Files from before these tables existed do not have them. A file that should have a table is damaged.
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
    recorded.findings.update((int(cell), tuple(map(str, found))) for cell, found in head.get("findings", ()))
    recorded.same_draws.update((int(cell), tuple(map(str, found))) for cell, found in head.get("same draws", ()))
    recorded.same_inputs.update((int(cell), groups) for cell, groups in head.get("same inputs", ()))
    recorded._out_of_memory.update((int(rank), dict(facts)) for rank, facts in head.get("out of memory", ()))
    data, at = arrays["tensors"].tobytes(), 0
    tensors = []
    for rank, call, side, own_call, dtype, shape, nbytes in head["tensors"]:
        one = Tensor(call=own_call, side=side, dtype=dtype, shape=tuple(shape), data=data[at : at + nbytes])
        tensors.append(((rank, call, side), one))
        at += nbytes
    recorded.store.restore(head["texts"], tables, dict(head["dropped"]), tensors)
    return recorded


def _in_file(ends: Mapping[str, int], first: Mapping[str, int], earlier: Indexes) -> dict[str, int]:
    """Convert indexes of rows to indexes in a file, which start at 0 with the first row of each table.

    Args:
        first: index of the first row of each table.
        earlier: indexes of the thinned metrics.
    """
    found = {table: max(0, index - first[table]) for table, index in ends.items()}
    found["metric"] += int(np.searchsorted(earlier, ends["metric"]))
    return found
