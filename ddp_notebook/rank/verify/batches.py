"""Join and compare the parts of a batch that ranks hold."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from ddp_notebook.stdlib import hashlib, pickle

_PLAIN = int | float | complex | str | bytes | None | np.generic | torch.dtype | torch.device


class JoinError(Exception):
    """The parts of a batch cannot be joined. The message is a clause about the reason."""


def rows_of(values: Mapping[str, Any]) -> int:
    """Return the number of samples: the most frequent size of the first dimension of tensors; 0 if there is none.

    Tensors in lists count only if there are no others. A list may have one element for each sample.

    Example:
        >>> rows_of({"x": torch.zeros(4, 2), "y": torch.zeros(4), "weight": torch.zeros(3)})
        4
    """
    sizes = [len(one) for one in _tensors(values.values(), in_lists=False) if one.ndim]
    sizes = sizes or [size for one in _lists(values.values()) for size in _rows_of_list(one)]
    return Counter(sizes).most_common(1)[0][0] if sizes else 0


def _rows_of_list(value: list[Any]) -> list[int]:
    """Return the possible numbers of samples in a list, the most likely one first."""
    kind = _kind_of_list(value, None)
    first = [len(one) for one in _tensors([value])[:1] if one.ndim]
    return [len(value)] if kind == "samples" else [*first, *([len(value)] if kind == "unclear" else [])]


def tensors_of(values: Mapping[str, Any]) -> list[Any]:
    """Return the tensors and arrays of a batch, also those in containers."""
    return _tensors(values.values())


def device_of(values: Mapping[str, Any]) -> torch.device:
    """Return the device of the first tensor that is a value; the CPU if there is none."""
    found = next((one for one in values.values() if isinstance(one, torch.Tensor)), None)
    return torch.device("cpu") if found is None else found.device


def nbytes(values: Mapping[str, Any]) -> int:
    """Return the size of the tensors and arrays of a batch."""
    return sum(one.nbytes for one in _tensors(values.values()))


def has_samples(value: Any) -> bool:
    """Return whether a value may be a batch: a tensor or array with a first dimension, or a container of some.

    Example:
        >>> has_samples(torch.zeros(3)), has_samples([torch.zeros(3)]), has_samples(torch.nn.Linear(1, 1))
        (True, True, False)
    """
    tensors = _tensors([value])
    return bool(tensors) and all(one.ndim and not getattr(one, "requires_grad", False) for one in tensors)


def _tensors(values: Iterable[Any], *, in_lists: bool = True) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor | np.ndarray):
            found.append(value)
        elif isinstance(value, Mapping):
            found += _tensors(value.values(), in_lists=in_lists)
        elif isinstance(value, tuple) or (in_lists and isinstance(value, list)):
            found += _tensors(value, in_lists=in_lists)
    return found


def _lists(values: Iterable[Any]) -> Iterator[list[Any]]:
    for value in values:
        if isinstance(value, list):
            yield value
        elif isinstance(value, Mapping | tuple):
            yield from _lists(value.values() if isinstance(value, Mapping) else value)


def _kind_of_list(value: list[Any], rows: int | None) -> str:
    """Return "samples" if a list has one element for each sample, "columns" if its elements are parts of all samples.

    Args:
        rows: number of samples in the tensors of the batch; None: unknown.

    Returns:
        "unclear" if it may be both, "" if it is empty.
    """
    if not value:
        return ""
    if not _tensors(value):
        return "samples" if rows in (None, len(value)) else "columns"
    if not all(isinstance(one, torch.Tensor | np.ndarray) for one in value):
        is_of_one_type = len({type(one) for one in value}) == 1
        return "samples" if is_of_one_type and rows in (None, len(value)) else "columns"
    sizes = {len(one) if one.ndim else None for one in value}
    if rows is not None:
        are_columns, are_samples = sizes == {rows}, len(value) == rows
        return "unclear" if are_columns == are_samples else "columns" if are_columns else "samples"
    if len(sizes) > 1 or None in sizes:
        return "samples"
    return "columns" if len({(str(one.dtype), tuple(one.shape)) for one in value}) > 1 else "unclear"


def _made(like: Any, elements: Sequence[Any]) -> Any:
    """Return a container of the type of another one, with other elements."""
    if isinstance(like, Mapping):
        items = dict(zip(like, elements, strict=True))
        if type(like) is dict:
            return items
        made: Any = copy.copy(like)
        made.update(items)
        return made
    return like._make(elements) if hasattr(like, "_make") else type(like)(elements)


def join(parts: Sequence[Any], name: str, rows: Sequence[int], *, is_batch: bool = True) -> Any:
    """Join the parts of a value along the dimension of the samples.

    Args:
        parts: the values, one for each rank.
        name: name for the error.
        rows: number of samples of each rank.
        is_batch: the first dimension of a tensor without a dimension of that size holds samples too.

    Raises:
        JoinError: the parts have other types or shapes.

    Example:
        >>> join([torch.zeros(2, 3), torch.zeros(1, 3)], "x", [2, 1]).shape
        torch.Size([3, 3])
    """
    first = parts[0]
    if len({type(one) for one in parts}) > 1:
        raise JoinError(f"{name} has other types on other ranks: {', '.join(type(one).__name__ for one in parts)}")
    if isinstance(first, PackedSequence):
        raise JoinError(f"{name} is a PackedSequence, which cannot be joined")
    if isinstance(first, torch.Tensor) and first.ndim:
        return _join_tensors(parts, name, rows, is_batch)
    if isinstance(first, np.ndarray) and first.ndim:
        joined = _join_tensors([torch.from_numpy(np.ascontiguousarray(one)) for one in parts], name, rows, is_batch)
        return joined.numpy()
    if isinstance(first, Mapping):
        if len({tuple(one) for one in parts}) > 1:
            raise JoinError(f"{name} has other keys on other ranks")
        of_keys = {key: [one[key] for one in parts] for key in first}
        return _made(first, [join(one, f"{name}[{key!r}]", rows, is_batch=is_batch) for key, one in of_keys.items()])
    if isinstance(first, list | tuple):
        return _join_sequences(parts, name, rows, is_batch)
    if all(_key(one) == _key(first) for one in parts):
        return first
    raise JoinError(f"{name} is a {type(first).__name__} that differs between ranks")


def _join_tensors(parts: Sequence[torch.Tensor], name: str, rows: Sequence[int], is_batch: bool) -> torch.Tensor:
    first = parts[0]
    if len({one.ndim for one in parts}) == 1:
        dims = [dim for dim in range(min(first.ndim, 2)) if [one.shape[dim] for one in parts] == list(rows)]
        if not dims and all(one.shape == first.shape and torch.equal(one, first) for one in parts):
            return first  # no part of the batch, such as weights of classes
        dims = [
            dim
            for dim in dims or ([0] if is_batch else [])
            if len({(*one.shape[:dim], *one.shape[dim + 1 :], one.dtype) for one in parts}) == 1
        ]
        if dims:
            # A batch has its samples in the first dimension, and the state of a recurrent layer in the second one.
            return torch.cat([one.detach() for one in parts], dims[0]).requires_grad_(
                first.is_leaf and first.requires_grad
            )
    shapes = ", ".join(str(tuple(one.shape)) for one in parts)
    if not is_batch:
        raise JoinError(f"{name} differs between ranks, and has no dimension of the samples: {shapes}")
    raise JoinError(f"{name} has shapes that cannot be joined along their first dimension: {shapes}")


def _join_sequences(parts: Sequence[Any], name: str, rows: Sequence[int], is_batch: bool) -> Any:
    """Join tuples and columns entry by entry. Join lists of samples to a longer list."""
    first = parts[0]
    if isinstance(first, list):
        kinds = {_kind_of_list(part, count) for part, count in zip(parts, rows, strict=True)}
        kinds = kinds - {"", "unclear"} or kinds
        if kinds <= {"samples", ""}:
            return [one for part in parts for one in part]
        if kinds != {"columns"}:
            raise JoinError(
                f"{name} is a list of {len(first)} tensors, which may be samples or columns: use a tuple for columns, "
                "or one tensor for samples"
            )
    if len({len(one) for one in parts}) > 1:
        raise JoinError(f"{name} has other lengths on other ranks")
    of_places = [[one[at] for one in parts] for at in range(len(first))]
    return _made(first, [join(one, f"{name}[{at}]", rows, is_batch=is_batch) for at, one in enumerate(of_places)])


def split(values: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Split a batch into micro-batches. The last ones may be smaller.

    Raises:
        JoinError: the batch has too few samples, or cannot be split.

    Example:
        >>> [len(one["x"]) for one in split({"x": torch.zeros(7)}, 2)]
        [4, 3]
    """
    if count == 1:
        return [dict(values)]
    rows = rows_of(values)
    if rows < count:
        raise JoinError(f"{', '.join(values)} has {rows} samples, too few for {count} micro-steps")
    size = -(-rows // count)
    if size * (count - 1) >= rows:  # no samples would be left for the last ones
        bounds = [rows - rows * (count - number) // count for number in range(count + 1)]
    else:
        bounds = [min(size * number, rows) for number in range(count + 1)]
    return split_by(values, [last - first for first, last in pairwise(bounds)])


def split_by(values: Mapping[str, Any], counts: Sequence[int]) -> list[dict[str, Any]]:
    """Split a batch into parts with these numbers of samples.

    Raises:
        JoinError: a value cannot be split.

    Example:
        >>> [one["x"].tolist() for one in split_by({"x": torch.arange(3)}, [1, 2])]
        [[0], [1, 2]]
    """
    rows, bounds = rows_of(values), [0, *accumulate(counts)]
    return [
        {name: _piece(value, rows, slice(first, last), name) for name, value in values.items()}
        for first, last in pairwise(bounds)
    ]


def _piece(value: Any, rows: int, part: slice, name: str) -> Any:
    """Return some samples of a value. Values without samples, such as numbers, are returned unchanged."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value[part] if value.ndim and len(value) == rows else value
    if isinstance(value, PackedSequence) or not isinstance(value, _PLAIN | Mapping | list | tuple):
        raise JoinError(f"{name} is a {type(value).__name__}, which cannot be split into micro-steps")
    if isinstance(value, list) and (kind := _kind_of_list(value, rows)) != "columns":
        if kind == "unclear":
            raise JoinError(
                f"{name} is a list of {len(value)} tensors, which may be samples or columns: use a tuple for columns, "
                "or one tensor for samples"
            )
        return value[part]
    if isinstance(value, Mapping):
        return _made(value, [_piece(one, rows, part, f"{name}[{key!r}]") for key, one in value.items()])
    if isinstance(value, list | tuple) and _tensors(value):
        return _made(value, [_piece(one, rows, part, f"{name}[{at}]") for at, one in enumerate(value)])
    return value


def on_cpu(value: Any) -> Any:
    """Return a value with its tensors on the CPU, to send it to other ranks."""
    return _mapped(value, lambda one: one.detach().cpu().requires_grad_(one.is_leaf and one.requires_grad))


def on_device(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors on a device."""
    return _mapped(value, lambda one: one.detach().to(device).requires_grad_(one.is_leaf and one.requires_grad))


def _cpu_copy(value: torch.Tensor) -> torch.Tensor:
    return value.detach().cpu().clone()  # without the rest of its storage


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return _made(value, [_mapped(one, change) for one in value.values()])
    if isinstance(value, list | tuple) and not isinstance(value, PackedSequence):
        return _made(value, [_mapped(one, change) for one in value])
    return value


def _key(value: Any) -> Any:
    """Return something that is equal for equal values."""
    try:
        return pickle.dumps(value)
    except Exception:  # a value that cannot be pickled has no copy on another rank
        return id(value)


def is_state(value: Any, depth: int = 3) -> bool:
    """Return whether a value is data that a step may carry to the next one: numbers, tensors, and containers of them.

    Example:
        >>> is_state((torch.zeros(2), 1.5)), is_state("text"), is_state(torch.zeros(1, requires_grad=True))
        (True, False, False)
    """
    if isinstance(value, torch.Tensor):
        return not (value.is_leaf and value.requires_grad)
    if isinstance(value, list | tuple | dict):
        parts = value.values() if isinstance(value, dict) else value
        return depth > 0 and len(parts) > 0 and all(is_state(one, depth - 1) for one in parts)
    return isinstance(value, int | float | np.ndarray)


def digest(value: Any) -> str:
    """Return a hash that is equal for equal values."""
    return hashlib.blake2b(pickle.dumps(_mapped(value, _cpu_copy)), digest_size=16).hexdigest()


def samples(values: Mapping[str, Any]) -> list[str]:
    """Return a hash of each sample, from all tensors and lists that have one entry for each sample."""
    count = rows_of(values)
    if not count:
        return []
    lists = [one for one in _lists(values.values()) if len(one) == count and _kind_of_list(one, count) == "samples"]
    inside = {id(tensor) for one in lists for tensor in _tensors(one)}
    tensors = [one for one in _tensors(values.values()) if id(one) not in inside]
    arrays = [_bytes_of(one) for one in tensors if one.ndim and len(one) == count]
    arrays += [[pickle.dumps(_mapped(sample, _cpu_copy)) for sample in one] for one in lists]
    return [hashlib.blake2b(b"".join(one[at] for one in arrays), digest_size=16).hexdigest() for at in range(count)]


def _bytes_of(tensor: Any) -> list[bytes]:
    array = tensor.detach().cpu().contiguous().view(len(tensor), -1) if isinstance(tensor, torch.Tensor) else tensor
    if isinstance(array, torch.Tensor):
        array = array.view(torch.uint8).numpy() if array.dtype != torch.bool else array.numpy()
    return [np.ascontiguousarray(row).tobytes() for row in array]


def counts(values: Mapping[str, Any]) -> dict[str, int]:
    """Return numbers of entries that a mean may run over: labels that are not ignored, and entries of masks.

    Example:
        >>> counts({"y": torch.tensor([1, -100, 2])})
        {'y != -100': 2, 'y != 0': 3}
    """
    found: dict[str, int] = {}
    for name, tensor in _named(values):
        if not tensor.ndim or not tensor.numel():
            continue
        if tensor.dtype == torch.bool:
            found[f"{name} is True"] = int(tensor.sum())
        elif not tensor.is_floating_point() and not tensor.is_complex():
            found[f"{name} != -100"] = int((tensor != -100).sum())
            found[f"{name} != 0"] = int((tensor != 0).sum())
        elif bool(((tensor == 0) | (tensor == 1)).all()):
            found[f"{name} != 0"] = int((tensor != 0).sum())
    return found


def _named(values: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    found = []
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            found.append((name, value))
        elif isinstance(value, Mapping):
            found += [(f"{name}[{key!r}]", one) for key, one in value.items() if isinstance(one, torch.Tensor)]
        elif isinstance(value, tuple | list):
            found += [(f"{name}[{at}]", one) for at, one in enumerate(value) if isinstance(one, torch.Tensor)]
    return found


def overlap(by_rank: Sequence[Sequence[Any]]) -> int:
    """Return the number of samples that more than one rank has; 0 if samples repeat within a rank.

    Args:
        by_rank: hashes of the samples of each rank.

    Example:
        >>> overlap([[1, 2], [2, 3]]), overlap([[1, 1], [1, 3]])
        (1, 0)
    """
    if any(len(set(one)) < len(one) for one in by_rank):
        return 0  # the data have equal samples
    return sum(count > 1 for count in Counter(one for part in by_rank for one in part).values())
