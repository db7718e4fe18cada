"""A rank's variables in a few bytes each, so that ranks can be compared: lengths, settings, shapes, checksums.

Nothing here waits for another rank, which may be missing: a tensor that is sharded over ranks is described but has no
checksum. No reference to the user's objects is kept, and an object that cannot be read is reported as such.
"""

from __future__ import annotations

import datetime
import enum
import hashlib
import pathlib
import random
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ddp_notebook.rank.variables.comparison import Leaf, is_plain, leaves, unreadable
from ddp_notebook.rank.variables.values import describe
from ddp_notebook.stdlib import contextlib, itertools, pickle, re

_ROW = 1 << 16  # words; a row as int64 stays in a core's cache: 0.40 s per GiB, 0.72 with 64 rows (measured)
_ROWS_ON_DEVICE = 64  # at once, since each step launches kernels; takes 32 MB
_SHORT = 8  # a list of up to so many numbers is shown instead of summed
_EXACT = (bool, int, float, complex, str, bytes, type(None), type, range, slice, enum.Enum, pathlib.PurePath,
          datetime.date, datetime.timedelta, np.generic, torch.dtype, torch.device)  # fmt: skip
_ARRAYS = (np.ndarray, np.memmap)  # not those with a mask, or of records


def fingerprints(namespace: Mapping[str, Any], names: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """What must be the same on all ranks, as JSON. Each entry has a `kind`, a `value` in words, and a `checksum` of
    what the words do not say. Tensors also have `elements`, `low`, `high` and `nan` (how many are NaN), if any.
    `skipped` says why contents were left out.

    Args:
        namespace: the variables.
        names: compare these, of any kind. Without them: modules, parameters, optimizers, schedulers, gradient scalers,
            lengths of data, random state, settings and versions. The name `random` stands for the random state.

    Example:
        >>> fingerprints({"x": torch.tensor([1.0, 2.0])}, ["x"])["x"]["value"]
        'float32 (2,) on cpu'
        >>> fingerprints({}, ["y"])
        {'y': {'kind': 'missing', 'value': ''}}
    """
    checksums = _Checksums()
    facts: dict[str, dict[str, Any]] = {}
    with torch.no_grad():
        for leaf in leaves(namespace, names):
            try:
                facts[leaf.entry] = _facts(leaf, checksums)
            except Exception as error:
                facts[leaf.entry] = _facts(unreadable(leaf.entry, leaf.kind, error), checksums)
    return facts


def samples(namespace: Mapping[str, Any], entries: Sequence[str], k: int = 4096) -> dict[str, list[float]]:
    """Elements of tensors, at the same places on every rank: all, or `k` spread over the tensor.

    Args:
        namespace: the variables.
        entries: keys of the result of `fingerprints`; those that hold no numbers here are left out.
        k: the most elements of an entry.

    Example:
        >>> samples({"x": torch.tensor([1.0, 2.0])}, ["x"])
        {'x': [1.0, 2.0]}
    """
    wanted, found = set(entries), {}
    names = list(dict.fromkeys(re.split(r"[.\[]", entry, maxsplit=1)[0] for entry in entries))
    with torch.no_grad():
        for leaf in leaves(namespace, names):
            if leaf.entry in wanted and not leaf.skipped:
                with contextlib.suppress(Exception):  # `fingerprints` has said why
                    tensor = _tensor(leaf.value)
                    if tensor is not None and not _why_not(local := _local(tensor)):
                        found[leaf.entry] = _spread(local, k)
    return found


def _spread(x: torch.Tensor, k: int) -> list[float]:
    flat = _real(x.detach()).reshape(-1)
    n, draw = len(flat), random.Random(0)
    if n > k:  # one random element of each stretch: at a fixed place all might be in one column
        edges = [i * n // k for i in range(k + 1)]
        flat = flat[torch.tensor([draw.randrange(a, b) for a, b in itertools.pairwise(edges)], device=flat.device)]
    return flat.cpu().double().tolist()


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


class _Checksums:
    """Checksums of a tensor's bits, computed where the tensor is: 32-bit words times random 64-bit numbers, summed
    modulo 2**64 for each row, and a hash of these sums.

    Words are narrower than the numbers so that the upper bits of a word count in full: with 64-bit words, two changed
    signs would cancel each other.
    Source: Lemire and Kaser, Strongly universal string hashing is fast, 2014, https://arxiv.org/abs/1202.4961
    """

    def __init__(self) -> None:
        numbers = bytearray(random.Random(0).randbytes(8 * _ROW))  # does not touch the user's random state
        self._numbers = torch.frombuffer(numbers, dtype=torch.int64) | 1
        self._on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}  # the numbers, and room for products

    def of(self, x: torch.Tensor) -> str:
        """The checksum: equal for equal bits, whatever the device and the strides."""
        flat = x.resolve_conj().resolve_neg().contiguous().reshape(-1)
        if flat.storage_offset() * flat.element_size() % 4 or flat.stride(0) != 1:  # cannot be seen as words
            flat = flat.clone(memory_format=torch.contiguous_format)
        octets = flat.view(torch.uint8)
        n = len(octets) // 4
        words = octets[: 4 * n].view(torch.int32)
        if x.device not in self._on:
            at_once = 1 if x.device.type == "cpu" else _ROWS_ON_DEVICE
            room = torch.empty(at_once, _ROW, dtype=torch.int64, device=x.device)
            self._on[x.device] = self._numbers.to(x.device), room
        numbers, room = self._on[x.device]
        rows = words[: n - n % _ROW].view(-1, _ROW)
        sums = torch.empty(len(rows) + 1, dtype=torch.int64, device=x.device)
        for i in range(0, len(rows), len(room)):
            # All products go to one buffer: allocated for each row, they left 134 MB of holes in memory.
            some = rows[i : i + len(room)]
            torch.sum(torch.mul(some, numbers, out=room[: len(some)]), 1, out=sums[i : i + len(some)])
        sums[-1] = (words[rows.numel() :] * numbers[: n % _ROW]).sum()
        return _digest(sums.cpu().numpy().tobytes() + bytes(octets[4 * n :].tolist()))


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _facts(leaf: Leaf, checksums: _Checksums) -> dict[str, Any]:
    facts: dict[str, Any] = {"kind": leaf.kind, "value": leaf.text}
    if leaf.skipped:
        facts["skipped"] = leaf.skipped
    if leaf.text or leaf.kind == "missing":
        return facts
    value = leaf.value
    if (tensor := _tensor(value)) is not None:
        facts |= _of_tensor(tensor, checksums, leaf)
    elif (state := _generator_state(value)) is not None:
        seed = f"seed {value.initial_seed()}" if type(value) is torch.Generator else ""
        facts |= {"value": seed or type(value).__name__, "checksum": _digest(state)}
    elif type(value) in _ARRAYS and not value.dtype.hasobject:  # text, dates, records
        facts |= {"value": f"array {value.dtype} {value.shape}", "checksum": _digest(value.tobytes())}
    else:
        if type(value) in (set, frozenset) and is_plain(value):  # the order of a set differs between processes
            value = sorted(value, key=repr)
        facts["value"] = describe(value)
        if issubclass(type(value), str | bytes):
            facts["checksum"] = _digest(value if isinstance(value, bytes) else value.encode(errors="surrogatepass"))
        elif issubclass(type(value), list | tuple) and is_plain(value):
            facts |= {"value": repr(value)} if len(value) <= _SHORT else {"checksum": _digest(repr(value).encode())}
        elif issubclass(type(value), _EXACT):
            facts["value"] = repr(value)
        else:
            facts["skipped"] = "beyond its repr"
    return facts


def _tensor(value: Any) -> torch.Tensor | None:
    """A tensor, an array of numbers or a long list of numbers, as a tensor. Shares memory where it can."""
    cls = type(value)
    if issubclass(cls, torch.Tensor):
        return value
    with contextlib.suppress(TypeError, ValueError, OverflowError):  # no such numbers in torch
        if cls in _ARRAYS:
            array = np.ascontiguousarray(value).reshape(value.shape)
            if array.flags.writeable:
                return torch.from_numpy(array)
            # Not always: Python would show the warnings of the user's code that it has shown once again.
            with warnings.catch_warnings(action="ignore"):  # about read-only arrays, which are not written to here
                return torch.from_numpy(array)
        if issubclass(cls, list | tuple) and len(value) > _SHORT and all(type(v) in (int, float) for v in value):
            return torch.tensor(value, dtype=torch.float64 if float in map(type, value) else torch.int64, device="cpu")
    return None


def _generator_state(value: Any) -> bytes | None:
    cls = type(value)
    if issubclass(cls, torch.Generator):
        return value.get_state().numpy().tobytes()
    if issubclass(cls, random.Random):
        return pickle.dumps(value.getstate())
    if issubclass(cls, np.random.RandomState):
        return pickle.dumps(value.get_state(legacy=False))
    return pickle.dumps(value.bit_generator.state) if issubclass(cls, np.random.Generator) else None


def _of_tensor(x: torch.Tensor, checksums: _Checksums, leaf: Leaf) -> dict[str, Any]:
    if torch.nn.parameter.is_lazy(x):
        return {"value": f"uninitialized {str(x.dtype).removeprefix('torch.')}", "skipped": "uninitialized"}
    frozen = " without requires_grad" if leaf.kind == "parameter" and not x.requires_grad else ""
    facts: dict[str, Any] = {"value": _title(x, leaf.value) + frozen, "elements": x.numel()}
    local = _local(x)
    if placements := _placements(x):
        mesh = tuple(x.device_mesh.shape)  # type: ignore[attr-defined]
        facts["value"] += f", {', '.join(map(repr, placements))} of mesh {mesh}"
    if skipped := _why_not(local) if all(p.is_replicate() for p in placements) else "sharded":
        return facts | {"skipped": skipped}
    local = local.detach().as_subclass(torch.Tensor)
    facts["checksum"] = checksums.of(local)
    if local.dim() == 0 and not local.is_complex():
        facts["value"] = _number(local) + frozen
    real = _real(local)
    facts["elements"] = real.numel()
    with contextlib.suppress(Exception):  # no such reduction for this dtype or device, or no elements
        low, high = (float(bound) for bound in real.aminmax())
        if low != low:
            facts["nan"] = int(real.isnan().sum())
        else:
            facts |= {"low": low, "high": high}
    return facts


def _title(x: torch.Tensor, value: Any) -> str:
    text = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    return f"{text} on {x.device.type}" if value is x else f"{type(value).__name__} {text}"


def _number(x: torch.Tensor) -> str:
    number = x.item()
    short = str(np.float32(number)) if x.is_floating_point() and x.element_size() < 8 else repr(number)
    return short if x.dtype in (torch.float32, torch.int64) else f"{short} ({str(x.dtype).removeprefix('torch.')})"


def _placements(x: torch.Tensor) -> Sequence[Any]:
    """The placements of a DTensor; empty for other tensors."""
    module = sys.modules.get("torch.distributed.tensor")  # a DTensor can exist only if it was imported
    return x.placements if module is not None and isinstance(x, module.DTensor) else ()


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if _placements(x) else x  # type: ignore[attr-defined]


def _why_not(x: torch.Tensor) -> str:
    """Why the elements of a tensor cannot be read; empty if they can."""
    if x.device.type == "meta":
        return "meta"
    if x.layout is not torch.strided:
        return "sparse"
    if x.is_quantized:
        return "quantized"
    # The operations of a subclass may do anything, such as wait for other ranks.
    return "" if type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ else f"of class {type(x).__name__}"
