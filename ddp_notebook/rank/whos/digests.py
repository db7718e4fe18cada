"""Digests of the contents of variables, to find ranks with other contents. Large tensors are sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ddp_notebook.rank.variables.summary import Checksums
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import hashlib

_SAMPLES = 256  # elements of a sampled tensor
_COMPLETE = 4096  # smaller tensors are read completely
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtype by bytes per element
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None), range, slice, torch.dtype, torch.Size)


class Digests:
    """Reads contents.

    Args:
        exact: read every byte.

    Example:
        >>> digests = Digests(exact=False)
        >>> digests.of_tensor(torch.ones(10)) == digests.of_tensor(torch.ones(10))
        True
        >>> digests.has_sampled
        False
    """

    def __init__(self, exact: bool) -> None:
        self._checksums = Checksums() if exact else None
        self._positions: dict[int, torch.Tensor] = {}
        self.has_sampled = False  # set when a tensor was sampled; the caller resets it

    def of_tensor(self, tensor: torch.Tensor) -> str:
        """Return the digest of a plain tensor; "" if it cannot be read."""
        x = tensor.detach()
        if x.layout is not torch.strided or x.is_quantized or x.device.type == "meta":
            return ""
        if self._checksums is not None:
            return self._checksums.of(x)
        x = x.resolve_conj().resolve_neg()
        if x.is_complex():
            x = torch.view_as_real(x)
        if (kind := _INTEGERS.get(x.element_size())) is None:
            return ""
        x = x.view(kind)
        if (count := x.numel()) > _COMPLETE:
            self.has_sampled = True
            x = torch.take(x, self._spread(count).to(x.device))
        return digest(x.cpu().contiguous().numpy().tobytes())

    def of_array(self, array: np.ndarray[Any, Any]) -> str:
        """Return the digest of an array of numbers, text or dates; "" for objects."""
        if array.dtype.hasobject:
            return ""
        if self._checksums is None and array.size > _COMPLETE:
            self.has_sampled = True
            array = np.take(array, self._spread(array.size).numpy())
        return digest(array.tobytes())

    def of_plain(self, value: Any) -> str:
        """Return the digest of a number, of text or of bytes; "" for other types."""
        kind = type(value)
        if not any(kind is one for one in _PLAIN):
            return ""
        if kind is str:
            return digest(value.encode(errors="surrogatepass"))
        return digest(value if kind in (bytes, bytearray) else repr(value).encode())

    def _spread(self, count: int) -> torch.Tensor:
        """Return one random position in each of equal ranges: fixed distances might all hit one column."""
        if count not in self._positions:
            edges = np.arange(_SAMPLES + 1, dtype=np.int64) * count // _SAMPLES
            draw = np.random.Generator(np.random.PCG64(0))  # not the user's random state
            self._positions[count] = torch.from_numpy(draw.integers(edges[:-1], edges[1:]))
        return self._positions[count]


def digest(data: Any) -> str:
    """Return a short digest of bytes."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()
