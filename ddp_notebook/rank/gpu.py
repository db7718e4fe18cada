"""GPU usage of this process, and when a thread may query the GPU.

No module that a host server imports queries the driver: that would start a thread, and the server could not fork any
more. So the code checks whether CUDA is in use, not whether there is a device.

While one thread captures a CUDA graph, a query from another thread would break the capture. So queries wait.
Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#prohibited-and-unhandled-operations
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, functools, threading

IS_BUILT = torch.version.cuda is not None or torch.version.hip is not None  # False: torch without GPU support
_PATIENCE_S = 5.0  # a query that takes longer is blocked by the device, and a capture would fail anyway
_changing = threading.Condition()
_askers = _captures = 0
_is_watching = False


def is_in_use() -> bool:
    """Return whether this process has initialized CUDA. Otherwise it has no tensor on a GPU."""
    return IS_BUILT and torch.cuda.is_initialized()


def reserved_bytes(device: str | None = None) -> int:
    """Return the device memory in bytes that the allocator of torch holds in this process.

    Returns 0 if the process has used no device, or if the device is a plug-in that does not report it.

    Args:
        device: the device; None for the current device of this thread.

    Source: https://docs.pytorch.org/docs/stable/accelerator.html#memory-management
    """
    if is_in_use():
        return int(torch.cuda.memory_reserved(device))
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return 0
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return 0
    try:
        return int(torch.accelerator.memory_reserved(device))
    except (RuntimeError, NotImplementedError):
        return 0


def watch_captures() -> None:
    """Track the start and the end of graph captures."""
    global _is_watching
    if IS_BUILT and not _is_watching:
        _is_watching = True
        graph = torch.cuda.CUDAGraph
        graph.capture_begin = _beginning(graph.capture_begin)  # type: ignore[method-assign]
        graph.capture_end = _ending(graph.capture_end)  # type: ignore[method-assign]


@contextlib.contextmanager
def asking() -> Iterator[bool]:
    """Yield whether a thread that does not capture may query the GPU now. No capture starts inside the block.

    Several threads may be inside at once: the code that ends a hang must not wait for a blocked thread.
    """
    global _askers
    with _changing:
        may_ask = not _captures
        _askers += 1
    try:
        yield may_ask
    finally:
        with _changing:
            _askers -= 1
            _changing.notify_all()


def _beginning(begin: Any) -> Any:
    @functools.wraps(begin)
    def capture_begin(*args: Any, **named: Any) -> Any:
        global _captures
        with _changing:
            _captures += 1  # from now on no thread starts a query
            _changing.wait_for(lambda: not _askers, _PATIENCE_S)
        try:
            return begin(*args, **named)
        except BaseException:
            _end()
            raise

    return capture_begin


def _ending(end: Any) -> Any:
    @functools.wraps(end)
    def capture_end(*args: Any, **named: Any) -> Any:
        try:
            return end(*args, **named)
        finally:
            _end()

    return capture_end


def _end() -> None:
    global _captures
    with _changing:
        _captures = max(0, _captures - 1)
