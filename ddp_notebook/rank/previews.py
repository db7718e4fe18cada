"""What was in a tensor: a small copy, taken where the tensor is used, and later what it says.

A copy costs its caller 2 us. Of more than `SAMPLE` elements only some are copied: the first ones, and evenly spread
ones of the rest.
A tensor of a GPU is copied to pinned memory behind the work that is queued there; nobody waits for that copy until the
recorder's thread reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ddp_notebook.records import FIRST_BYTES, SAMPLE, SAMPLE_OF_LARGE, VALUE, Rows

_STRIDED = torch.strided
_FIRST = FIRST_BYTES  # elements that are in every sample: as many as may be shown
_READABLE = {torch.Tensor, torch.nn.Parameter}
_MOST_TENSORS = 8  # of a list that are looked at
_PLAIN = frozenset(  # types of real numbers that NumPy has too
    getattr(torch, name)
    for name in ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
)
_UNSIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
Array = npt.NDArray[np.generic]


class Copy(NamedTuple):
    """Of the tensors of one side of an operation."""

    numel: int  # of all of them
    parts: list[torch.Tensor]  # on the CPU, or on their way there
    event: Any  # of the GPU, when they have arrived; None: they are there

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype


# ---- the calling thread


def copy(tensors: Sequence[torch.Tensor]) -> Copy | None:
    """A small copy of what is in tensors now; None where there is nothing to look at."""
    if len(tensors) == 1:
        tensor = tensors[0]
        numel = tensor.numel()
        if numel <= SAMPLE and tensor.is_cpu and tensor.layout is _STRIDED and type(tensor) in _READABLE:
            part = tensor.detach().clone() if tensor.requires_grad else tensor.clone()
            return Copy(numel, [part], None)
    elif not tensors:
        return None
    numel, parts, event = 0, [], None
    for at, tensor in enumerate(tensors):
        if type(tensor) not in _READABLE or tensor.is_meta or tensor.is_quantized:
            return None  # of torch.compile's, or nothing that has values
        numel += tensor.numel()
        if at < _MOST_TENSORS:
            part = _sample(tensor.detach())
            if part.is_cuda:
                part, event = _on_its_way(part)
            parts.append(part)
    return Copy(numel, parts, event)


def whole(tensors: Sequence[torch.Tensor], most_bytes: int) -> list[Copy]:
    """Copies of all of those that have at most so many bytes, one for each."""
    copies = []
    for one in tensors:
        if one.layout is _STRIDED and one.numel() * one.element_size() <= most_bytes:
            part, event = _on_its_way(one.detach()) if one.is_cuda else (one.detach().clone(), None)
            copies.append(Copy(one.numel(), [part], event))
    return copies


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not _STRIDED:
        tensor = tensor._values() if tensor.is_sparse else tensor.values()
    numel = tensor.numel()
    if numel <= SAMPLE:
        return tensor.clone()
    step = -(-(numel - _FIRST) // (SAMPLE_OF_LARGE - _FIRST))
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return torch.cat((flat[:_FIRST], flat[_FIRST::step]))
    device = tensor.device
    places = torch.cat((torch.arange(_FIRST, device=device), torch.arange(_FIRST, numel, step, device=device)))
    return tensor[torch.unravel_index(places, tensor.shape)]


def _on_its_way(part: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """To pinned memory, in the order of the current stream: a later operation cannot overwrite what is copied."""
    pinned = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=True)
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
    if tensor.dtype in _PLAIN and tensor.is_contiguous() and not tensor.is_neg():
        return tensor.numpy().ravel()
    flat = tensor.reshape(-1).resolve_conj().resolve_neg()
    try:
        return flat.numpy()
    except TypeError:
        return flat.view(_UNSIGNED[flat.element_size()]).numpy().view(f"u{flat.element_size()}")


def _numbers_of(tensor: torch.Tensor, array: Array) -> Array:
    """The elements as numbers that can be compared; of complex ones the modulus.

    Args:
        array: what `array_of` says of them.
    """
    if tensor.dtype in _PLAIN:
        return array
    flat = tensor.reshape(-1)
    return (flat.abs() if flat.is_complex() else flat).float().numpy()


def rows_of(copies: Sequence[Copy]) -> Rows:
    """What many copies say, worked out together: a row of `records.VALUE` for each, with all but whose it is.

    Args:
        copies: all of which have arrived.
    """
    rows = np.zeros(len(copies), VALUE)
    firsts, numbers, sizes = [], [], []
    for copy in copies:
        arrays = [array_of(part) for part in copy.parts]
        firsts.append(_first(arrays))
        mine = [_numbers_of(part, array) for part, array in zip(copy.parts, arrays, strict=True)]
        numbers += mine
        sizes.append(sum(map(len, mine)))
    rows["numel"] = [copy.numel for copy in copies]
    rows["looked_at"] = looked_at = np.array(sizes, np.int64)
    rows["first_count"] = [count for _, count in firsts]
    rows["first"] = np.frombuffer(b"".join(data for data, _ in firsts), rows["first"].dtype)
    for name in ("low", "high", "mean"):
        rows[name] = np.nan
    full = np.flatnonzero(looked_at)
    if not len(full):
        return rows
    flat = np.concatenate(numbers, dtype=np.float64, casting="unsafe")
    starts = np.concatenate(([0], np.cumsum(looked_at[full])[:-1]))
    nan = np.isnan(flat)
    nans = np.add.reduceat(nan, starts, dtype=np.int64)
    rows["nans"][full] = nans
    rows["infs"][full] = np.add.reduceat(np.isinf(flat), starts, dtype=np.int64)
    any_nan = bool(nan.any())
    lows = np.minimum.reduceat(np.where(nan, np.inf, flat) if any_nan else flat, starts)
    highs = np.maximum.reduceat(np.where(nan, -np.inf, flat) if any_nan else flat, starts)
    with np.errstate(invalid="ignore"):  # inf - inf
        sums = np.add.reduceat(np.where(nan, 0.0, flat) if any_nan else flat, starts)
    counts = looked_at[full] - nans
    some = counts > 0
    rows["low"][full[some]], rows["high"][full[some]] = lows[some], highs[some]
    rows["mean"][full[some]] = sums[some] / counts[some]
    return rows


def _first(arrays: Sequence[Array]) -> tuple[bytes, int]:
    """The first elements, in the bytes of their type and filled up to `FIRST_BYTES`, and how many."""
    itemsize = arrays[0].itemsize
    most = FIRST_BYTES // itemsize
    data = arrays[0][:most].tobytes()
    for array in arrays[1:]:
        if len(data) >= most * itemsize:
            break
        data += array[:most].tobytes()
    data = data[: most * itemsize]
    return data.ljust(FIRST_BYTES, b"\0"), len(data) // itemsize
