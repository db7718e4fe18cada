"""Norms and ratios of gradients, from their inner products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MARGIN = 8.0  # factor between a measured rounding error and a difference that counts
_RESOLUTION = 1e-7  # smallest relative difference that inner products of float64 can show

Combination = Mapping[tuple[str, int], float]  # factors by run and rank


class Gradients:
    """Gradients of all runs and ranks.

    Args:
        matrices: inner products by parameter, see `rank.verify.products`.
        runs: names of the runs, in the order of the rows.

    Example:
        >>> both = Gradients({"w": np.array([[4.0, 2.0], [2.0, 1.0]])}, ["local"])
        >>> both.norm("w", {("local", 0): 1.0, ("local", 1): -1.0})
        1.0
    """

    def __init__(self, matrices: Mapping[str, Any], runs: Sequence[str]) -> None:
        self.names = list(matrices)
        self.runs = list(runs)
        self._matrices = matrices
        total = sum(matrices.values()) if matrices else np.zeros((0, 0))
        self._all: dict[str, Any] = {**matrices, "": total}

    @property
    def are_finite(self) -> bool:
        """Return whether no gradient is NaN or infinite."""
        return all(np.isfinite(matrix).all() for matrix in self._matrices.values())

    def _factors(self, name: str, parts: Combination) -> Any:
        factors = np.zeros(len(self._all[name]))
        for (run, rank), factor in parts.items():
            factors[rank * len(self.runs) + self.runs.index(run)] += factor
        return factors

    def norm(self, name: str, parts: Combination) -> float:
        """Return the norm of a sum of gradients.

        Args:
            name: name of the parameter; "": all parameters.
            parts: factor of each gradient.
        """
        factors = self._factors(name, parts)
        return float(np.sqrt(max(0.0, factors @ self._all[name] @ factors)))

    def product(self, name: str, one: Combination, other: Combination) -> float:
        """Return the inner product of two sums of gradients."""
        return float(self._factors(name, one) @ self._all[name] @ self._factors(name, other))

    def ratio(self, name: str, one: Combination, other: Combination) -> float:
        """Return the factor k for which k times the other gradient is closest to the first; NaN if the other is 0."""
        square = self.product(name, other, other)
        return self.product(name, one, other) / square if square > 0 else float("nan")

    def weights(self, parts: Sequence[Combination], target: Combination) -> list[float]:
        """Return the factors for which the sum of the parts is closest to a gradient, over all parameters."""
        products = np.array([[self.product("", one, other) for other in parts] for one in parts])
        right = np.array([self.product("", one, target) for one in parts])
        return [float(one) for one in np.linalg.lstsq(products, right, rcond=1e-12)[0]]


def mean(run: str, ranks: Sequence[int]) -> dict[tuple[str, int], float]:
    """Return the combination for the mean of a run over ranks."""
    return {(run, rank): 1 / len(ranks) for rank in ranks}


def minus(one: Combination, other: Combination, factor: float = 1.0) -> dict[tuple[str, int], float]:
    """Return `one - factor * other`."""
    found = dict(one)
    for key, value in other.items():
        found[key] = found.get(key, 0.0) - factor * value
    return found


class Tolerances:
    """Differences of each parameter's gradient that rounding explains.

    Rounding is measured: with parameters that are changed by one rounding error, and with the whole batch in another
    order. It is at least one rounding error of the least exact type of the step.

    Args:
        gradients: all gradients.
        unit: rounding error of that type, `torch.finfo(dtype).eps`.
        parts: ranks with a part of the batch.
    """

    def __init__(self, gradients: Gradients, unit: float, parts: Sequence[int]) -> None:
        self._gradients = gradients
        self._unit = unit
        self._parts = parts
        self._least = _RESOLUTION * gradients.norm("", mean("local", parts))

    def _own(self, name: str, run: str) -> float:
        sizes = [self._gradients.norm(name, {(run, rank): 1.0}) for rank in self._parts]
        return self._unit * sum(sizes) / len(sizes)

    def measured(self, name: str) -> float:
        """Return the effect of one rounding error of each parameter."""
        return self._gradients.norm(name, minus(mean("nudged", self._parts), mean("local", self._parts)))

    def together(self, name: str, is_eager: bool) -> float:
        """Return the tolerance of the step of all ranks.

        Args:
            is_eager: the ranks called the same kernels in both runs, so that only their sum is rounded.
        """
        rounding = self._own(name, "local")
        return MARGIN * max(rounding, 0.0 if is_eager else self.measured(name), self._least)

    def whole(self, name: str) -> float:
        """Return the tolerance of the step with the whole batch."""
        first, second = self._parts[:2]
        order = self._gradients.norm(name, {("whole", first): 1.0, ("whole", second): -1.0})
        return MARGIN * max(self._own(name, "quiet"), self.measured(name), order, self._least)
