"""Labels of lines: the ranks that wrote a line, in front of its text."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_notebook.records.words import format_ranks

LONGEST_LABEL = 20  # approximate limit in characters; longer labels are shortened


def label(ranks: Sequence[int]) -> str:
    """Return the label of a line.

    Args:
        ranks: in ascending order.

    Example:
        >>> label([0, 1, 2, 5])
        '[0-2,5] '
    """
    short = format_ranks(ranks)
    if len(short) > LONGEST_LABEL:
        short = f"{len(ranks)} ranks: {short[: LONGEST_LABEL - 8].rpartition(',')[0]},…"
    return f"[{short}] "


def labelled(ranks: Sequence[int], text: str) -> str:
    """Return a line with its label. Further lines of the text are indented; without text only the label is returned.

    Example:
        >>> labelled([0, 1], "a\\nb")
        '[0-1] a\\n      b'
    """
    prefix = label(ranks)
    return prefix + text.replace("\n", "\n" + " " * len(prefix)) if text else prefix.rstrip()
