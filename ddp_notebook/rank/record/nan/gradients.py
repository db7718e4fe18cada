"""Gradients before an optimizer step: their local parts, and whether all elements are finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

SMALL = torch.float16, torch.bfloat16  # a sum of these would overflow in their own dtype


def local_part(gradient: Any) -> torch.Tensor:
    """Return the part of a gradient that this rank has."""
    with torch.no_grad():
        found: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        return found._values() if found.is_sparse else found


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all elements are finite. Norms come first, since they are faster.

    Example:
        >>> all_finite([torch.ones(2), torch.tensor([1e30])]), all_finite([torch.tensor([torch.inf])])
        (True, False)
    """
    with torch.no_grad():
        some = [one for one in tensors if one.numel() and (one.is_floating_point() or one.is_complex())]
        if not some or some[0].is_meta:
            return True
        norms = torch._foreach_norm(some)
        if bool(torch.stack([one.to(norms[0].device, torch.float32) for one in norms]).isfinite().all()):
            return True
        return all(bool(one.isfinite().all()) for one in some)  # a norm may overflow
