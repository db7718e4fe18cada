"""Previews of tensors: a small copy, made where the tensor is used, and statistics, computed later.

A copy takes 2 us. Of a tensor with more than `SAMPLE` elements only a sample is copied: eight blocks of elements at
equal distances, from the first to the last element. (The same number of single elements would touch one page each: 3 %
of a training step.) A GPU tensor is copied to pinned memory, in stream order. Only the recorder's thread waits for that
copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ddp_notebook.records.schema import FIRST_BYTES, SAMPLE, SAMPLE_OF_LARGE, VALUE, Rows
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

_STRIDED = torch.strided
_STRETCH = 32  # elements; the first block is shown
_STRETCHES = SAMPLE_OF_LARGE // _STRETCH
_READABLE = {torch.Tensor, torch.nn.Parameter}
_MOST_TENSORS = 8  # number of tensors of a list that are copied
_IN_NUMPY = {  # real dtypes that NumPy also has
    getattr(torch, name): np.dtype(name)
    for name in ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # types for bits, by bytes of an element
Array = npt.NDArray[np.generic]


class Copy(NamedTuple):
    """A copy of the tensors on one side of an operation."""

    numel: int  # sum over all tensors
    parts: list[torch.Tensor]  # on the CPU; not yet complete if there is an event
    event: Any  # GPU event after which `parts` are complete; None if they are


# ---- the calling thread


def copy(tensors: Sequence[torch.Tensor]) -> Copy | None:
    """Return a small copy of the current values of tensors; None if there is nothing to copy."""
    if len(tensors) == 1:
        tensor = tensors[0]
        numel = tensor.numel()
        if numel <= SAMPLE and tensor.is_cpu and tensor.layout is _STRIDED and type(tensor) in _READABLE:
            return Copy(numel, [_copy_of(tensor.detach() if tensor.requires_grad else tensor)], None)
    elif not tensors:
        return None
    numel, parts, event = 0, [], None
    for at, tensor in enumerate(tensors):
        if type(tensor) not in _READABLE or tensor.is_meta or tensor.is_quantized:
            return None  # a tensor of torch.compile, or one without readable values
        numel += tensor.numel()
        if at < _MOST_TENSORS:
            part = _sample(tensor.detach() if tensor.requires_grad else tensor)
            if part.is_cuda:
                part, event = on_its_way(part)
            parts.append(part)
    return Copy(numel, parts, event)


def whole(tensors: Sequence[torch.Tensor], most_bytes: int) -> list[Copy]:
    """Return complete copies of the tensors that have at most `most_bytes` bytes, one each."""
    copies = []
    for one in tensors:
        if one.layout is _STRIDED and one.numel() * one.element_size() <= most_bytes:
            part, event = on_its_way(one.detach()) if one.is_cuda else (_copy_of(one.detach()), None)
            copies.append(Copy(one.numel(), [part], event))
    return copies


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not _STRIDED:
        tensor = tensor._values() if tensor.is_sparse else tensor.values()
    numel = tensor.numel()
    if numel <= SAMPLE:
        return _copy_of(tensor)
    step = (numel - _STRETCH) // (_STRETCHES - 1)
    if tensor.is_contiguous():
        return _copy_of(tensor.as_strided((_STRETCHES, _STRETCH), (step, 1)))
    device = tensor.device
    places = torch.arange(_STRETCHES, device=device)[:, None] * step + torch.arange(_STRETCH, device=device)
    return tensor[torch.unravel_index(places.view(-1), tensor.shape)]


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy. Copies of CPU tensors use NumPy's memory, so that profiles of torch's memory do not show them.

    (A NumPy array of the tensor's own memory would make it impossible to resize the tensor.)
    """
    if not tensor.is_cpu:
        return tensor.clone()
    if (dtype := _IN_NUMPY.get(tensor.dtype)) is not None:
        return torch.from_numpy(np.empty(tensor.shape, dtype)).copy_(tensor)
    room = torch.from_numpy(np.empty(tensor.numel() * tensor.element_size(), np.uint8))
    return room.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def on_its_way(part: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Copy a tensor to pinned memory on the current stream, so that no later operation overwrites its values first."""
    pinned = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=True)
    pinned.copy_(part, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(part.device))
    return pinned, event


# ---- the recorder's thread


def has_arrived(copy: Copy) -> bool:
    """Return whether the values can be read."""
    return copy.event is None or bool(copy.event.query())


def array_of(tensor: torch.Tensor) -> Array:
    """Return the elements as a flat NumPy array; if NumPy lacks the dtype, their bits as unsigned integers."""
    if tensor.dtype in _IN_NUMPY and tensor.is_contiguous() and not tensor.is_neg():
        return tensor.numpy().ravel()
    flat = tensor.reshape(-1).resolve_conj().resolve_neg()
    try:
        return flat.numpy()
    except TypeError:
        return flat.view(_BITS[flat.element_size()]).numpy().view(f"u{flat.element_size()}")


def _numbers_of(tensor: torch.Tensor, array: Array) -> Array:
    """Return the elements as real numbers; for complex ones the modulus.

    Args:
        array: `array_of(tensor)`.
    """
    if tensor.dtype in _IN_NUMPY:
        return array
    flat = tensor.reshape(-1)
    return (flat.abs() if flat.is_complex() else flat).double().numpy()


def rows_of(copies: Sequence[Copy], number_of: Callable[[torch.dtype], int]) -> Rows:
    """Return a row of `records.VALUE` for each copy, without the columns that identify the tensor.

    Copies of one dtype and size, which are frequent in a training loop, are processed together.

    Args:
        copies: copies whose values have arrived.
        number_of: returns the number of a dtype's text.
    """
    rows = np.zeros(len(copies), VALUE)
    for name in ("low", "high", "mean"):
        rows[name] = np.nan
    numels: list[int] = []
    alike: dict[tuple[torch.dtype, torch.Size], tuple[list[int], list[torch.Tensor]]] = {}
    for number, (numel, parts, _) in enumerate(copies):
        numels.append(numel)
        try:
            part = parts[0] if len(parts) == 1 else torch.cat([one.reshape(-1).to(parts[0].dtype) for one in parts])
        except RuntimeError:  # a dtype without arithmetic in torch
            continue
        key = part.dtype, part.shape
        some = alike.get(key)
        if some is None:
            some = alike[key] = [], []
        some[0].append(number)
        some[1].append(part)
    rows["numel"] = numels
    for (dtype, _), (numbers, tensors) in alike.items():
        at = np.array(numbers)
        rows["dtype"][at] = number_of(dtype)
        try:
            _describe(rows, at, torch.stack(tensors))
        except (RuntimeError, KeyError, TypeError):  # as above
            rows["looked_at"][at] = 0
    return rows


@np.errstate(invalid="ignore", over="ignore")  # tensors may contain infinities, signalling NaN and the largest numbers
def _describe(rows: Rows, at: npt.NDArray[np.int64], tensors: torch.Tensor) -> None:
    """Fill some of the rows.

    Args:
        at: (n,) indices of the rows.
        tensors: (n, ...) their copies.
    """
    rows["looked_at"][at] = width = tensors[0].numel()
    if not width:
        return
    array = array_of(tensors).reshape(len(at), -1)  # (places, width)
    count = min(width, FIRST_BYTES // array.itemsize)
    if (rows["numel"][at] > width).any():
        count = min(count, _STRETCH)
    first = np.zeros((len(at), FIRST_BYTES), np.uint8)
    first[:, : count * array.itemsize] = np.ascontiguousarray(array[:, :count]).view(np.uint8)
    rows["first_count"][at], rows["first"][at] = count, first.view(rows["first"].dtype)[:, 0]
    numbers = _numbers_of(tensors, array).reshape(len(at), -1).astype(np.float64)
    sums = numbers.sum(1)
    lows = highs = numbers
    counts = np.full(len(at), width)
    if not np.isfinite(sums).all():
        nan = np.isnan(numbers)
        rows["nans"][at] = nans = nan.sum(1)
        rows["infs"][at] = np.isinf(numbers).sum(1)
        lows, highs = np.where(nan, np.inf, numbers), np.where(nan, -np.inf, numbers)
        sums = np.where(nan, 0.0, numbers).sum(1)
        counts -= nans
    some = counts > 0
    at, counts = at[some], counts[some]
    rows["low"][at], rows["high"][at] = lows.min(1)[some], highs.max(1)[some]
    rows["mean"][at] = sums[some] / counts
