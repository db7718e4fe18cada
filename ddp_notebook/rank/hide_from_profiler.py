"""What is ours does not show in what torch tells the user of a program: its profiles, its traces, its flight recorder.

torch's profilers are told of each operator by callbacks, which a thread can switch off for itself (0.3 us for off and
on), and a user's modes of torch functions and operators can be stepped around. The flight recorder, which knows of no
thread, is filtered where it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C import _distributed_c10d

from ddp_notebook.stdlib import functools, json, pickle, threading

_P = ParamSpec("_P")
_R = TypeVar("_R")
_ours: set[int] = set()  # groups of the guard in the flight recorder: their entries may be gone, and their state not
_NAMELESS = ""  # the flight recorder's name of a group that torch has not registered: the guard's


def _keep_seeing(_: bool) -> None:
    """Stands in for torch's switch where that is gone."""


_let_see: Callable[[bool], None] = getattr(torch._C._autograd, "_enable_record_function", _keep_seeing)
# How many modes of the user's see functions or operators of torch in this thread.
function_modes, operator_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack


class _Here(threading.local):
    depth = 0  # of `unseen` in `unseen`


_here = _Here()


def is_possible() -> bool:
    """Whether this torch lets a thread's operators be left out of a profile."""
    return _let_see is not _keep_seeing


def unseen(work: Callable[_P, _R], *args: _P.args, **named: _P.kwargs) -> _R:
    """Call a function whose operators no profiler, trace or mode of the user's sees. Takes 0.6 us.

    Example:
        >>> with torch.autograd.profiler.profile() as profile:
        ...     _ = unseen(torch.ones, 3)
        >>> [event.key for event in profile.key_averages()]
        []
    """
    _here.depth += 1
    try:
        _let_see(False)  # in here: an interrupt may come as soon as it has happened
        if operator_modes():
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                return work(*args, **named)
        if function_modes():  # `torch.set_default_device` leaves one; DTensors must find their operators all the same
            with torch._C.DisableTorchFunction():
                return work(*args, **named)
        return work(*args, **named)
    finally:
        _here.depth -= 1
        if not _here.depth:
            _let_see(True)


def filter_flight_recorder() -> None:
    """Leave the guard's operations out of what torch's flight recorder is asked for in Python."""
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
