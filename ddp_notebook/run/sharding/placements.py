"""Placement of tensors: the part of each tensor on each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ddp_notebook.errors import UsageError
from ddp_notebook.records.names import printable
from ddp_notebook.records.units import size
from ddp_notebook.records.words import group_by_value, list_ranks

_MOST_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Part of a tensor on one rank."""

    offset: tuple[int, ...]  # index of its first element, by dimension
    size: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        """Return the slices, such as `"[0:8, 0:4]"`."""
        return "[" + ", ".join(f"{at}:{at + n}" for at, n in zip(self.offset, self.size, strict=True)) + "]"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlacement:
    """One tensor, and the part of it on each rank."""

    name: str  # "blocks.0.weight"
    dtype: str
    shape: tuple[int, ...]  # shape of the complete tensor
    placements: tuple[str, ...]  # "Shard(0)", "Replicate" or "Partial" by mesh dimension; (): not a DTensor
    mesh: tuple[tuple[str, int], ...]  # (name, size) of each mesh dimension
    parts: Mapping[int, Part]  # parts by rank

    @property
    def is_sharded(self) -> bool:
        """Return whether a rank has only a part."""
        return any(part.size != self.shape for part in self.parts.values())

    @property
    def is_partial(self) -> bool:
        """Return whether the tensor is the sum of the parts."""
        return "Partial" in self.placements

    def __str__(self) -> str:
        how = ", ".join(self.placements) or "each rank its own"
        if self.mesh:
            sizes = " x ".join(f"{name} {n}".strip() for name, n in self.mesh)
            how += f" on a mesh of {sizes}"
        who = group_by_value({rank: str(part) for rank, part in self.parts.items()})
        told = "; ".join(f"{list_ranks(ranks)} {part}" for part, ranks in who.items())
        return printable(f"{self.name} {self.dtype} {self.shape}, {how}: {told}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placements:
    """Tensors of a model, or one tensor, on all ranks. `lessons.placement` draws it.

    Example:
        >>> session.placement("model")
        model is not sharded: 2 ranks * 16 B = 32 B
          weight float32 (1, 3), each rank its own: ranks 0,1 [0:1, 0:3]
          bias float32 (1,), each rank its own: ranks 0,1 [0:1]
    """

    name: str
    tensors: tuple[TensorPlacement, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for tensor in self.tensors for rank in tensor.parts}))

    def nbytes(self, rank: int) -> int:
        """Return the bytes of all these tensors on a rank."""
        return sum(tensor.parts[rank].nbytes for tensor in self.tensors if rank in tensor.parts)

    @property
    def is_sharded(self) -> bool:
        return any(tensor.is_sharded for tensor in self.tensors)

    def __repr__(self) -> str:
        of = {rank: self.nbytes(rank) for rank in self.ranks}
        sizes = list(of.values())
        if not self.is_sharded and len(set(sizes)) == 1:
            head = f"{self.name} is not sharded: {len(of)} ranks * {size(sizes[0])} = {size(sum(sizes))}"
        else:
            head = f"{self.name}: " + " + ".join(size(one) for one in sizes) + f" = {size(sum(sizes))}"
        more = len(self.tensors) - _MOST_SHOWN
        lines = [f"  {tensor}" for tensor in self.tensors[:_MOST_SHOWN]]
        return "\n".join([printable(head), *lines, *[f"  ... and {more} more"] * (more > 0)])


def placements_of(name: str, by_rank: Mapping[int, Mapping[str, Any]]) -> Placements:
    """Combine the results of `rank.sharding.parts.told` of all ranks.

    Raises:
        UsageError: a rank has no such model or tensor.
    """
    if errors := group_by_value({rank: told["error"] for rank, told in by_rank.items() if "error" in told}):
        raise UsageError("; ".join(f"{list_ranks(ranks)}: {error}" for error, ranks in errors.items()))
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for rank, told in sorted(by_rank.items()):
        for part in told["parts"]:
            found.setdefault(part["name"], {})[rank] = part
    return Placements(name=name, tensors=tuple(_tensor(key, parts) for key, parts in found.items()))


def _tensor(name: str, by_rank: Mapping[int, Mapping[str, Any]]) -> TensorPlacement:
    first = next(iter(by_rank.values()))
    largest: Sequence[int] = max((part["shape"] for part in by_rank.values()), key=prod)
    return TensorPlacement(
        name=name,
        dtype=first["dtype"],
        shape=tuple(largest),
        placements=tuple(first["placements"]),
        mesh=tuple((str(dim), int(n)) for dim, n in first["mesh"]),
        parts={
            rank: Part(offset=tuple(part["offset"]), size=tuple(part["size"]), nbytes=part["nbytes"])
            for rank, part in by_rank.items()
        },
    )
