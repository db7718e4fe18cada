"""Summarize a rank's variables in a few bytes each, to compare ranks: lengths, settings, shapes, checksums.

This module never waits for another rank, which may be missing. So a sharded tensor is described but has no checksum. It
keeps no references to the user's objects, and reports objects that cannot be read.
"""

from __future__ import annotations

import datetime
import enum
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
from ddp_notebook.stdlib import contextlib, hashlib, itertools, pickle, re

_ROW = 1 << 16  # words; a row as int64 fits into the cache of a core (0.40 s per GiB, 0.72 s with 64 rows)
_ROWS_ON_DEVICE = 64  # rows per step, because each step launches kernels; needs 32 MB
_SHORT = 8  # a list with up to this many numbers is shown, not summed
_EXACT = (bool, int, float, complex, str, bytes, type(None), type, range, slice, enum.Enum, pathlib.PurePath,
          datetime.date, datetime.timedelta, np.generic, torch.dtype, torch.device)  # fmt: skip
_ARRAYS = (np.ndarray, np.memmap)  # without masked and record arrays


def fingerprints(namespace: Mapping[str, Any], names: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Return the values that must be equal on all ranks, as JSON.

    Each entry has a `kind`, a `value` as text, and a `checksum` of contents that the text does not show. Tensors also
    have `elements`, `low`, `high` and `nan` (number of NaNs), if any. `skipped` is the reason for omitted contents.
    `part` is the pipeline stage of the entry. `may_differ` is the reason for which ranks may have different values.

    Args:
        namespace: variables.
        names: variables of any kind to compare. Empty: modules, parameters, optimizers, schedulers, gradient scalers,
            lengths of data, random state, settings and versions. The name `random` selects the random state.

    Example:
        >>> fingerprints({"x": torch.tensor([1.0, 2.0])}, ["x"])["x"]["value"]
        'float32 (2,) on cpu'
        >>> fingerprints({}, ["y"])
        {'y': {'kind': 'missing', 'value': ''}}
    """
    checksums = Checksums()
    facts: dict[str, dict[str, Any]] = {}
    with torch.no_grad():
        for leaf in leaves(namespace, names):
            try:
                facts[leaf.entry] = _facts(leaf, checksums)
            except Exception as error:
                facts[leaf.entry] = _facts(unreadable(leaf.entry, leaf.kind, error), checksums)
    return facts


def samples(namespace: Mapping[str, Any], entries: Sequence[str], k: int = 4096) -> dict[str, list[float]]:
    """Return elements of tensors at the same positions on every rank: all, or `k` spread over the tensor.

    Args:
        namespace: variables.
        entries: keys of the result of `fingerprints`. Entries without numbers on this rank are left out.
        k: maximum number of elements of an entry.

    Example:
        >>> samples({"x": torch.tensor([1.0, 2.0])}, ["x"])
        {'x': [1.0, 2.0]}
    """
    wanted, found = set(entries), {}
    names = list(dict.fromkeys(re.split(r"[.\[]", entry, maxsplit=1)[0] for entry in entries))
    with torch.no_grad():
        for leaf in leaves(namespace, names):
            if leaf.entry in wanted and not leaf.skipped:
                with contextlib.suppress(Exception):  # `fingerprints` has reported the reason
                    tensor = _tensor(leaf.value)
                    if tensor is not None and not _why_not(local := _local(tensor)):
                        found[leaf.entry] = _spread(local, k)
    return found


def _spread(x: torch.Tensor, k: int) -> list[float]:
    flat = _real(x.detach()).reshape(-1)
    n, draw = len(flat), random.Random(0)
    if n > k:  # one random element per range, because fixed positions might all be in one column
        edges = [i * n // k for i in range(k + 1)]
        flat = flat[torch.tensor([draw.randrange(a, b) for a, b in itertools.pairwise(edges)], device=flat.device)]
    return flat.cpu().double().tolist()


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


class Checksums:
    """Computes checksums of tensors on their device.

    32-bit words are multiplied by random 64-bit numbers and summed modulo 2**64 for each row. The checksum is a hash of
    these sums. Words are narrower than the numbers so that the upper bits of a word have full effect. With 64-bit
    words, two changed signs would cancel each other.
    Source: Lemire and Kaser, Strongly universal string hashing is fast, 2014, https://arxiv.org/abs/1202.4961
    """

    def __init__(self) -> None:
        numbers = bytearray(random.Random(0).randbytes(8 * _ROW))  # does not touch the user's random state
        self._numbers = torch.frombuffer(numbers, dtype=torch.int64) | 1
        self._on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}  # random numbers, and buffer for products

    def of(self, x: torch.Tensor) -> str:
        """Return the checksum. Equal bits have equal checksums on any device and with any strides."""
        flat = x.resolve_conj().resolve_neg().contiguous().reshape(-1)
        if flat.storage_offset() * flat.element_size() % 4 or flat.stride(0) != 1:  # cannot be viewed as words
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
            # All products use one buffer. A buffer per row would fragment memory (134 MB).
            some = rows[i : i + len(room)]
            torch.sum(torch.mul(some, numbers, out=room[: len(some)]), 1, out=sums[i : i + len(some)])
        sums[-1] = (words[rows.numel() :] * numbers[: n % _ROW]).sum()
        return _digest(sums.cpu().numpy().tobytes() + bytes(octets[4 * n :].tolist()))


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _facts(leaf: Leaf, checksums: Checksums) -> dict[str, Any]:
    facts: dict[str, Any] = {"kind": leaf.kind, "value": leaf.text}
    for key in ("skipped", "part", "may_differ"):
        if getattr(leaf, key):
            facts[key] = getattr(leaf, key)
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
    """Convert a tensor, an array of numbers or a long list of numbers to a tensor. Shares memory if possible."""
    cls = type(value)
    if issubclass(cls, torch.Tensor):
        return value
    with contextlib.suppress(TypeError, ValueError, OverflowError):  # torch lacks this kind of numbers
        if cls in _ARRAYS:
            array = np.ascontiguousarray(value).reshape(value.shape)
            if array.flags.writeable:
                return torch.from_numpy(array)
            # Only for read-only arrays: this context makes Python repeat warnings of user code that it has already
            # shown.
            with warnings.catch_warnings(action="ignore"):  # about read-only arrays, which are not written here
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


def _of_tensor(x: torch.Tensor, checksums: Checksums, leaf: Leaf) -> dict[str, Any]:
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
    with contextlib.suppress(Exception):  # reduction not supported for this dtype or device, or no elements
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
    """Return the placements of a DTensor; empty for other tensors."""
    module = sys.modules.get("torch.distributed.tensor")  # a DTensor can only exist if the module was imported
    return x.placements if module is not None and isinstance(x, module.DTensor) else ()


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if _placements(x) else x  # type: ignore[attr-defined]


def _why_not(x: torch.Tensor) -> str:
    """Return the reason why the elements of a tensor cannot be read; "" if they can."""
    if x.device.type == "meta":
        return "meta"
    if x.layout is not torch.strided:
        return "sparse"
    if x.is_quantized:
        return "quantized"
    # Operations of a subclass may do anything, for example wait for other ranks.
    return "" if type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ else f"of class {type(x).__name__}"
