"""What was in a tensor: a small copy, taken where the tensor is used, and later what it says.

A copy costs its caller 2 us. Of more than `SAMPLE` elements only some are copied: eight stretches, evenly spread from
the first to the last. (As many elements one by one are each on a page of their own: 3 % of a training step.)
A tensor of a GPU is copied to pinned memory behind the work that is queued there; nobody waits for that copy until the
recorder's thread reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ddp_notebook.records.schema import FIRST_BYTES, SAMPLE, SAMPLE_OF_LARGE, VALUE, Rows

_STRIDED = torch.strided
_STRETCH = 32  # elements; the first of them are shown
_STRETCHES = SAMPLE_OF_LARGE // _STRETCH
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
    step = (numel - _STRETCH) // (_STRETCHES - 1)
    if tensor.is_contiguous():
        return tensor.as_strided((_STRETCHES, _STRETCH), (step, 1)).clone()
    device = tensor.device
    places = torch.arange(_STRETCHES, device=device)[:, None] * step + torch.arange(_STRETCH, device=device)
    return tensor[torch.unravel_index(places.view(-1), tensor.shape)]


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
    return (flat.abs() if flat.is_complex() else flat).double().numpy()


def rows_of(copies: Sequence[Copy], number_of: Callable[[torch.dtype], int]) -> Rows:
    """What many copies say: a row of `records.VALUE` for each, with all but whose it is. Those of one type and size, as
    a training loop brings them again and again, are worked out together.

    Args:
        copies: all of which have arrived.
        number_of: gives the number of the text for a type.
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
        except RuntimeError:  # of types that torch can only carry
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
        except (RuntimeError, KeyError, TypeError):  # the same
            rows["looked_at"][at] = 0
    return rows


@np.errstate(invalid="ignore", over="ignore")  # tensors may hold infinities, signalling NaN and the largest numbers
def _describe(rows: Rows, at: npt.NDArray[np.int64], tensors: torch.Tensor) -> None:
    """Fill the rows of these places.

    Args:
        tensors: (places, ...) what was copied.
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
