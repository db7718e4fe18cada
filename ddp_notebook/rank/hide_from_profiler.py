"""Hide our operators from the torch profilers, traces and flight recorder.

torch's profilers see each operator through callbacks, which a thread can switch off for itself (0.3 us for off and on).
The user's torch function modes and dispatch modes are disabled as well. The flight recorder is not per thread, so its
dumps are filtered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C import _distributed_c10d

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import functools, json, pickle, threading

_P = ParamSpec("_P")
_R = TypeVar("_R")
_ours: set[int] = set()  # ids of the guard's groups, kept since entries may disappear first
_NAMELESS = ""  # the flight recorder's name of a group that torch has not registered, such as the guard's


def _keep_seeing(_: bool) -> None:
    """Do nothing; used if this torch has no such switch."""


_let_see: Callable[[bool], None] = getattr(torch._C._autograd, "_enable_record_function", _keep_seeing)
# Return the numbers of the user's torch function modes and dispatch modes in this thread.
function_modes, operator_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack


class _Here(threading.local):
    depth = 0  # nested calls of `unseen`


_here = _Here()


def is_possible() -> bool:
    """Return whether this torch can hide a thread's operators from a profile."""
    return _let_see is not _keep_seeing


def unseen(work: Callable[_P, _R], *args: _P.args, **named: _P.kwargs) -> _R:
    """Call a function and hide its operators from the user's profilers, traces and modes. Takes 0.6 us.

    Example:
        >>> with torch.autograd.profiler.profile() as profile:
        ...     _ = unseen(torch.ones, 3)
        >>> [event.key for event in profile.key_averages()]
        []
    """
    _here.depth += 1
    try:
        _let_see(False)  # inside the try: an interrupt may arrive right after this call
        if operator_modes():
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                return work(*args, **named)
        if function_modes():  # `torch.set_default_device` adds such a mode; DTensors must still find their operators
            with torch._C.DisableTorchFunction():
                return work(*args, **named)
        return work(*args, **named)
    finally:
        _here.depth -= 1
        if not _here.depth:
            _let_see(True)


def filter_flight_recorder() -> None:
    """Remove the guard's operations from the flight recorder's dumps in Python."""
    for name, read, write in (
        ("_dump_fr_trace", pickle.loads, functools.partial(pickle.dumps, protocol=2)),
        ("_dump_fr_trace_json", json.loads, lambda traces: json.dumps(traces, separators=(",", ":")).encode()),
    ):
        if (dump := getattr(_distributed_c10d, name, None)) is not None:
            setattr(_distributed_c10d, name, _filtered(dump, read, write))


def _filtered(
    dump: Callable[..., bytes], read: Callable[[bytes], Any], write: Callable[[Any], bytes]
) -> Callable[..., bytes]:
    @functools.wraps(dump)
    def dump_filtered(*args: Any, **named: Any) -> bytes:
        dumped = dump(*args, **named)
        traces = read(dumped)
        entries = traces.get("entries", [])
        _ours.update(entry["pg_id"] for entry in entries if entry["process_group"][0] == _NAMELESS)
        if not _ours:
            return dumped
        if entries:
            traces["entries"] = [entry for entry in entries if entry["pg_id"] not in _ours]
        for group in _ours:
            traces.get("pg_status", {}).pop(str(group), None)
        return write(traces)

    return dump_filtered
