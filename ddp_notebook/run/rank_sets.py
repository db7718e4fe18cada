"""Syntax of rank sets.

all         every rank
0,2-3       ranks, and ranges with both ends
-1          counted from the last rank
::2  1:  :4 slices, as in Python: the end is excluded

`run/groups/named_ranks` has sets by name: `tp=1`, `host=gpu2`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from numbers import Integral

from ddp_notebook.errors import UsageError

_N = "[0-9]{1,18}"
_ITEM = re.compile(rf"(?P<rank>-?{_N})|(?P<first>{_N})-(?P<last>{_N})|(?P<slice>(-?{_N})?:(-?{_N})?(:(-?{_N})?)?)")
_MOST = 65536  # limit of entries or characters
RankSet = str | int | Sequence[int] | None


def parse_ranks(asked: RankSet, world_size: int) -> list[int]:
    """Return the ranks in a set, in order.

    Args:
        asked: text of the above syntax, one rank, several ranks, or None for all.
        world_size: number of ranks.

    Raises:
        UsageError: the set is invalid, or a rank does not exist; the message shows the wrong part.

    Example:
        >>> parse_ranks("0,2-3", 4), parse_ranks("-1", 4), parse_ranks("::2", 4)
        ([0, 2, 3], [3], [0, 2])
    """
    if asked is None:
        return list(range(world_size))
    if not isinstance(asked, str):
        if isinstance(asked, bytes) or not isinstance(asked, Iterable | Integral):
            raise UsageError(f"ranks must be a number, several numbers, or text such as '0,2-3', got {asked!r}")
        chosen = set()
        for at, number in enumerate([asked] if isinstance(asked, Integral) else asked):
            if isinstance(number, bool) or not isinstance(number, Integral):
                raise UsageError(f"ranks must be whole numbers from 0 to {world_size - 1}, got {number!r}")
            if at >= _MOST:
                raise UsageError(f"a rank set must have at most {_MOST:,} entries; the ranks are {_all(world_size)}")
            chosen.add(_one(int(number), str(number), world_size))
    elif len(asked) > _MOST:
        raise UsageError(f"{asked[:60]!r}... is too long for a rank set; the ranks are {_all(world_size)}")
    else:
        chosen = {rank for item in asked.split(",") for rank in _item(item.strip(), asked, world_size)}
    if not chosen:
        raise UsageError(f"{asked!r} selects no rank; the ranks are {_all(world_size)}")
    return sorted(chosen)


def _item(item: str, asked: str, world_size: int) -> list[int]:
    if item == "all":
        return list(range(world_size))
    found = _ITEM.fullmatch(item)
    if found is None:
        item, asked = (one if len(one) <= 200 else f"{one[:200]}..." for one in (item, asked))
        raise UsageError(f"{item!r} in the rank set {asked!r} must have a form such as all, 2, -1, 0-3 or ::2")
    if found["rank"]:
        return [_one(int(found["rank"]), item, world_size)]
    if found["first"]:
        first, last = int(found["first"]), int(found["last"])
        if first > last:
            raise UsageError(f"{item!r} in the rank set {asked!r} runs backwards; write {last}-{first}")
        return list(range(_one(first, item, world_size), _one(last, item, world_size) + 1))
    start, stop, step = (int(part) if part else None for part in (*item.split(":"), "")[:3])
    if step == 0:
        raise UsageError(f"{item!r} in the rank set {asked!r} must have a step other than 0")
    return list(range(world_size))[start:stop:step]


def _one(number: int, item: str, world_size: int) -> int:
    rank = number + world_size if number < 0 else number
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {item} does not exist; the ranks are {_all(world_size)}")
    return rank


def _all(world_size: int) -> str:
    return "0" if world_size == 1 else f"0 to {world_size - 1}"
