"""Serialize batches of recorded rows, for the connection to the notebook and for files.

    "DDPB"  version u2  tables u2  crc32 u4 of all that follows  nbytes u8 of all that follows
    JSON length u4, JSON: sender, new texts, metadata of whole tensors, name, row count and row size of each table
    the rows of each table, the bytes of each whole tensor

Numbers are little endian. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddp_notebook.records.schema import EARLIER, TABLES, Rows, upgraded
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import json, struct, zlib

VERSION = 1
_MAGIC = b"DDPB"
_HEAD = struct.Struct("<4sHHIQ")
_LENGTH = struct.Struct("<I")
_of_json = json.JSONDecoder().raw_decode  # unlike `json.loads`, does not detect the encoding first
# Exceptions that a malformed header can raise even if the checksum matches.
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error, RecursionError)


class CodecError(ValueError):
    """The bytes are not a batch that this version can read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Complete contents of one tensor, recorded on request."""

    call: int
    side: int  # index in `schema.SIDES`
    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows that one rank recorded since its last batch.

    Args:
        rank: rank of the session.
        stream: number of the rank's process. Texts and calls are numbered per process.
        dropped: rows that the rank dropped before this batch because the notebook could not keep up.
        texts: text number -> new text.
        tables: table name -> rows.
        tensors: complete tensors.

    Example:
        >>> batch = Batch(rank=1, stream=7, texts={1: "all_reduce"})
        >>> decode(encode(batch)) == batch
        True
    """

    rank: int
    stream: int
    dropped: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    tables: dict[str, Rows] = field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batch) and encode(self) == encode(other)

    __hash__ = None  # type: ignore[assignment]  # contains arrays


def encode(batch: Batch) -> bytes:
    """Serialize a batch."""
    tables = {name: rows for name, rows in batch.tables.items() if len(rows)}
    words = {
        "rank": batch.rank,
        "stream": batch.stream,
        "dropped": batch.dropped,
        "texts": [[number, text] for number, text in batch.texts.items()],
        "tables": [[name, len(rows), TABLES[name].itemsize] for name, rows in tables.items()],
        "tensors": [[one.call, one.side, one.dtype, list(one.shape), len(one.data)] for one in batch.tensors],
    }
    head = json.dumps(words, separators=(",", ":")).encode()
    body = b"".join(
        [
            _LENGTH.pack(len(head)),
            head,
            *(np.ascontiguousarray(rows, TABLES[name]).tobytes() for name, rows in tables.items()),
            *(one.data for one in batch.tensors),
        ]
    )
    return _HEAD.pack(_MAGIC, VERSION, len(tables), zlib.crc32(body), len(body)) + body


def decode(data: bytes) -> Batch:
    """Deserialize the bytes of `encode`.

    Raises:
        CodecError: the bytes are not a batch, or have another version.
    """
    batch, end = _read(data, 0)
    if end != len(data):
        raise CodecError(f"{len(data) - end} bytes too many behind a batch")
    return batch


def skim(data: bytes) -> Batch:
    """Deserialize a batch without its rows and tensors, and count the rows as dropped.

    This takes a third of the time of `decode`.

    Raises:
        CodecError: the bytes are not a batch, or have another version.
    """
    body, _ = _checked(data, 0)
    try:
        words, _ = _words(body)
        dropped = int(words["dropped"]) + sum(int(rows) for _, rows, _ in words["tables"])
        texts = {int(number): str(text) for number, text in words["texts"]}
        return Batch(rank=int(words["rank"]), stream=int(words["stream"]), dropped=dropped, texts=texts)
    except _DAMAGE as error:
        raise CodecError(f"a batch is damaged: {error}") from error


def decode_all(data: bytes) -> Iterator[Batch]:
    """Yield the batches of a file. An incomplete last batch is skipped, because its rank may have been killed.

    Raises:
        CodecError: the file contains other data.
    """
    at = 0
    while at < len(data):
        if len(data) - at < _HEAD.size or len(data) - at - _HEAD.size < _HEAD.unpack_from(data, at)[4]:
            if data[at : at + 4] not in (_MAGIC, _MAGIC[: len(data) - at]):
                raise CodecError(f"no batch at byte {at}")
            return
        batch, at = _read(data, at)
        yield batch


def _read(data: bytes, at: int) -> tuple[Batch, int]:
    body, count = _checked(data, at)
    try:
        batch = _parse(body, count)
    except _DAMAGE as error:
        raise CodecError(f"a batch is damaged: {error}") from error
    return batch, at + _HEAD.size + len(body)


def _checked(data: bytes, at: int) -> tuple[memoryview, int]:
    """Return the body of the batch at offset `at` and its number of tables. Verify the checksum."""
    try:
        magic, version, count, crc, nbytes = _HEAD.unpack_from(data, at)
    except struct.error as error:
        raise CodecError(f"{len(data) - at} bytes are no batch") from error
    if magic != _MAGIC:
        raise CodecError(f"no batch: begins with {magic!r}")
    if version != VERSION:
        raise CodecError(f"a batch of version {version}; this is version {VERSION}")
    body = memoryview(data)[at + _HEAD.size : at + _HEAD.size + nbytes]
    if len(body) != nbytes or zlib.crc32(body) != crc:
        raise CodecError("a batch is damaged")
    return body, count


def _words(body: memoryview) -> tuple[dict[str, Any], int]:
    """Return the JSON of a batch body and the offset of its end."""
    (length,) = _LENGTH.unpack_from(body)
    at = _LENGTH.size + length
    words, end = _of_json(text := str(body[_LENGTH.size : at], "utf-8"))
    if end < len(text):
        raise ValueError("there is more behind its JSON")
    return words, at


def _parse(body: memoryview, count: int) -> Batch:
    words, at = _words(body)
    if len(words["tables"]) != count:
        raise ValueError("its tables are not those that it names")

    def take(nbytes: int) -> memoryview:
        nonlocal at
        if nbytes < 0 or at + nbytes > len(body):
            raise ValueError("it is shorter than it says")
        at += nbytes
        return body[at - nbytes : at]

    tables: dict[str, Rows] = {}
    for name, rows, itemsize in words["tables"]:
        forms = [dtype for dtype in (TABLES[name], *EARLIER.get(name, ())) if dtype.itemsize == itemsize]
        if not forms or name in tables:
            raise ValueError(f"its table {name} has other columns")
        tables[name] = upgraded(name, np.frombuffer(take(rows * itemsize), forms[0]))
    tensors = tuple(
        Tensor(call=int(call), side=int(side), dtype=str(dtype), shape=tuple(map(int, shape)), data=bytes(take(nbytes)))
        for call, side, dtype, shape, nbytes in words["tensors"]
    )
    if at != len(body):
        raise ValueError("it is longer than it says")
    texts = {int(number): str(text) for number, text in words["texts"]}
    return Batch(
        rank=int(words["rank"]),
        stream=int(words["stream"]),
        dropped=int(words["dropped"]),
        texts=texts,
        tables=tables,
        tensors=tensors,
    )
