"""Checks of gradients that read few elements, unless there is something to report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.stdlib import math

_SAMPLE = 64  # elements of a gradient that are read first


def are_zero(gradients: Sequence[torch.Tensor], first: int) -> tuple[bool, int]:
    """Return whether all gradients are zero, and the index of one that is not.

    Args:
        gradients: gradients of an optimizer.
        first: index of the gradient to read first, which was not zero in the last step.
    """
    return unseen(_are_zero, gradients, first)


def _are_zero(gradients: Sequence[torch.Tensor], first: int) -> tuple[bool, int]:
    count = len(gradients)
    with torch.no_grad():
        for check in (_sample, _whole):  # the whole gradients are read only if all samples are zero
            for number in range(count):
                at = (first + number) % count
                if bool(check(local(gradients[at])).any()):
                    return False, at
    return True, 0


def local(tensor: Any) -> torch.Tensor:
    """Return the elements that this rank holds: of a DTensor its shard, of a sparse tensor its values."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return found._values() if found.is_sparse else found


def _sample(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.numel() <= _SAMPLE or not gradient.is_contiguous():
        return gradient if gradient.numel() <= _SAMPLE else gradient.flatten()[:_SAMPLE]
    return gradient.view(-1)[:: gradient.numel() // _SAMPLE]


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient


_MOST_OUTPUTS = 4


def is_finite(outputs: Sequence[torch.Tensor]) -> bool:
    """Return False if a loss is NaN or infinite. Reads only single numbers on the CPU."""
    return unseen(_is_finite, outputs)


def _is_finite(outputs: Sequence[torch.Tensor]) -> bool:
    for one in outputs[:_MOST_OUTPUTS]:
        if type(one) is torch.Tensor and one.is_cpu and one.numel() == 1 and not math.isfinite(one.item()):
            return False
    return True


def are_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether all gradients are finite. Reads all their elements."""
    with torch.no_grad():
        return unseen(lambda: all(bool(local(one).isfinite().all()) for one in gradients))
