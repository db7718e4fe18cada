"""States of the random number generators of this process: of torch, CUDA devices, Python and NumPy."""

from __future__ import annotations

import random
import sys
from array import array
from typing import Any, TypeAlias

import torch

from ddp_notebook.stdlib import zlib

# The states are those of torch, of CUDA devices ("cuda": the current one), of Python, and of NumPy if it is imported.
RandomStates: TypeAlias = tuple[torch.Tensor, dict[str, torch.Tensor], Any, Any]


def read(*, all_devices: bool = False) -> RandomStates:
    """Return the states of all generators.

    Args:
        all_devices: read the generators of all CUDA devices, not only that of the current one.

    Example:
        >>> states = read()
        >>> first = torch.rand(1), random.random()
        >>> restore(states)
        >>> first == (torch.rand(1), random.random())
        True
    """
    numpy = sys.modules.get("numpy")
    devices: list[str] = []
    if torch.cuda.is_initialized():
        devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if all_devices else ["cuda"]
    on_devices = {device: torch.cuda.get_rng_state(device) for device in devices}
    return torch.get_rng_state(), on_devices, random.getstate(), None if numpy is None else numpy.random.get_state()


def restore(states: RandomStates) -> None:
    """Set the states that `read` has returned."""
    of_torch, on_devices, of_python, of_numpy = states
    torch.set_rng_state(of_torch)
    for device, state in on_devices.items():
        torch.cuda.set_rng_state(state, device)
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


def checksums(states: RandomStates) -> dict[str, int]:
    """Return a checksum of each state: "torch", "CUDA" (devices in their order), "Python" and "NumPy".

    Equal states have equal checksums in all processes.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> before = checksums(read())
        >>> _ = torch.rand(1)
        >>> after = checksums(read())
        >>> [name for name in before if before[name] != after[name]]
        ['torch']
    """
    of_torch, on_devices, of_python, of_numpy = states
    found = {"torch": zlib.crc32(of_torch.numpy().tobytes())}
    if on_devices:
        found["CUDA"] = 0
        for state in on_devices.values():
            found["CUDA"] = zlib.crc32(state.numpy().tobytes(), found["CUDA"])
    _, words, gauss = of_python
    found["Python"] = zlib.crc32(repr(gauss).encode(), zlib.crc32(array("I", words)))
    if of_numpy is not None:
        name, key, *rest = of_numpy
        found["NumPy"] = zlib.crc32(repr((name, *rest)).encode(), zlib.crc32(key.tobytes()))
    return found


def current_checksums() -> dict[str, int]:
    """Return the checksums of the present states, including those of all CUDA devices."""
    return checksums(read(all_devices=True))
