"""Messages about a session that gets more or fewer ranks.

notebook -> rank
----------------
Inspect    what is in the way of that, and which variables are yours?
Resized    the group has formed: hand variables over, or take them, and let samplers go over all ranks
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ddp_notebook.wire.events import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect(Message):
    """Answer with `Checked`: what is in the way, see `rank.resize.obstacles`, and digests of all variables."""

    request: int
    compares: bool  # whether digests are wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized(Message):
    """Answer with `Pulled`, whose `about` is JSON: what was copied, what was not, and what became of samplers."""

    request: int
    was_rank: int  # before; of a new rank: that of the one that gives
    was_world_size: int
    number: int = -1  # among those that meet: 0 gives, the others take; -1: none of them
    size: int = 0  # how many meet
    meeting: str = ""  # the name of that, at the store of the group
    names: list[str] = field(default_factory=list)  # of the variables that are given
    random: list[str] = field(default_factory=list)  # of the random states that are, see `rank.resize.newcomers`
