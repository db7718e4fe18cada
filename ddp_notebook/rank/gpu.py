"""Whether this process uses a GPU, and when a thread may ask one.

Nothing that a host server imports asks the driver: a thread that it leaves would forbid forking. So what matters is
whether CUDA is in use, not whether there is a device.

While a thread captures a CUDA graph, any question of another thread would break the capture, so those wait.
Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#prohibited-and-unhandled-operations
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

IS_BUILT = torch.version.cuda is not None or torch.version.hip is not None  # else there is nothing to ask
_asking = threading.RLock()
_captures = 0


def is_in_use() -> bool:
    """Whether this process has used a GPU: else no tensor of one is here."""
    return IS_BUILT and torch.cuda.is_initialized()


def watch_captures() -> None:
    """See captures of graphs as they begin and end."""
    if IS_BUILT:
        graph = torch.cuda.CUDAGraph
        graph.capture_begin = _beginning(graph.capture_begin)  # type: ignore[method-assign]
        graph.capture_end = _ending(graph.capture_end)  # type: ignore[method-assign]


@contextlib.contextmanager
def asking() -> Iterator[bool]:
    """Whether a thread that does not capture may ask the GPU now; no capture begins as long as it does."""
    with _asking:
        yield not _captures


def _beginning(begin: Any) -> Any:
    @functools.wraps(begin)
    def capture_begin(*args: Any, **named: Any) -> Any:
        global _captures
        with _asking:
            _captures += 1
            try:
                return begin(*args, **named)
            except BaseException:
                _captures -= 1
                raise

    return capture_begin


def _ending(end: Any) -> Any:
    @functools.wraps(end)
    def capture_end(*args: Any, **named: Any) -> Any:
        global _captures
        try:
            return end(*args, **named)
        finally:
            with _asking:
                _captures = max(0, _captures - 1)

    return capture_end
