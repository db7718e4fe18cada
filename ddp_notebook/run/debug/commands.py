"""Syntax of commands for the debuggers of some ranks.

p x            the ranks of the prompt
@2 p x         rank 2
@0-1 n         ranks 0 and 1
@all c         all stopped ranks
@tp=1 p x      ranks with coordinate 1 in the dimension "tp" of the program's device meshes
@2             selects rank 2 for the next prompts
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ddp_notebook.errors import UsageError
from ddp_notebook.run.rank_sets import parse_ranks

_DIMENSION = re.compile(r"([A-Za-z_]\w*)=(\d+)")
Meshes = Mapping[int, Mapping[str, Sequence[int]]]  # coordinates by rank and dimension


class Command(NamedTuple):
    """A line of the user.

    Args:
        ranks: ranks before the command; None: none were named.
        text: command for the debuggers; "" selects the ranks for the next prompts, if some were named.
    """

    ranks: list[int] | None
    text: str


def parse_command(line: str, world_size: int, meshes: Meshes) -> Command:
    """Parse a line of the user.

    Args:
        line: the typed line.
        world_size: number of ranks.
        meshes: coordinates of the stopped ranks.

    Raises:
        UsageError: the ranks are invalid; the message shows the wrong part.

    Example:
        >>> parse_command("@0-1 n", 4, {}), parse_command("p x", 4, {})
        (Command(ranks=[0, 1], text='n'), Command(ranks=None, text='p x'))
        >>> parse_command("@tp=1 p x", 4, {0: {"tp": [0]}, 1: {"tp": [1]}})
        Command(ranks=[1], text='p x')
    """
    if not line.lstrip().startswith("@"):
        return Command(None, line)
    asked, _, text = line.lstrip()[1:].partition(" ")
    if "=" in asked:
        return Command(_of_meshes(asked, meshes), text.strip())
    return Command(parse_ranks(asked, world_size), text.strip())


def _of_meshes(asked: str, meshes: Meshes) -> list[int]:
    ranks = set(meshes)
    for part in asked.split(","):
        if (found := _DIMENSION.fullmatch(part)) is None:
            raise UsageError(f"{part!r} in @{asked} must have a form such as tp=1")
        name, coordinate = found[1], int(found[2])
        having = {rank: of_rank[name] for rank, of_rank in meshes.items() if name in of_rank}
        if not having:
            names = sorted({name for of_rank in meshes.values() for name in of_rank})
            known = (
                f"the dimensions are {', '.join(names)}" if names else "no variable there is a DeviceMesh with names"
            )
            raise UsageError(f"no device mesh of the stopped ranks has the dimension {name!r}: {known}")
        if several := [rank for rank, numbers in having.items() if len(numbers) > 1]:
            numbers = " and ".join(map(str, having[several[0]]))
            raise UsageError(
                f"several device meshes have the dimension {name!r}, and rank {several[0]} is {numbers} in them: name "
                "ranks by their numbers"
            )
        ranks &= {rank for rank, numbers in having.items() if coordinate in numbers}
    if not ranks:
        raise UsageError(f"@{asked} selects no stopped rank")
    return sorted(ranks)
