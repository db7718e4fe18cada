"""A communication operation in words and numbers, as both sides describe one that a rank waits in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ddp_notebook.records.names import readable
from ddp_notebook.records.units import size

POINT_TO_POINT = ("send", "recv")
OPERATIONS = (  # all that are recorded
    *POINT_TO_POINT,
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "gather",
    "gather_single",
    "scatter",
    "all_gather",
    "all_gather_single",
    "all_gather_coalesced",
    "all_gather_single_coalesced",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One call of a collective, of a send or of a receive, on one rank."""

    name: str  # as users call it: "all_reduce"
    number: int  # on its rank, in its group since that was formed: collectives, sends and receives each from 1
    group: str  # "default", or how `torch` or the user describes it
    ranks: tuple[int, ...]  # of the group, as ranks of the session
    dtype: str = ""  # of its tensors, without "torch."; "": it has none
    shapes: tuple[tuple[int, ...], ...] = ()  # of its input, or of its output where it has no input
    nbytes: int = 0
    root: int | None = None  # the source, or the destination, as a rank of the session
    tag: int = 0  # of a message
    reduce_op: str = ""
    meaning: str = ""  # what it carries, in words: "activations of microbatch 3 for stage 2"
    origin: str = ""  # the parallel library of torch that needs it for that, of `schema.ORIGINS`; "": none, or unknown
    since_s: float = 0.0  # how long it has been under way

    @property
    def is_point_to_point(self) -> bool:
        return self.name in POINT_TO_POINT

    @property
    def what(self) -> str:
        """Such as `"float32[1024]"`."""
        return ", ".join(
            [f"{self.dtype}{_shape(shape)}" for shape in self.shapes[:2]] + ["..."] * (len(self.shapes) > 2)
        )

    @property
    def size(self) -> str:
        """Such as `"4.1 kB"`."""
        return size(self.nbytes)

    @property
    def short(self) -> str:
        """Such as `"all_reduce #12"`."""
        return f"{self.name} #{self.number}"

    def __str__(self) -> str:
        """Such as `"all_reduce #12 of group default"`, `"recv #1 from rank 2 with tag 4"`."""
        toward = {"send": "to", "recv": "from"}.get(self.name)
        if toward is not None:
            text = f"{self.short} {toward} {'any rank' if self.root is None else f'rank {self.root}'}"
            text += f" with tag {self.tag}" if self.tag else ""
            return text if self.group == "default" else f"{text} of group {readable(self.group)}"
        return f"{self.short} of group {readable(self.group)}"

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}  # `asdict` copies every rank
        return {**fields, "ranks": _stretches(self.ranks)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Operation:
        """The operation whose `to_json` gave this; JSON has made lists of its tuples."""
        shapes = tuple(tuple(shape) for shape in fields["shapes"])
        ranks = _ranks(tuple(tuple(stretch) for stretch in fields["ranks"]))
        return cls(**{**fields, "ranks": ranks, "shapes": shapes})


@lru_cache(maxsize=64)
def _stretches(ranks: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Ranks as (first, how many, step): short for all groups of a mesh. Each of many ranks that wait for all others
    tells them, and with all their numbers that would be their square.

    Example:
        >>> _stretches((0, 1, 2, 3)), _stretches((1, 5, 9, 2))
        ([(0, 4, 1)], [(1, 3, 4), (2, 1, 1)])
    """
    found: list[tuple[int, int, int]] = []
    for rank in ranks:
        first, count, step = found[-1] if found else (0, 0, 0)
        if count == 1:
            step = rank - first
        if count and rank == first + count * step:
            found[-1] = first, count + 1, step
        else:
            found.append((rank, 1, 1))
    return found


@lru_cache(maxsize=64)
def _ranks(stretches: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """What `_stretches` was made of: one object for all ranks that tell the same."""
    return tuple(first + number * step for first, count, step in stretches for number in range(count))


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
