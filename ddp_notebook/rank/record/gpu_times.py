"""Start and end times of work on a GPU, from events in its stream. They are read after they have happened, without a
wait.

An anchor relates the device's clock to that of the process: an event on a separate idle stream, and the host time at
which it had happened. No thread of this package waits for the device: if ranks hang, the thread would hang too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ddp_notebook.rank.group.operators import flat
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import time

_ANCHOR_NS = 1_000_000_000  # interval between two anchors: clocks drift
_AT_ONCE_NS, _TRY_AGAIN_NS = 200_000, 50_000_000
_streams: dict[int, torch.cuda.Stream] = {}  # streams for anchors, by device


class _Anchor(NamedTuple):
    event: torch.cuda.Event
    at_ns: int  # monotonic clock


class Marks:
    """Two events around an operation. Made on the operation's stream, where the first event is recorded."""

    __slots__ = ("begin", "device", "finish")

    def __init__(self, device: int) -> None:
        self.device = device  # not the current device of this thread
        if device not in _streams:  # made now: later it might have to wait for the operation
            _streams[device] = torch.cuda.Stream(device)
        self.begin = torch.cuda.Event(enable_timing=True)
        self.finish: torch.cuda.Event | None = None
        self.begin.record(torch.cuda.current_stream(device))

    def end_with(self, future: Any) -> None:
        """Record the end when a future of the operation completes.

        Callbacks of the future run on streams that wait for the operation. Those of NCCL run as soon as they are added.
        """
        future.then(self._note_end)

    def _note_end(self, future: Any) -> Any:
        self.ended()
        return future.value()

    def ended(self) -> Marks | None:
        """Record the end event. Later work on the current stream waits for the operation.

        Returns:
            This object; None if the GPU has failed, which the user's code reports.
        """
        try:
            if self.finish is None:
                finish = torch.cuda.Event(enable_timing=True)
                finish.record(torch.cuda.current_stream(self.device))
                self.finish = finish
        except RuntimeError:
            return None
        return self

    @property
    def has_happened(self) -> bool:
        return self.finish is not None and bool(self.finish.query())


class GpuClock:
    """Conversion of event times to the process's monotonic clock. Used by the recorder's thread."""

    def __init__(self) -> None:
        self._anchors: dict[int, _Anchor] = {}
        self._tried_ns = 0

    def is_set(self, device: int) -> bool:
        """Return whether times of a device can be converted now.

        An old anchor is renewed if the device executes a new one immediately. An operation may block the device.
        """
        known, now_ns = self._anchors.get(device), time.monotonic_ns()
        if known is not None and now_ns - known.at_ns < _ANCHOR_NS:
            return True
        if now_ns - self._tried_ns > _TRY_AGAIN_NS:
            self._tried_ns = now_ns
            event = torch.cuda.Event(enable_timing=True)
            event.record(_streams[device])
            has_happened, at_ns = False, now_ns  # no sleep: the GIL may come back only after 5 ms
            while not has_happened and at_ns - now_ns < _AT_ONCE_NS:
                has_happened, at_ns = event.query(), time.monotonic_ns()
            if has_happened and at_ns - now_ns < _AT_ONCE_NS:
                known = self._anchors[device] = _Anchor(event, at_ns)
        return known is not None

    def times_ns(self, marks: Marks) -> tuple[int, int]:
        """Return the start and end in ns of a completed operation, on a device for which `is_set` returned True."""
        assert marks.finish is not None
        event, at_ns = self._anchors[marks.device]
        began_ms, ended_ms = event.elapsed_time(marks.begin), event.elapsed_time(marks.finish)
        return at_ns + round(began_ms * 1e6), at_ns + round(ended_ms * 1e6)


def marks_of(value: Any) -> Marks | None:
    """Return the events around an operation on the stream of its GPU; None on the CPU."""
    tensors = flat(value)
    if not tensors or not tensors[0].is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    return Marks(tensors[0].device.index)
