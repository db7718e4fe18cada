"""Sets of ranks as people write them.

all         every rank
0,2-3       some, and ranges with both ends
-1          counted from the last
::2  1:  :4 slices, as in Python: the end is not part of it
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddp_notebook.errors import UsageError

_ITEM = re.compile(r"(?P<rank>-?\d+)|(?P<first>\d+)-(?P<last>\d+)|(?P<slice>(-?\d+)?:(-?\d+)?(:(-?\d+)?)?)")
RankSet = str | int | Sequence[int] | None


def parse_ranks(asked: RankSet, world_size: int) -> list[int]:
    """The ranks that a set names, in order.

    Args:
        asked: a string of the grammar above, a rank, several, or None for all.
        world_size: how many ranks there are.

    Raises:
        UsageError: not a set, or no such rank; names the wrong part.

    Example:
        >>> parse_ranks("0,2-3", 4), parse_ranks("-1", 4), parse_ranks("::2", 4)
        ([0, 2, 3], [3], [0, 2])
    """
    if asked is None:
        return list(range(world_size))
    if not isinstance(asked, str):
        numbers = [asked] if isinstance(asked, int) else list(asked)
        for number in numbers:
            if not isinstance(number, int) or isinstance(number, bool):
                raise UsageError(f"{number!r} is not a rank: ranks are whole numbers from 0 to {world_size - 1}")
        chosen = {_one(number, str(number), world_size) for number in numbers}
    else:
        chosen = {rank for item in asked.split(",") for rank in _item(item.strip(), asked, world_size)}
    if not chosen:
        raise UsageError(f"{asked!r} names no rank; the ranks are {_all(world_size)}")
    return sorted(chosen)


def _item(item: str, asked: str, world_size: int) -> list[int]:
    if item == "all":
        return list(range(world_size))
    found = _ITEM.fullmatch(item)
    if found is None:
        raise UsageError(f"{item!r} in the rank set {asked!r} is none of: all, 2, -1, 0-3, ::2")
    if found["rank"]:
        return [_one(int(found["rank"]), item, world_size)]
    if found["first"]:
        first, last = int(found["first"]), int(found["last"])
        if first > last:
            raise UsageError(f"{item!r} in the rank set {asked!r} runs backwards; write {last}-{first}")
        return list(range(_one(first, item, world_size), _one(last, item, world_size) + 1))
    start, stop, step = (int(part) if part else None for part in (*item.split(":"), "")[:3])
    if step == 0:
        raise UsageError(f"{item!r} in the rank set {asked!r} has a step of 0")
    return list(range(world_size))[start:stop:step]


def _one(number: int, item: str, world_size: int) -> int:
    rank = number + world_size if number < 0 else number
    if not 0 <= rank < world_size:
        raise UsageError(f"there is no rank {item}; the ranks are {_all(world_size)}")
    return rank


def _all(world_size: int) -> str:
    return "0" if world_size == 1 else f"0 to {world_size - 1}"
