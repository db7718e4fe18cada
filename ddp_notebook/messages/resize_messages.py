"""Messages about a session that gets more or fewer ranks.

notebook -> rank
----------------
Inspect    what is in the way of that, and which variables are yours?
Resized    the group has formed: hand variables over, or take them, and let samplers go over all ranks
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddp_notebook.messages.encoding import Message


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerChange:
    """The change of a sampler of one rank: it goes over another number of ranks, or was left as before.

    Args:
        name: the user's variable, a loader or a sampler; "" if no variable holds it.
        count: how many samplers without a name this is about.
        was, now: the numbers of ranks that it went over, and goes over; both 0 if it was left as before.
        batch_size: samples in a batch of one rank; 0 if not known.
    """

    name: str = ""
    count: int = 1
    was: int = 0
    now: int = 0
    batch_size: int = 0

    @classmethod
    def of_json(cls, told: dict[str, Any]) -> SamplerChange:
        """Read what `dataclasses.asdict` made of one."""
        return cls(**told)

    @property
    def is_left(self) -> bool:
        """Whether it does not go over the present ranks."""
        return not self.now

    @property
    def what(self) -> str:
        """The sampler, and over how many ranks it goes.

        Example:
            >>> SamplerChange(name="loader", was=3, now=2, batch_size=4).what
            'loader goes over 2 ranks now'
            >>> SamplerChange(count=2).what
            '2 DistributedSamplers are not for all the ranks that there were, and left as before'
        """
        s = "s" * (self.count != 1)
        name = self.name or f"{self.count} DistributedSampler{s}"
        if self.is_left:
            return f"{name} {'are' if s else 'is'} not for all the ranks that there were, and left as before"
        return f"{name} {'go' if s else 'goes'} over {self.now} rank{'s' * (self.now != 1)} now"

    @property
    def of_step(self) -> str:
        """The samples in a step of all ranks.

        Example:
            >>> SamplerChange(batch_size=4, was=3, now=2).of_step
            'with batches of 4 a step has 8 samples, and had 12'
            >>> SamplerChange(was=3, now=2).of_step
            "a step has 2/3 of the samples that it had, if each rank's batch stays as large"
        """
        if self.batch_size:
            before, after = self.batch_size * self.was, self.batch_size * self.now
            return f"with batches of {self.batch_size} a step has {after} samples, and had {before}"
        return f"a step has {self.now}/{self.was} of the samples that it had, if each rank's batch stays as large"

    def __str__(self) -> str:
        return f"{self.what}: {self.of_step}" if self.batch_size else self.what
