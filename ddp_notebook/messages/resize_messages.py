"""Messages for a session whose number of ranks changes.

notebook -> rank
----------------
Inspect    return obstacles to a resize, and digests of the variables
Resized    the group was formed: send or receive variables, and adapt samplers to the new number of ranks
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddp_notebook.messages.encoding import Message
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect(Message):
    """Request `Checked` with obstacles to a resize (see `rank.resize.blockers`) and digests of all variables."""

    request: int
    compares: bool  # also compute digests


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized(Message):
    """Transfer variables after a resize.

    The reply is `Pulled`. Its `about` is JSON: copied variables, variables that were not copied, and changes of
    samplers.
    """

    request: int
    was_rank: int  # previous rank; for a new rank that of the rank that sends the variables
    was_world_size: int
    number: int = -1  # number in the group that transfers variables: 0 sends, the others receive; -1 if not a member
    size: int = 0  # size of that group
    meeting: str = ""  # name of that group in the store
    names: list[str] = field(default_factory=list)  # variables to send
    random: list[str] = field(default_factory=list)  # random states to send, see `rank.resize.resize_requests`


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerChange:
    """Change of a sampler of one rank: adapted to another number of ranks, or left unchanged.

    Args:
        name: variable of the loader or sampler; "" if no variable holds it.
        count: number of samplers without a name.
        was, now: previous and new number of ranks; both 0 if unchanged.
        batch_size: samples in a batch of one rank; 0 if unknown.
    """

    name: str = ""
    count: int = 1
    was: int = 0
    now: int = 0
    batch_size: int = 0

    @classmethod
    def of_json(cls, told: dict[str, Any]) -> SamplerChange:
        """Return the change from its `dataclasses.asdict`."""
        return cls(**told)

    @property
    def is_left(self) -> bool:
        """Return whether the sampler was left unchanged."""
        return not self.now

    @property
    def what(self) -> str:
        """Describe the sampler and its number of ranks.

        Example:
            >>> SamplerChange(name="loader", was=3, now=2, batch_size=4).what
            'loader goes over 2 ranks now'
            >>> SamplerChange(count=2).what
            '2 DistributedSamplers are not for all earlier ranks, and not changed'
        """
        s = "s" * (self.count != 1)
        name = self.name or f"{self.count} DistributedSampler{s}"
        if self.is_left:
            return f"{name} {'are' if s else 'is'} not for all earlier ranks, and not changed"
        return f"{name} {'go' if s else 'goes'} over {self.now} rank{'s' * (self.now != 1)} now"

    @property
    def of_step(self) -> str:
        """Describe the number of samples in a step of all ranks.

        Example:
            >>> SamplerChange(batch_size=4, was=3, now=2).of_step
            'with batches of 4 a step has 8 samples instead of 12'
            >>> SamplerChange(was=3, now=2).of_step
            'a step has 2/3 of its earlier samples, if the batch size of each rank stays the same'
        """
        if self.batch_size:
            before, after = self.batch_size * self.was, self.batch_size * self.now
            return f"with batches of {self.batch_size} a step has {after} samples instead of {before}"
        return f"a step has {self.now}/{self.was} of its earlier samples, if the batch size of each rank stays the same"

    def __str__(self) -> str:
        return f"{self.what}: {self.of_step}" if self.batch_size else self.what
