"""Names of objects that are equal in both runs, although a later run of a session has other objects."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ddp_notebook.observe.tables.matching import RowSource

_NUMBERED = re.compile(r"(.+) (\d+)")


def renumbered(names: Iterable[str]) -> dict[str, str]:
    """Number objects of the same class within one run: a recording numbers them within a session.

    Example:
        >>> renumbered(["Net 3", "Net 5", "Linear"])
        {'Linear': 'Linear', 'Net 3': 'Net', 'Net 5': 'Net 2'}
    """

    def split(name: str) -> tuple[str, int]:
        found = _NUMBERED.fullmatch(name)
        return (name, 1) if found is None else (found[1], int(found[2]))

    counts: dict[str, int] = {}
    new = {}
    for name in sorted(set(names), key=split):
        kind = split(name)[0]
        counts[kind] = count = counts.get(kind, 0) + 1
        new[name] = kind if count == 1 else f"{kind} {count}"
    return new


def group_title(recording: RowSource, number: int) -> str:
    """Return the title of a group. A group without a description has its ranks instead of torch's number."""
    group = recording.group_of(number)
    if group["title"] != group["name"]:
        return str(group["title"])
    return f"of ranks {','.join(map(str, group['ranks']))}" if group["ranks"] else str(group["title"])
