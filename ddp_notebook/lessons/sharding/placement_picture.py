"""Picture of the parts of a model or tensor that each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from ddp_notebook.lessons.lesson_cells import running
from ddp_notebook.records.units import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ddp_notebook import TensorPlacement
    from ddp_notebook.display import Picture
    from ddp_notebook.session import Session

_MOST = 12  # most tensors
_HIGH, _WIDE = 0.8, 0.86  # largest share of a cell that a tensor covers
_ROW_IN, _FIGURE_IN = 0.62, 8.4
_LEFT = 1.7  # width of the names, in columns
_FLATTEST = 8.0  # a tensor is drawn at most this many times as long as wide


def placement(name: str = "model", *, session: Session | None = None) -> Picture:
    """Draw the parts that each rank holds: a column for each rank, a row for each kind of tensor.

    The outline is the whole tensor, with its last dimension across and the others down. The part that the rank holds is
    filled with its colour, and hatched if it is a partial sum. Tensors of equal shape and equal parts share a row.

    Args:
        name: Name of a variable on the ranks, or of a part of one: "model", "model.blocks.0", "x".
        session: Session to use; None for the running one.

    Raises:
        UsageError: A rank has no such model or tensor.
        NoSessionError: No ranks are running.

    Example:
        >>> lessons.placement("model").savefig("placement.png")
    """
    from ddp_notebook.display import INK, picture

    found = running(session).placement(name)
    kinds = _kinds(found.tensors)
    shown, ranks = kinds[:_MOST], found.ranks
    total = sum(found.nbytes(rank) for rank in ranks)
    how = "" if found.is_sharded else " (not sharded)"
    figure, (axes,) = picture(f"{name}{how}: {size(total)} on all ranks together", 0.9 + _ROW_IN * max(1, len(shown)))
    axes.set_axis_off()
    axes.grid(visible=False)
    more = len(kinds) - len(shown)
    for at, rank in enumerate(ranks):
        text = f"rank {rank}\n{size(found.nbytes(rank))}"
        axes.text(at + 0.5, -0.08, text, ha="center", va="bottom", color=INK, fontsize=9)
    for row, (tensor, count) in enumerate(shown):
        alike = f" and {count - 1} alike" if count > 1 else ""
        shape = " x ".join(map(str, tensor.shape)) or "a number"
        words = f"{tensor.name}{alike}\n{shape}  {', '.join(tensor.placements)}"
        axes.text(-0.08, row + 0.5, words.rstrip(), ha="right", va="center", color=INK, fontsize=8)
        for at, rank in enumerate(ranks):
            if rank in tensor.parts:
                _tensor(axes, at, row, tensor, rank, _FIGURE_IN / (len(ranks) + _LEFT))
    if more > 0:
        axes.text(-0.08, len(shown) + 0.1, f"... and {more} more", ha="right", va="top", color=INK, fontsize=8)
    axes.set(xlim=(0.1 - _LEFT, len(ranks) + 0.1), ylim=(len(shown) + 0.3, -0.75))
    return figure


def _kinds(tensors: Sequence[TensorPlacement]) -> list[tuple[TensorPlacement, int]]:
    """Return the first tensor of each kind, and the number of tensors with its shape, placements and parts."""
    found: dict[str, tuple[TensorPlacement, int]] = {}
    for tensor in tensors:
        kind = repr((tensor.shape, tensor.placements, sorted(tensor.parts.items(), key=lambda item: item[0])))
        first, count = found.get(kind, (tensor, 0))
        found[kind] = first, count + 1
    return list(found.values())


def _tensor(axes: Axes, column: int, row: int, tensor: TensorPlacement, rank: int, column_in: float) -> None:
    from matplotlib.patches import Rectangle

    from ddp_notebook.display import INK, LINES

    part = tensor.parts[rank]
    shape, offset, held = tensor.shape or (1,), part.offset or (0,), part.size or (1,)
    if len(shape) == 1:  # a vector lies flat
        shape, offset, held = (1, *shape), (0, *offset), (1, *held)
    across, down = shape[-1], prod(shape[:-1])
    ratio = min(max(down / max(across, 1), 1 / _FLATTEST), _FLATTEST)
    wide, high = _WIDE, _WIDE * ratio * column_in / _ROW_IN
    if high > _HIGH:
        wide, high = wide * _HIGH / high, _HIGH
    left, top = column + (1 - wide) / 2, row + (1 - high) / 2
    colour = LINES[rank % len(LINES)]
    axes.add_patch(Rectangle((left, top), wide, high, facecolor="none", edgecolor=INK, linewidth=0.6, label="whole"))
    if not prod(held):
        return
    for first, count in _stretches(shape[:-1], offset[:-1], held[:-1]):
        filled = Rectangle(
            (left + wide * offset[-1] / across, top + high * first / down),
            wide * held[-1] / across,
            high * count / down,
            facecolor=colour,
            edgecolor=colour,
            alpha=0.45 if tensor.is_partial else 1.0,
            hatch="///" if tensor.is_partial else None,
            linewidth=0.4,
            label="part",
        )
        axes.add_patch(filled)


def _stretches(shape: Sequence[int], offset: Sequence[int], held: Sequence[int]) -> list[tuple[int, int]]:
    """Return a part as intervals (first, count) of the flattened dimensions.

    Example:
        >>> _stretches((8,), (2,), (3,)), _stretches((2, 4), (0, 1), (2, 2))
        ([(2, 3)], [(1, 2), (5, 2)])
    """
    if len(shape) == 1:
        return [(offset[0], held[0])]
    inner, below = prod(shape[1:]), _stretches(shape[1:], offset[1:], held[1:])
    if below == [(0, inner)]:
        return [(offset[0] * inner, held[0] * inner)]
    return [(at * inner + first, n) for at in range(offset[0], offset[0] + held[0]) for first, n in below]
