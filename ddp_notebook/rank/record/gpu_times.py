"""When work on a GPU began and ended, without waiting for it: events in its stream, read once they have happened.

The device's clock is tied to the process's by an anchor: an event on an idle stream of our own, and the time on the
host when it was recorded. Written from torch's documentation and not yet run on a GPU; `tests/gpu` has the check.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ddp_notebook.rank.group.operators import flat

_ANCHOR_S = 1.0  # between two anchors: clocks drift


class Marks:
    """Two events around an operation. Made, and begun, on the stream that the operation is queued on."""

    __slots__ = ("begin", "device", "finish")

    def __init__(self) -> None:
        self.device = torch.cuda.current_device()
        self.begin = torch.cuda.Event(enable_timing=True)
        self.finish: torch.cuda.Event | None = None
        self.begin.record()

    def end(self, future: Any) -> Any:
        """Called on a stream that waits for the operation; see `torch.futures.Future.then`."""
        finish = torch.cuda.Event(enable_timing=True)
        finish.record()
        self.finish = finish
        return future.value()

    def end_now(self) -> None:
        """The operation is queued on the current stream itself."""
        if self.finish is None:
            self.finish = torch.cuda.Event(enable_timing=True)
            self.finish.record()

    @property
    def has_happened(self) -> bool:
        return self.finish is not None and bool(self.finish.query())


class GpuClock:
    """Translates events to the process's monotonic clock. Used by the recorder's thread."""

    def __init__(self) -> None:
        self._anchors: dict[int, tuple[torch.cuda.Event, int, float]] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}

    def times_ns(self, marks: Marks) -> tuple[int, int]:
        """When an operation that has happened began and ended."""
        assert marks.finish is not None
        event, at_ns = self._anchor(marks.device)
        began_ms, ended_ms = event.elapsed_time(marks.begin), event.elapsed_time(marks.finish)
        return at_ns + round(began_ms * 1e6), at_ns + round(ended_ms * 1e6)

    def _anchor(self, device: int) -> tuple[torch.cuda.Event, int]:
        known = self._anchors.get(device)
        if known is None or time.monotonic() - known[2] > _ANCHOR_S:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
            event = torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(stream):
                event.record()
            event.synchronize()  # the stream is empty, and this thread may wait
            known = self._anchors[device] = (event, time.monotonic_ns(), time.monotonic())
        return known[0], known[1]


HAS_DEVICES = torch.cuda.is_available()


def marks_of(value: Any) -> Marks | None:
    """Events around an operation, on the stream of a GPU whose tensors it takes; None on the CPU."""
    tensors = flat(value)
    if not tensors or not tensors[0].is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    return Marks()
