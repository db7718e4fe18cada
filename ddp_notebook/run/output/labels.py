"""The label of a line: the ranks that wrote it, in front of its text."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_notebook.records.words import format_ranks

LONGEST_LABEL = 20  # characters, about: a longer one is cut


def label(ranks: Sequence[int]) -> str:
    """The label of a line.

    Args:
        ranks: in order.

    Example:
        >>> label([0, 1, 2, 5])
        '[0-2,5] '
    """
    short = format_ranks(ranks)
    if len(short) > LONGEST_LABEL:
        short = f"{len(ranks)} ranks: {short[: LONGEST_LABEL - 8].rpartition(',')[0]},…"
    return f"[{short}] "


def labelled(ranks: Sequence[int], text: str) -> str:
    """A line with its label. Further lines of the text are indented as far as its first; without text only the label.

    Example:
        >>> labelled([0, 1], "a\\nb")
        '[0-1] a\\n      b'
    """
    prefix = label(ranks)
    return prefix + text.replace("\n", "\n" + " " * len(prefix)) if text else prefix.rstrip()
