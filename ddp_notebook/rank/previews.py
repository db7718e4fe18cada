"""What was in a tensor: a small copy, taken where the tensor is used, and later what it says.

A copy costs its caller 2 us. Of more than `SAMPLE` elements only so many are copied: the first ones, and evenly spread
ones of the rest.
A tensor of a GPU is copied to pinned memory behind the work that is queued there; nobody waits for that copy until the
recorder's thread reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ddp_notebook.records import FIRST_BYTES, SAMPLE

_STRIDED = torch.strided
_FIRST = FIRST_BYTES  # elements that are in every sample: as many as may be shown
_MOST_TENSORS = 8  # of a list that are looked at
_UNSIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
Array = npt.NDArray[np.generic]


class Copy(NamedTuple):
    """Of the tensors of one side of an operation."""

    numel: int  # of all of them
    parts: list[torch.Tensor]  # on the CPU, or on their way there
    event: Any  # of the GPU, when they have arrived; None: they are there
    dtype: torch.dtype


class Facts(NamedTuple):
    """What a copy says."""

    looked_at: int
    low: float
    high: float
    mean: float
    nans: int
    infs: int
    first: bytes
    first_count: int


NO_FACTS = Facts(0, math.nan, math.nan, math.nan, 0, 0, b"", 0)


# ---- the calling thread


def copy(tensors: Sequence[torch.Tensor]) -> Copy | None:
    """A small copy of what is in tensors now; None where there is nothing to look at."""
    if len(tensors) == 1:
        tensor = tensors[0]
        numel = tensor.numel()
        if numel <= SAMPLE and tensor.is_cpu and tensor.layout is _STRIDED:
            part = tensor.detach().clone() if tensor.requires_grad else tensor.clone()
            return Copy(numel, [part], None, part.dtype)
    elif not tensors:
        return None
    numel, parts, event = 0, [], None
    for at, tensor in enumerate(tensors):
        numel += tensor.numel()
        if at < _MOST_TENSORS:
            part = _sample(tensor.detach())
            if part.is_cuda:
                part, event = _on_its_way(part)
            parts.append(part)
    return Copy(numel, parts, event, parts[0].dtype)


def whole(tensors: Sequence[torch.Tensor], most_bytes: int) -> list[Copy]:
    """Copies of all of those that have at most so many bytes, one for each."""
    copies = []
    for one in tensors:
        if one.layout is _STRIDED and one.numel() * one.element_size() <= most_bytes:
            part, event = _on_its_way(one.detach()) if one.is_cuda else (one.detach().clone(), None)
            copies.append(Copy(one.numel(), [part], event, one.dtype))
    return copies


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not _STRIDED:
        tensor = tensor._values() if tensor.is_sparse else tensor.values()
    numel = tensor.numel()
    if numel <= SAMPLE:
        return tensor.clone()
    step = -(-(numel - _FIRST) // (SAMPLE - _FIRST))
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return torch.cat((flat[:_FIRST], flat[_FIRST::step]))
    device = tensor.device
    places = torch.cat((torch.arange(_FIRST, device=device), torch.arange(_FIRST, numel, step, device=device)))
    return tensor[torch.unravel_index(places, tensor.shape)]


def _on_its_way(part: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """To pinned memory, in the order of the current stream: a later operation cannot overwrite what is copied."""
    pinned = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    pinned.copy_(part, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return pinned, event


# ---- the recorder's thread


def has_arrived(copy: Copy) -> bool:
    """Whether its values can be read."""
    return copy.event is None or bool(copy.event.query())


def array_of(tensor: torch.Tensor) -> Array:
    """The elements as NumPy has them, flat; of a type that NumPy lacks, its bits as unsigned numbers."""
    flat = tensor.reshape(-1).resolve_conj().resolve_neg()
    try:
        return flat.numpy()
    except TypeError:
        return flat.view(_UNSIGNED[flat.element_size()]).numpy().view(f"u{flat.element_size()}")


def numbers_of(tensor: torch.Tensor) -> Array:
    """The elements as numbers that can be compared; of complex ones the modulus."""
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = flat.abs()
    elif flat.dtype in (torch.bfloat16,) or "float8" in str(flat.dtype):
        flat = flat.float()
    return flat.numpy()


def facts_of(copies: Iterable[Copy]) -> list[Facts]:
    """What many copies say, worked out together: 3 us for each instead of 11.

    Args:
        copies: all of which have arrived.
    """
    copies = list(copies)
    arrays = [[numbers_of(part) for part in one.parts] for one in copies]
    sizes = np.array([sum(len(array) for array in of_one) for of_one in arrays], np.int64)
    firsts = [_first(one) for one in copies]
    facts = [NO_FACTS] * len(copies)
    full = np.flatnonzero(sizes)
    if not len(full):
        return facts
    flat = np.concatenate([array for of_one in arrays for array in of_one], dtype=np.float64, casting="unsafe")
    starts = np.concatenate(([0], np.cumsum(sizes[full])[:-1]))
    nan, inf = np.isnan(flat), np.isinf(flat)
    any_nan = bool(nan.any())
    nans = np.add.reduceat(nan, starts, dtype=np.int64)
    infs = np.add.reduceat(inf, starts, dtype=np.int64)
    lows = np.minimum.reduceat(np.where(nan, np.inf, flat) if any_nan else flat, starts)
    highs = np.maximum.reduceat(np.where(nan, -np.inf, flat) if any_nan else flat, starts)
    with np.errstate(invalid="ignore"):  # inf - inf
        sums = np.add.reduceat(np.where(nan, 0.0, flat) if any_nan else flat, starts)
    for at, n in enumerate(full):
        size, count = int(sizes[n]), int(nans[at])
        facts[n] = Facts(
            size,
            float(lows[at]) if count < size else math.nan,
            float(highs[at]) if count < size else math.nan,
            float(sums[at]) / (size - count) if count < size else math.nan,
            count,
            int(infs[at]),
            *firsts[n],
        )
    return facts


def _first(one: Copy) -> tuple[bytes, int]:
    """The first elements, in the bytes of their type, and how many."""
    itemsize = one.dtype.itemsize
    most = FIRST_BYTES // itemsize
    data = b""
    for part in one.parts:
        data += array_of(part)[:most].tobytes()
        if len(data) >= most * itemsize:
            break
    data = data[: most * itemsize]
    return data, len(data) // itemsize
