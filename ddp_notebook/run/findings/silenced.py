"""Comments that silence findings."""

from __future__ import annotations

import re

_COMMENT = re.compile(r"#\s*ddp:\s*ok\s+([a-z-]+(?:\s*,\s*[a-z-]+)*)")


def silenced_by(code: str) -> set[str]:
    """Return the names of the findings that comments in a cell silence.

    Example:
        >>> sorted(silenced_by("step()  # ddp: ok same-batches, same-epoch"))
        ['same-batches', 'same-epoch']
    """
    return {name for found in _COMMENT.findall(code) for name in re.split(r"\s*,\s*", found)}
