"""Checks of gradients and losses, and checksums of the inputs of models, to find ranks that train on the same data.

The checks of gradients read few elements, unless there is something to report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.stdlib import math, zlib

# ---- gradients and losses

_SAMPLE = 64  # elements of a gradient that are read first


def are_zero(gradients: Sequence[torch.Tensor], first: int) -> tuple[bool, int]:
    """Return whether all gradients are zero, and the index of one that is not. Reads only the shards of this rank.

    Args:
        gradients: gradients of an optimizer.
        first: index of the gradient to read first, which was not zero in the last step.
    """
    return unseen(_are_zero, gradients, first)


def _are_zero(gradients: Sequence[torch.Tensor], first: int) -> tuple[bool, int]:
    count = len(gradients)
    with torch.no_grad():
        for check in (sample, _whole):  # the whole gradients are read only if all samples are zero
            for number in range(count):
                at = (first + number) % count
                if bool(check(local(gradients[at])).any()):
                    return False, at
    return True, 0


def local(tensor: Any) -> torch.Tensor:
    """Return the elements that this rank holds: of a DTensor its shard, of a sparse tensor its values."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return found._values() if found.is_sparse else found


def sample(gradient: torch.Tensor) -> torch.Tensor:
    """Return a view of a few elements."""
    if gradient.numel() <= _SAMPLE:
        return gradient
    if gradient.is_contiguous():
        return gradient.view(-1)[:: gradient.numel() // _SAMPLE]
    return _thinned(gradient, _SAMPLE)


def some_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a few elements of this rank."""
    with torch.no_grad():
        return sample(local(tensor)).clone()


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient


_MOST_OUTPUTS = 4


def is_finite(outputs: Sequence[torch.Tensor]) -> bool:
    """Return False if a loss is NaN or infinite. Reads only single numbers on the CPU."""
    return unseen(_is_finite, outputs)


def _is_finite(outputs: Sequence[torch.Tensor]) -> bool:
    for one in outputs[:_MOST_OUTPUTS]:
        if type(one) is torch.Tensor and one.is_cpu and one.numel() == 1 and not math.isfinite(one.item()):
            return False
    return True


def are_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether all gradients are finite. Reads all their elements."""
    with torch.no_grad():
        return unseen(lambda: all(bool(local(one).isfinite().all()) for one in gradients))


# ---- inputs of models

_FIRST, _PERIOD, _RUN = 16, 64, 4  # checksums of the first steps of a cell, and of 4 consecutive ones of each 64
_WHOLE_BYTES = 1 << 16  # larger tensors are sampled
_THINNED_BYTES = 1 << 14  # bytes that are read of a tensor that is not contiguous
_PARTS = 64
_MOST = 120  # steps with checksums that are kept
_CONSECUTIVE = 3


class InputChecksums:
    """Checksums of the inputs in the steps of the running cell."""

    def __init__(self) -> None:
        self.of_steps: list[tuple[int, int, str]] = []  # step, checksum and losses
        self._losses = ""  # since the last step
        self._sum = 0  # sum of the inputs since the last step
        self._is_known = True  # False if an input of this step could not be read

    def begin_cell(self) -> None:
        """Forget the steps of the last cell."""
        self.of_steps.clear()
        self._sum, self._is_known, self._losses = 0, True, ""

    def add(self, values: Iterable[Any], steps: int) -> None:
        """Add the inputs of a forward in the step after `steps`."""
        if (steps < _FIRST or steps % _PERIOD < _RUN) and self._is_known:
            found = unseen(checksum, values, self._sum)
            self._is_known = found is not None
            self._sum = found or 0

    def add_losses(self, outputs: Any) -> None:
        """Add the losses of a backward, if the inputs of the step are known."""
        if self._sum and self._is_known:
            self._losses += unseen(_losses, outputs)

    def end_step(self, step: int) -> None:
        """End a step, the first one of a cell is 1."""
        if self._sum and self._is_known:
            if len(self.of_steps) == _MOST:
                del self.of_steps[_FIRST : _FIRST + _RUN]
            self.of_steps.append((step, self._sum, self._losses))
        self._sum, self._is_known, self._losses = 0, True, ""

    def changing(self) -> list[list[Any]]:
        """Return the steps with checksums and losses; empty if no three consecutive steps have different inputs."""
        some = self.of_steps
        for at in range(len(some) - _CONSECUTIVE + 1):
            three = some[at : at + _CONSECUTIVE]
            if three[-1][0] - three[0][0] == _CONSECUTIVE - 1 and len({one for _, one, _ in three}) == _CONSECUTIVE:
                return [list(one) for one in some]
        return []


def _losses(outputs: Any) -> str:
    """Return single numbers on the CPU as text. Ranks may round differently."""
    some = [one for one in outputs if type(one) is torch.Tensor and one.is_cpu and one.numel() == 1]
    return "".join(f"{one.item():.3g} " for one in some[:_MOST_OUTPUTS])


def checksum(values: Iterable[Any], start: int = 0) -> int | None:
    """Return a checksum of the tensors in some values; None if one is not on the CPU or cannot be read.

    Example:
        >>> checksum([torch.ones(2)]) == checksum([{"x": torch.ones(2)}]), checksum([torch.ones(2)]) == checksum([])
        (True, False)
    """
    found = start
    for tensor in _tensors(values):
        if type(tensor) is not torch.Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
            return None
        part = tensor.detach()
        if part.nbytes > _WHOLE_BYTES:
            part = _parts(part) if part.is_contiguous() else _thinned(part, _THINNED_BYTES // part.element_size())
        data: Any = part.contiguous().view(-1).view(torch.uint8).numpy()
        found = zlib.crc32(data, found)
    return found


def _parts(tensor: torch.Tensor) -> torch.Tensor:
    length = _WHOLE_BYTES // _PARTS // tensor.element_size()
    return tensor.view(-1).as_strided((_PARTS, length), ((tensor.numel() - length) // (_PARTS - 1), 1))


def _thinned(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Return a view of at most so many elements from all parts. A flat view of the tensor would copy it.

    Example:
        >>> tuple(_thinned(torch.zeros(8, 3, 64, 64).permute(0, 2, 3, 1), 4096).shape)
        (8, 8, 16, 3)
    """
    while tensor.numel() > most:
        largest = max(range(tensor.ndim), key=tensor.size)
        tensor = tensor[(slice(None),) * largest + (slice(None, None, 2),)]
    return tensor


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.numel() > 1:  # a single number, such as a time, is not a batch
                yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
