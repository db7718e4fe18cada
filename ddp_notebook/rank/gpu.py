"""Whether this process uses a GPU, and when a thread may ask one.

Nothing that a host server imports asks the driver: a thread that it leaves would forbid forking. So what matters is
whether CUDA is in use, not whether there is a device.

While a thread captures a CUDA graph, any question of another thread would break the capture, so those wait.
Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#prohibited-and-unhandled-operations
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ddp_notebook.stdlib import contextlib, functools, threading

IS_BUILT = torch.version.cuda is not None or torch.version.hip is not None  # else there is nothing to ask
_PATIENCE_S = 5.0  # one who asks for so long is held up by the device, and a capture would fail anyway
_changing = threading.Condition()
_askers = _captures = 0
_is_watching = False


def is_in_use() -> bool:
    """Whether this process has used a GPU: else no tensor of one is here."""
    return IS_BUILT and torch.cuda.is_initialized()


def reserved_bytes(device: str | None = None) -> int:
    """Device memory that torch's allocator holds in this process; 0 if it has used no device, or is a plug-in that does
    not report it.

    Args:
        device: None is the present one of this thread.

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
    """See captures of graphs as they begin and end."""
    global _is_watching
    if IS_BUILT and not _is_watching:
        _is_watching = True
        graph = torch.cuda.CUDAGraph
        graph.capture_begin = _beginning(graph.capture_begin)  # type: ignore[method-assign]
        graph.capture_end = _ending(graph.capture_end)  # type: ignore[method-assign]


@contextlib.contextmanager
def asking() -> Iterator[bool]:
    """Whether a thread that does not capture may ask the GPU now; no capture begins as long as it does. Several may:
    what ends a hang must not wait for a thread that is held up."""
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
            _captures += 1  # from here on nobody begins to ask
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
