"""Join several buffers into one: a table of their sizes, then each buffer at a multiple of 64 bytes.

The first buffer describes the value, as a pickle or as JSON. The other buffers hold the memory of its arrays and
tensors, which the receiver uses without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import struct

_ALIGNED = 64  # bytes; torch and NumPy compute fastest on addresses with this alignment
_NUMBER = struct.Struct("!Q")


def join(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the memory chunks of the joined buffer, in order, without copying them.

    Args:
        parts: the buffers to join, each as a sequence of chunks.

    Example:
        >>> joined = b"".join(join([[b"ab", b"c"], [b"de"]]))
        >>> [bytes(part) for part in split(joined)]
        [b'abc', b'de']
    """
    views = [[memoryview(chunk).cast("B") for chunk in part] for part in parts]
    sizes = [sum(map(len, part)) for part in views]
    table = b"".join(map(_NUMBER.pack, [len(sizes), *sizes]))
    chunks: list[Any] = [table, bytes(-len(table) % _ALIGNED)]
    for part, size in zip(views, sizes, strict=True):
        chunks += [*part, bytes(-size % _ALIGNED)]
    return [chunk for chunk in chunks if len(chunk)]


def split(data: Any) -> list[memoryview]:
    """Split a buffer that `join` made into its parts, without copying them.

    Raises:
        ValueError: the table of sizes does not match the buffer.
    """
    whole = memoryview(data).cast("B")
    if len(whole) < _NUMBER.size:
        raise ValueError(f"{len(whole)} bytes hold no table of parts")
    (count,) = _NUMBER.unpack_from(whole)
    begin = (1 + count) * _NUMBER.size
    if not 0 < count <= len(whole) // _NUMBER.size - 1:
        raise ValueError(f"{len(whole)} bytes hold no table of {count} parts")
    sizes = struct.unpack_from(f"!{count}Q", whole, _NUMBER.size)
    parts = []
    for size in sizes:
        begin += -begin % _ALIGNED
        if size > len(whole) - begin:
            raise ValueError(f"a part of {size} bytes begins at byte {begin} of {len(whole)}")
        parts.append(whole[begin : begin + size])
        begin += size
    if begin + -begin % _ALIGNED != len(whole):
        raise ValueError(f"the parts have {begin} of {len(whole)} bytes")
    return parts
