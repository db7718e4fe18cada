"""Estimate the memory of a comparison, before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable

import psutil
import torch
from torch.distributed.tensor import DTensor

from ddp_notebook.rank.verify.coverage import has_values
from ddp_notebook.records.shortages import memory_limits
from ddp_notebook.records.units import size
from ddp_notebook.stdlib import contextlib, socket

_RUNS = 7  # runs whose gradients are kept, see `comparison`, with those of the step in progress
_BATCHES = 2  # the parts as received, and the joined batch
_MARGIN = 1.25  # factor for temporary tensors, which autograd does not save


def free_bytes(device: torch.device, ranks_on_host: int) -> int:
    """Return the memory that this rank can still use, at least.

    Args:
        device: a GPU, or the CPU.
        ranks_on_host: number of ranks that share the memory of this host.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    found = [psutil.virtual_memory().available // ranks_on_host]
    with contextlib.suppress(OSError, ValueError):
        for left, _, _, what in memory_limits():
            is_shared = what.startswith("memory of the cgroup")
            found.append(left // ranks_on_host if is_shared else left)
    return max(0, min(found))


def host_name() -> str:
    """Return the name of this host."""
    return socket.gethostname()


def gradient_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Return the size of the gradients of all runs, and of complete copies of sharded parameters.

    Args:
        parameters: all parameters, possibly sharded. Those without values do not count.

    Example:
        >>> gradient_bytes([torch.zeros(2, requires_grad=True)])
        56
    """
    total = 0
    for one in {id(one): one for one in parameters if has_values(one)}.values():
        nbytes = one.numel() * one.element_size()  # a DTensor counts all elements
        total += nbytes * ((_RUNS if one.requires_grad else 0) + isinstance(one, DTensor))
    return total


def whole_bytes(saved_bytes: int, batch_bytes: int, share: float) -> int:
    """Return the size of a step with the whole batch on one rank.

    Args:
        saved_bytes: size of the tensors that autograd has saved for this rank's part.
        batch_bytes: size of this rank's part.
        share: samples of this rank's part, divided by those of the whole batch; more than 0.

    Example:
        >>> whole_bytes(100, 10, 0.5)
        290
    """
    return int((_MARGIN * saved_bytes + _BATCHES * batch_bytes) / share)


def shortage(needed: int, free: int) -> str:
    """Return both sizes in words if the needed memory is more than the free memory, else "".

    Example:
        >>> shortage(2_000_000, 1_000_000)
        '2.0 MB, and 1.0 MB are free'
    """
    return f"{size(needed)}, and {size(free)} are free" if needed > free else ""
