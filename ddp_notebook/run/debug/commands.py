"""Syntax of commands for the debuggers of some ranks.

p x            the ranks of the prompt
@2 p x         rank 2
@0-1 n         ranks 0 and 1
@all c         all stopped ranks
@tp=1 p x      ranks by name, as in `--ranks`
@2             selects rank 2 for the next prompts
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Command(NamedTuple):
    """A line of the user.

    Args:
        ranks: ranks before the command; None: none were named.
        text: command for the debuggers; "" selects the ranks for the next prompts, if some were named.
    """

    ranks: list[int] | None
    text: str


def parse_command(line: str, parse_ranks: Callable[[str], list[int]]) -> Command:
    """Parse a line of the user.

    Args:
        line: the typed line.
        parse_ranks: returns the ranks of a set, such as "0-1" or "tp=1".

    Raises:
        UsageError: the ranks are invalid; the message shows the wrong part.

    Example:
        >>> from ddp_notebook.run.rank_sets import parse_ranks
        >>> for line in ("@0-1 n", "p x"):
        ...     parse_command(line, lambda asked: parse_ranks(asked, 4))
        Command(ranks=[0, 1], text='n')
        Command(ranks=None, text='p x')
    """
    if not line.lstrip().startswith("@"):
        return Command(None, line)
    asked, _, text = line.lstrip()[1:].partition(" ")
    return Command(parse_ranks(asked), text.strip())
