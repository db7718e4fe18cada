"""Join and compare the parts of a batch that ranks hold."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ddp_notebook.stdlib import pickle


class JoinError(Exception):
    """The parts of a batch cannot be joined. The message is a clause about the reason."""


def rows_of(values: Mapping[str, Any]) -> int:
    """Return the number of samples: the size of the first dimension of the first tensor; 0 if there is none.

    Example:
        >>> rows_of({"x": torch.zeros(4, 2)})
        4
    """
    return next((len(one) for one in _tensors(values.values()) if one.ndim), 0)


def has_samples(value: Any) -> bool:
    """Return whether a value may be a batch: a tensor or array with a first dimension, or a container of some.

    Example:
        >>> has_samples(torch.zeros(3)), has_samples([torch.zeros(3)]), has_samples(torch.nn.Linear(1, 1))
        (True, True, False)
    """
    tensors = _tensors([value])
    return bool(tensors) and all(one.ndim and not getattr(one, "requires_grad", False) for one in tensors)


def _tensors(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor | np.ndarray):
            found.append(value)
        elif isinstance(value, Mapping):
            found += _tensors(value.values())
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def join(parts: Sequence[Any], name: str) -> Any:
    """Join the parts of a value along their first dimension.

    Args:
        parts: the values, one for each rank.
        name: name for the error.

    Raises:
        JoinError: the parts have other types or shapes.

    Example:
        >>> join([torch.zeros(2, 3), torch.zeros(1, 3)], "x").shape
        torch.Size([3, 3])
    """
    first = parts[0]
    if len({type(one) for one in parts}) > 1:
        raise JoinError(f"{name} has other types on other ranks: {', '.join(type(one).__name__ for one in parts)}")
    if isinstance(first, torch.Tensor) and first.ndim:
        return _join_tensors(parts, name)
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(parts)
    if isinstance(first, Mapping):
        if len({tuple(one) for one in parts}) > 1:
            raise JoinError(f"{name} has other keys on other ranks")
        return {key: join([one[key] for one in parts], f"{name}[{key!r}]") for key in first}
    if isinstance(first, list | tuple):
        return _join_sequences(parts, name)
    if all(_key(one) == _key(first) for one in parts):
        return first
    raise JoinError(f"{name} is a {type(first).__name__} that differs between ranks")


def _join_tensors(parts: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    if len({(one.shape[1:], one.dtype) for one in parts}) > 1:
        shapes = ", ".join(str(tuple(one.shape)) for one in parts)
        raise JoinError(f"{name} has shapes that cannot be joined along their first dimension: {shapes}")
    return torch.cat([one.detach() for one in parts]).requires_grad_(parts[0].requires_grad)


def _join_sequences(parts: Sequence[Any], name: str) -> Any:
    """Join tuples, and lists of tensors, entry by entry. Join other lists as lists of samples."""
    first = parts[0]
    if isinstance(first, list) and not _tensors(first):
        return [one for part in parts for one in part]
    if len({len(one) for one in parts}) > 1:
        raise JoinError(f"{name} has other lengths on other ranks")
    return type(first)([join([one[at] for one in parts], f"{name}[{at}]") for at in range(len(first))])


def split(values: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Split a batch into micro-batches along the first dimension.

    Raises:
        JoinError: a tensor has too few samples.
    """
    if count == 1:
        return [dict(values)]
    return [{name: _piece(value, at, count, name) for name, value in values.items()} for at in range(count)]


def _piece(value: Any, at: int, count: int, name: str) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim:
        if len(value) < count:
            raise JoinError(f"{name} has {len(value)} samples, too few for {count} micro-steps")
        first, last = len(value) * at // count, len(value) * (at + 1) // count
        return value[first:last]
    if isinstance(value, Mapping):
        return {key: _piece(one, at, count, f"{name}[{key!r}]") for key, one in value.items()}
    if isinstance(value, tuple):
        return type(value)([_piece(one, at, count, name) for one in value])
    return value


def on_cpu(value: Any) -> Any:
    """Return a value with its tensors on the CPU, to send it to other ranks."""
    return _mapped(value, lambda one: one.detach().cpu().requires_grad_(one.requires_grad))


def on_device(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors on a device."""
    return _mapped(value, lambda one: one.detach().to(device).requires_grad_(one.requires_grad))


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(one, change) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(one, change) for one in value)
    return value


def _key(value: Any) -> Any:
    """Return something that is equal for equal values."""
    try:
        return pickle.dumps(value)
    except Exception:  # a value that cannot be pickled has no copy on another rank
        return id(value)


def samples(values: Mapping[str, Any]) -> list[str]:
    """Return a hash of each sample, from all tensors that have one entry for each sample."""
    count = rows_of(values)
    arrays = [_bytes_of(one) for one in _tensors(values.values()) if one.ndim and len(one) == count]
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
