"""Inner products of gradients of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

_CHUNK = 1 << 17  # elements that are sent together


def inner_products(
    runs: Sequence[Mapping[str, torch.Tensor]], sizes: Mapping[str, int], device: torch.device
) -> dict[str, np.ndarray] | None:
    """Return the matrix of inner products of each parameter's gradients. All ranks must call it.

    Row and column `r * len(runs) + k` is run `k` of rank `r`. A missing gradient counts as zero. Products are float64.
    So differences below 1e-8 of the gradient cannot be seen. Each rank computes the products of some chunks.

    Args:
        runs: gradients by name; the same number of runs on each rank.
        sizes: number of elements by name, in the same order on each rank.
        device: device on which the group's collectives work.

    Returns:
        The matrices by name on rank 0, None on other ranks.
    """
    rank, world, names = dist.get_rank(), dist.get_world_size(), list(sizes)
    dtype = _exact_type(runs, device)
    found = torch.zeros(len(names), world * len(runs), world * len(runs), dtype=torch.float64)
    places = {name: place for place, name in enumerate(names)}
    # New memory for each chunk would take longer than its products.
    own = torch.zeros(len(runs), _CHUNK, dtype=dtype, device=device)
    received = [torch.zeros_like(own) for _ in range(world)]
    for number, pieces in enumerate(_chunks(sizes)):
        at = 0
        for name, first, last in pieces:
            for row, run in enumerate(runs):
                part = own[row, at : at + last - first]
                part.copy_(run[name].detach().reshape(-1)[first:last]) if name in run else part.zero_()
            at += last - first
        root = number % world
        dist.gather(own, received if rank == root else None, root)
        if rank == root:
            rows = torch.cat(received).cpu().double()
            at = 0
            for name, first, last in pieces:
                columns = rows[:, at : at + last - first]
                found[places[name]] += columns @ columns.T
                at += last - first
    total = found.to(device)
    dist.reduce(total, 0)
    matrices = total.cpu().numpy()
    return dict(zip(names, matrices, strict=True)) if rank == 0 else None


def _exact_type(runs: Sequence[Mapping[str, torch.Tensor]], device: torch.device) -> torch.dtype:
    """Return the smallest type that has all values of the gradients of all ranks: float32 or float64."""
    small = (torch.float32, torch.bfloat16, torch.float16)
    needs_double = torch.tensor(
        float(any(one.dtype not in small for run in runs for one in run.values())), device=device
    )
    dist.all_reduce(needs_double)
    return torch.float64 if needs_double else torch.float32


def _chunks(sizes: Mapping[str, int]) -> Iterator[list[tuple[str, int, int]]]:
    """Yield lists of (name, first element, last element), each list with at most `_CHUNK` elements."""
    pieces: list[tuple[str, int, int]] = []
    left = _CHUNK
    for name, size in sizes.items():
        for first in range(0, size, _CHUNK):
            last = min(size, first + _CHUNK)
            if last - first > left:
                yield pieces
                pieces, left = [], _CHUNK
            pieces.append((name, first, last))
            left -= last - first
    if pieces:
        yield pieces
