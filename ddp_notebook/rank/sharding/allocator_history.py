"""History of the GPU allocator of torch: a bounded ring of its events, with the lines that allocated memory.

torch keeps the ring. It is read after an out-of-memory error only. Without a GPU nothing happens.

Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ddp_notebook.rank import gpu
from ddp_notebook.stdlib import logging

_log = logging.getLogger(__name__)
_MOST_EVENTS = 10_000  # torch expects several kB for each
_KEPT_EVENTS = 200  # the last ones are sent to the notebook and saved with the recording
_MOST_LINES = 8
Place = Callable[[list[tuple[str, int, str]]], str]  # line of the user in calls, innermost first: file, line, function


class AllocatorHistory:
    """The history of this process. It begins once, with the first cell that finds CUDA in use."""

    def __init__(self) -> None:
        self._is_decided = False

    def begin(self) -> None:
        """Let torch keep the history, if CUDA is in use. A history that the program has begun is left as it is."""
        if self._is_decided or not gpu.is_in_use():
            return
        self._is_decided = True
        try:
            if not torch._C._cuda_isHistoryEnabled():
                torch.cuda.memory._record_memory_history(
                    "all", context="alloc", stacks="python", max_entries=_MOST_EVENTS
                )
        except (AttributeError, TypeError, RuntimeError):  # another version, or another allocator
            _log.info("torch keeps no history of its allocator", exc_info=True)

    def read(self, place: Place) -> dict[str, Any]:
        """Return the summary of the history of the current device; {} if there is none.

        Args:
            place: describes the user's line in some calls.
        """
        if not self._is_decided:
            return {}
        try:
            return summary(torch.cuda.memory._snapshot(), torch.cuda.current_device(), place)
        except Exception:  # the facts of the error must not depend on it
            _log.info("the history of the GPU allocator was not read", exc_info=True)
            return {}


def summary(snapshot: Mapping[str, Any], device: int, place: Place) -> dict[str, Any]:
    """Return JSON values about a snapshot of the allocator; {} if it has no history of this device.

    Args:
        snapshot: result of `torch.cuda.memory._snapshot()`.
        device: index of the device.
        place: describes the user's line in some calls; "" if there is none.

    Returns:
        `lines`: bytes that tensors use now, by the line that allocated them, the largest first.
        `largest`: bytes and line of the largest tensor. `failed`: the same of the last request that failed.
        `events`: the last events as action, bytes and line. `count`: number of events in the ring.

    Example:
        >>> frames = [{"filename": "train.py", "line": 7, "name": "step"}]
        >>> block = {"size": 512, "requested_size": 400, "state": "active_allocated", "frames": frames}
        >>> event = {"action": "alloc", "size": 512, "frames": frames}
        >>> snapshot = {"segments": [{"device": 0, "blocks": [block]}], "device_traces": [[event]]}
        >>> found = summary(snapshot, 0, lambda calls: f"{calls[0][0]} line {calls[0][1]}")
        >>> found["lines"], found["events"]
        ({'train.py line 7': 400}, [['alloc', 512, 'train.py line 7']])
    """
    traces = snapshot.get("device_traces") or []
    events = list(traces[device]) if device < len(traces) else []
    if not events:
        return {}
    known: dict[tuple[tuple[str, int], ...], str] = {}

    def line_of(frames: Iterable[Mapping[str, Any]]) -> str:
        calls = [(str(one["filename"]), int(one["line"]), str(one["name"])) for one in frames]
        key = tuple(one[:2] for one in calls)
        if key not in known:
            known[key] = place(calls)
        return known[key]

    lines: Counter[str] = Counter()
    largest: tuple[int, str] = 0, ""
    for segment in snapshot.get("segments") or []:
        if segment.get("device", device) != device:
            continue
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                nbytes, line = int(block.get("requested_size") or block["size"]), line_of(block.get("frames") or ())
                lines[line] += nbytes
                largest = max(largest, (nbytes, line))
    failed = next((one for one in reversed(events) if one["action"] == "oom"), None)
    return {
        "lines": dict(lines.most_common(_MOST_LINES)),
        "largest": list(largest),
        "failed": [] if failed is None else [int(failed["size"]), line_of(failed.get("frames") or ())],
        "events": [
            [one["action"], int(one["size"]), line_of(one.get("frames") or ())] for one in events[-_KEPT_EVENTS:]
        ],
        "count": len(events),
    }
