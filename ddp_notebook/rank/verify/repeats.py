"""Find out if a step gives other gradients each time, such as one that reads an iterator, a file or time."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist

from ddp_notebook.rank.verify.ranks import Ranks
from ddp_notebook.rank.verify.step import Run
from ddp_notebook.stdlib import math

_RESOLUTION = 1e-7  # smallest relative difference that inner products of float64 can show
_MARGIN = 4.0  # rounding errors that may hide a difference; the notebook tolerates more


def may_change(
    ranks: Ranks,
    local: Run,
    nudged: Run,
    together: Run,
    *,
    parts: Collection[int],
    sizes: Mapping[str, int],
    unit: float,
) -> bool:
    """Return whether the step may give other gradients each time, so that it must be repeated to know.

    It does not if losses differ by rounding errors only. It does not either if a step with slightly changed parameters
    has nearly the same gradient as before, but the step of all ranks has another one.

    Args:
        ranks: the ranks. All call it at the same time.
        local: the run `local`.
        nudged: the run `nudged`, with parameters that are changed by one rounding error.
        together: the run `together`.
        parts: ranks with different parts of the batch.
        sizes: number of elements by parameter.
        unit: relative rounding error.
    """
    limit = _MARGIN * unit * abs(local.loss)
    if not ranks.any(any(not abs(one.loss - local.loss) <= limit for one in (nudged, together))):
        return False
    found = False
    total = _norm(local)
    for name, size in sizes.items():
        own = _vector(local, name, size, ranks.device)
        average = own / len(parts) if ranks.rank in parts else torch.zeros_like(own)
        dist.all_reduce(average)
        least = _MARGIN * max(unit * float(own.norm()), _RESOLUTION * total)
        of_together = float((_vector(together, name, size, ranks.device) - average).norm())
        of_nudged = float((_vector(nudged, name, size, ranks.device) - own).norm())
        found |= of_together > least and of_nudged > max(least, of_together / (2 * _MARGIN))
    return ranks.any(found)


def rounding_errors(local: Run, again: Run, unit: float) -> dict[str, float]:
    """Return how far the gradients of a repeated step are off, in rounding errors, by parameter.

    Args:
        local: the run `local`.
        again: the same step again.
        unit: relative rounding error.
    """
    off: dict[str, float] = {}
    total = _norm(local)
    for name, gradient in local.gradients.items():
        size = max(unit * float(gradient.double().norm()), _RESOLUTION * total)
        other = again.gradients.get(name)
        difference = math.inf if other is None else float((other.double() - gradient.double()).norm())
        off[name] = difference / size if size else 0.0
    return off


def _norm(run: Run) -> float:
    return math.sqrt(sum(float(one.double().square().sum()) for one in run.gradients.values()))


def _vector(run: Run, name: str, size: int, device: torch.device) -> torch.Tensor:
    """Return a gradient as a vector of float64. A missing gradient is zero."""
    gradient = run.gradients.get(name)
    if gradient is None:
        return torch.zeros(size, dtype=torch.float64, device=device)
    return gradient.detach().reshape(-1).to(device).double()
