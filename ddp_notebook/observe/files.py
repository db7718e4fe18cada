"""Recordings in files: one that the notebook has saved, and those that ranks without a notebook have written.

A saved one is a zip of NumPy arrays (`.npz`, read with `allow_pickle=False`): "head", JSON of all that is no row; a
structured array for each table, times as the ranks had them; "tensors", the bytes of whole tensors. Ranks write a file
each, `*.ddp`: one batch behind the other.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from ddp_notebook.errors import RecordingError, UsageError
from ddp_notebook.observe.clock import Clock
from ddp_notebook.observe.recording import Recording
from ddp_notebook.observe.tables import store
from ddp_notebook.records.codec import Batch, CodecError, Tensor, decode_all
from ddp_notebook.records.schema import TABLES

FORMAT = "ddp_notebook recording"
VERSION = 1
_OF_RANKS = "*.ddp"


def save(recording: Recording, path: str | os.PathLike[str]) -> Path:
    """Write a recording to one file. A file that is there is replaced once the new one is whole.

    Raises:
        UsageError: the folder is not there.
    """
    path = Path(path).expanduser()
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {str(path.parent)!r} to write {path.name} to; make it first")
    rows: dict[str, Any] = {
        name: ring.all() for name, ring in recording.store.rings.items()
    }  # first: the texts of all of them are known then
    tensors = recording.store.kept_tensors()
    head = {
        "format": FORMAT,
        "version": VERSION,
        "world_size": recording.world_size,
        "baseline": None if recording.baseline is None else dict(recording.baseline),
        "aside": sorted(recording.aside),
        "dropped": sorted(recording.store.dropped.items()),
        "clock": recording.clock.to_json(),
        "texts": recording.store.texts.all(),
        "tensors": [[*key, one.call, one.dtype, list(one.shape), len(one.data)] for key, one in tensors],
    }
    arrays: dict[str, Any] = {
        "head": np.frombuffer(json.dumps(head).encode(), np.uint8),
        "tensors": np.frombuffer(b"".join(one.data for _, one in tensors), np.uint8),
    }
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with part.open("xb") as file:
            np.savez_compressed(file, **arrays, **rows)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def load(path: str | os.PathLike[str]) -> Recording:
    """A recording from a file that `Recording.save` has written, or from the directory of `DDP_NOTEBOOK_RECORD`.

    All that a directory holds is kept. The clocks of its ranks are taken as they are: they are the same on one host.

    Args:
        path: a file; a directory with a file for each rank; or the file of one rank.

    Raises:
        RecordingError: it holds no recording, or one of another version.
        FileNotFoundError: there is nothing.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as directory:
        ...     load(Recording(world_size=4).save(f"{directory}/run.npz"))
        <Recording of 4 ranks: 0 calls, 0 spans, 0 values of metrics>
    """
    path = Path(path).expanduser()
    if path.is_dir():
        files = sorted(path.glob(_OF_RANKS))
        if not files:
            raise RecordingError(f"{path} holds no recording: no file in it is named {_OF_RANKS}")
        return _of_ranks(files)
    if path.suffix == Path(_OF_RANKS).suffix:
        return _of_ranks([path])
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise RecordingError(f"{path} is no recording: Recording.save() writes zip files, and this is none")
        try:
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                return _saved(arrays)
        except _Wrong as error:
            raise RecordingError(f"{path} {error}") from None
        except Exception as error:  # zipfile and NumPy have a dozen, down to those of Python's tokenizer
            raise RecordingError(f"{path} is a damaged recording, or none at all: {error}") from error


class _Wrong(Exception):
    """What is wrong with a file that can be read."""


def _saved(arrays: Any) -> Recording:
    if "head" not in arrays:
        raise _Wrong(f"is no recording: it holds {', '.join(list(arrays)[:4]) or 'nothing'}")
    head = json.loads(arrays["head"].tobytes())
    if head["format"] != FORMAT:
        raise _Wrong(f"is no recording but {head['format']!r}")
    if head["version"] != VERSION:
        raise _Wrong(f"is a recording of version {head['version']}; this is version {VERSION}")
    tables = {name: arrays[name] for name in TABLES}
    for name, rows in tables.items():
        if rows.dtype != TABLES[name]:
            raise _Wrong(f"is a recording of another version: its table {name!r} has other columns")
    recording = Recording(
        head["world_size"],
        capacity={name: max(store.CAPACITY[name], len(rows)) for name, rows in tables.items()},
        clock=Clock.from_json(head["clock"]),
    )
    recording.baseline = head["baseline"]
    recording.aside.update(head.get("aside", ()))
    data, at = arrays["tensors"].tobytes(), 0
    tensors = []
    for rank, call, side, own_call, dtype, shape, nbytes in head["tensors"]:
        one = Tensor(call=own_call, side=side, dtype=dtype, shape=tuple(shape), data=data[at : at + nbytes])
        tensors.append(((rank, call, side), one))
        at += nbytes
    recording.store.restore(head["texts"], tables, dict(head["dropped"]), tensors)
    return recording


def _of_ranks(files: list[Path]) -> Recording:
    batches: list[list[Batch]] = []
    for file in files:
        try:
            batches.append(list(decode_all(file.read_bytes())))
        except CodecError as error:
            raise RecordingError(f"{file} is no rank's recording, or a damaged one: {error}") from error
    files_of = Counter(one[0].rank for one in batches if one)
    if (most := max(files_of.values(), default=0)) > 1:
        warnings.warn(
            f"{files[0].parent} holds up to {most} files of one rank, which was started again, or these are several "
            "runs: all are read as one; give each run a directory of its own",
            stacklevel=3,
        )
    counts: Counter[str] = Counter()
    for batch in itertools.chain(*batches):
        counts.update({name: len(rows) for name, rows in batch.tables.items()})
    capacity = {name: max(store.CAPACITY[name], count) for name, count in counts.items()}
    recording = Recording(1 + max((batch.rank for one in batches for batch in one), default=-1), capacity=capacity)
    for row in itertools.zip_longest(*batches):  # side by side, as they would have come over the wire
        for batch in filter(None, row):
            recording.feed(batch)
    return recording
