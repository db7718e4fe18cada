"""Description of a communication operation, for operations that a rank waits in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ddp_notebook.records.names import readable
from ddp_notebook.records.units import size
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

POINT_TO_POINT = ("send", "recv")
OPERATIONS = (  # all recorded operations
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
    """One call of a collective, send or receive on one rank."""

    name: str  # name in the user's API: "all_reduce"
    number: int  # counter in the group since it was formed; collectives, sends and receives count separately from 1
    group: str  # "default", or the description by torch or the user
    ranks: tuple[int, ...]  # ranks of the group, as ranks of the session
    dtype: str = ""  # dtype of the tensors, without "torch."; "" without tensors
    shapes: tuple[tuple[int, ...], ...] = ()  # shapes of the inputs, or of the outputs for an operation without inputs
    nbytes: int = 0
    root: int | None = None  # source or destination, as a rank of the session
    tag: int = 0  # tag of a send or receive
    reduce_op: str = ""
    meaning: str = ""  # contents of the message: "activations of microbatch 3 for stage 2"
    origin: str = ""  # torch library that called it, one of `schema.ORIGINS`; "" if none or unknown
    since_s: float = 0.0  # seconds since the start of the call
    key: str = ""  # name of the group in torch, the same on all ranks
    is_awaited: bool = True  # False: it is in progress, but perhaps no code waits for it
    limit_s: float | None = None  # seconds after which the operation raises by itself; None if unknown
    threads: str = ""  # names of the rank's threads that have used the group at the same time; "" if none have
    pair_number: int = 0  # messages of this kind with this peer and tag, including this one; 0 if unknown

    @property
    def is_point_to_point(self) -> bool:
        return self.name in POINT_TO_POINT

    @property
    def what(self) -> str:
        """Return dtype and shapes, such as `"float32[1024]"`."""
        return ", ".join(
            [f"{self.dtype}{_shape(shape)}" for shape in self.shapes[:2]] + ["..."] * (len(self.shapes) > 2)
        )

    @property
    def size(self) -> str:
        """Return the size, such as `"4.1 kB"`."""
        return size(self.nbytes)

    @property
    def short(self) -> str:
        """Return name and number, such as `"all_reduce #12"`."""
        return f"{self.name} #{self.number}"

    def __str__(self) -> str:
        """Describe the call: `"all_reduce #12 of group default"`, `"recv #1 from rank 2 with tag 4"`."""
        toward = {"send": "to", "recv": "from"}.get(self.name)
        if toward is not None:
            text = f"{self.short} {toward} {'any rank' if self.root is None else f'rank {self.root}'}"
            text += f" with tag {self.tag}" if self.tag else ""
            return text if self.group == "default" else f"{text} of group {readable(self.group)}"
        return f"{self.short} of group {readable(self.group)}"

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}  # `asdict` would copy the rank list
        return {**fields, "ranks": _stretches(self.ranks)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Operation:
        """Return the operation of `to_json`. Lists in the JSON become tuples again."""
        shapes = tuple(tuple(shape) for shape in fields["shapes"])
        ranks = _ranks(tuple(tuple(stretch) for stretch in fields["ranks"]))
        return cls(**{**fields, "ranks": ranks, "shapes": shapes})


@lru_cache(maxsize=64)
def _stretches(ranks: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Compress ranks to (first, count, step) triples, which are short for all groups of a mesh.

    Every waiting rank sends the ranks of its group. Complete lists would need quadratic space in total.

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
    """Expand the triples of `_stretches`. The cache shares one tuple between ranks with equal groups."""
    return tuple(first + number * step for first, count, step in stretches for number in range(count))


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
