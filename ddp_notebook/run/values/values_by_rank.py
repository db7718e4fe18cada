"""Values of a variable by rank: a mapping with a compact repr and a plot."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ddp_notebook.errors import UsageError
from ddp_notebook.records.words import format_ranks, group_by_value
from ddp_notebook.run.interrupted import OF_VALUES, tells_interrupts

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKED_POINTS = 50  # up to this number of points a line also has markers


@tells_interrupts(OF_VALUES)
class RankValues(Mapping[int, Any]):
    """Values by rank. `Session.pull` returns them, and `Session.push` accepts them.

    Args:
        values: by rank.
        about: description of each value, by rank; values without one show their own repr, shortened.

    Example:
        >>> session.pull("x")
        [0-1] tensor float32 (2, 3) on cpu: min 0 mean 2.5 max 5
        >>> session.push(seed=RankValues({0: 10, 1: 11}))
    """

    def __init__(self, values: Mapping[int, Any], about: Mapping[int, str] | None = None) -> None:
        self._values = {rank: values[rank] for rank in sorted(values)}
        self._about = dict(about or {})

    def __getitem__(self, rank: int) -> Any:
        return self._values[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        lines = {rank: self._about.get(rank) or _short(value) for rank, value in self._values.items()}
        folded = (f"[{format_ranks(ranks)}] {line}" for line, ranks in group_by_value(lines).items())
        return "\n".join(folded) or "<RankValues of no rank>"

    def plot(self) -> Figure:
        """Plot the values.

        Numbers are bars, 1-D tensors are lines. 2-D tensors are maps: blue below 0, white at 0, red above, with one
        scale for all ranks.

        Raises:
            UsageError: there is nothing to plot, or ranks have different kinds of values.

        Example:
            >>> session.pull("losses").plot().savefig("loss.png")
        """
        arrays = {rank: _array(rank, value) for rank, value in self._values.items()}
        if not arrays:
            raise UsageError("nothing to plot: no rank has a value")
        dimensions = {rank: str(array.ndim) for rank, array in arrays.items()}
        groups = group_by_value(dimensions)
        if len(groups) > 1:
            each = ", ".join(f"{ndim}-D on [{format_ranks(ranks)}]" for ndim, ranks in groups.items())
            raise UsageError(f"values in a plot must have the same number of dimensions, got {each}")
        ndim = int(next(iter(groups)))
        if ndim > 2:
            raise UsageError(f"values in a plot must be 0-D to 2-D, got {ndim}-D: select a part, such as x[0]")
        return _maps(arrays) if ndim == 2 else _chart(arrays, _lines if ndim == 1 else _bars)


def _short(value: Any) -> str:
    return " ".join(reprlib.repr(value).split())


def _array(rank: int, value: Any) -> np.ndarray:
    """Return a value as an array of floats."""
    import numpy as np

    try:
        if hasattr(value, "detach"):  # a tensor, perhaps of a type that NumPy does not have: bfloat16
            value = value.detach().cpu()
            value = value if value.is_complex() else value.double()
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise TypeError
        return array.astype(float)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"{_short(value)} ({type(value).__name__})"
        raise UsageError(
            f"rank {rank}: values in a plot must be real numbers or tensors of them, got {what}"
        ) from error


def _chart(arrays: Mapping[int, np.ndarray], draw: Any) -> Figure:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    draw(axes, arrays)
    return _finished(figure)


def _bars(axes: Axes, arrays: Mapping[int, np.ndarray]) -> None:
    axes.bar([str(rank) for rank in arrays], [float(array) for array in arrays.values()])
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("rank")


def _lines(axes: Axes, arrays: Mapping[int, np.ndarray]) -> None:
    for rank, array in arrays.items():
        axes.plot(array, label=f"rank {rank}", marker="." if len(array) <= _MARKED_POINTS else "")
    axes.set_xlabel("index")
    axes.legend()


def _maps(arrays: Mapping[int, np.ndarray]) -> Figure:
    import numpy as np
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    finite = [np.abs(array[np.isfinite(array)]).max(initial=0.0) for array in arrays.values()]
    most = max(finite) or 1.0
    figure, row = pyplot.subplots(
        1, len(arrays), figsize=(0.8 + 2.2 * len(arrays), 2.5), squeeze=False, layout="constrained"
    )
    for axes, (rank, array) in zip(row[0], arrays.items(), strict=True):
        image = axes.imshow(array, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto", interpolation="nearest")
        axes.set_title(f"rank {rank}")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    figure.colorbar(image, ax=row[0].tolist())
    return _finished(figure)


def _finished(figure: Figure) -> Figure:
    """Detach a figure from pyplot, and return it. Otherwise a notebook would show it twice."""
    from matplotlib import pyplot

    pyplot.close(figure)
    return figure
