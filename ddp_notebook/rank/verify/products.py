"""Inner products of gradients of all ranks, computed on rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

_CHUNK = 1 << 20  # elements that are sent together


def inner_products(
    runs: Sequence[Mapping[str, torch.Tensor]], sizes: Mapping[str, int], device: torch.device
) -> dict[str, np.ndarray] | None:
    """Return the matrix of inner products of each parameter's gradients. All ranks must call it.

    Row and column `r * len(runs) + k` is run `k` of rank `r`. A missing gradient counts as zero. Products are float64.
    So differences below 1e-8 of the gradient cannot be seen.

    Args:
        runs: gradients by name; the same number of runs on each rank.
        sizes: number of elements by name, in the same order on each rank.
        device: device on which the group's collectives work.

    Returns:
        The matrices by name on rank 0, None on other ranks.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {name: np.zeros((world * len(runs), world * len(runs))) for name in sizes}
    for pieces in _chunks(sizes):
        own = torch.zeros(len(runs), sum(last - first for _, first, last in pieces), dtype=torch.float64)
        for row, run in enumerate(runs):
            at = 0
            for name, first, last in pieces:
                if name in run:
                    own[row, at : at + last - first] = run[name].detach().reshape(-1)[first:last].double().cpu()
                at += last - first
        own = own.to(device)
        gathered = [torch.empty_like(own) for _ in range(world)] if rank == 0 else None
        dist.gather(own, gathered)
        if gathered is not None:
            rows = torch.cat(gathered).cpu().numpy()
            at = 0
            for name, first, last in pieces:
                part = rows[:, at : at + last - first]
                with np.errstate(all="ignore"):  # gradients may be infinite
                    found[name] += part @ part.T
                at += last - first
    return found if rank == 0 else None


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
