"""Whose call an operation is: the user's own, or DDP's, FSDP's, DTensor's; and which line of the user's has led to it.

Frames are told by their code objects, which are looked at once each: 0.1 us a frame.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType
from typing import NamedTuple

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(__file__) + os.sep
_MAKERS = {
    "nn/parallel/": "ddp",
    "distributed/fsdp/": "fsdp",
    "distributed/_composable/": "fsdp",
    "distributed/tensor/": "dtensor",
    "distributed/_functional_collectives.py": "functional",
    "distributed/pipelining/": "pipeline",
    "distributed/optim/": "optimizer",
    "distributed/checkpoint/": "checkpoint",
    "distributed/algorithms/ddp_comm_hooks/": "ddp hook",
    "distributed/algorithms/": "ddp",
    "autograd/": "torch",
}
_TRANSPARENT = ("typing_extensions.py", "contextlib.py")
_PARAM_GROUP = "_fsdp_param_group.py"  # of FSDP: knows the module that it works for
_ENGINE = "_engine_run_backward"  # of autograd: what it calls without another frame is C++, as DDP's reducer
_known: dict[CodeType, str] = {}  # "": torch's own frame that says nothing
_MOST_MET = 1000
_WRAPPERS = {"wrapper", "_wrapped_call_impl", "_call_impl", "inner", "decorate_context", "nonrecursive_disable_wrapper"}
_WRAPPER = "wrapper"  # a frame that says nothing, and has no name that a user knows
USER = "user"
REDUCER = "reducer"  # C++ below a backward, perhaps in a thread of autograd's


class Site(NamedTuple):
    """Where an operation comes from: references, from which words are made later."""

    origin: str
    api: CodeType | None  # what the user's code has called
    user: tuple[CodeType, int] | None  # the user's frame and its instruction
    cell: tuple[CodeType, int] | None  # the cell's frame, if that is another one
    module: str


def origin(depth: int = 1) -> str:
    """`"user"`, or who in torch has called.

    Args:
        depth: frames to leave out, of the caller's side.
    """
    frame: FrameType | None = sys._getframe(depth)
    known = _known
    while frame is not None:
        code = frame.f_code
        maker = known.get(code)
        if maker is None:
            maker = known[code] = _maker(code)
        if maker and maker is not _WRAPPER:
            return maker
        frame = frame.f_back
    return REDUCER  # a thread of autograd's


class Sites:
    """Where calls come from. Those that were met are kept: a loop meets the same again.

    Args:
        cells: the files of cells.
    """

    def __init__(self, cells: dict[str, int]) -> None:
        self._cells = cells
        self._met: dict[tuple[CodeType, int, CodeType | None, str], Site] = {}

    def site(self, depth: int) -> Site:
        """Where the call of the frame `depth` levels above comes from."""
        frame: FrameType | None = sys._getframe(depth)
        known = _known
        origin = module = ""
        api: CodeType | None = None
        while frame is not None:
            code = frame.f_code
            maker = known.get(code)
            if maker is None:
                maker = known[code] = _maker(code)
            if maker is USER:
                break
            if maker and maker is not _WRAPPER:
                if not origin:
                    origin = maker
                if maker == "fsdp" and not module and code.co_filename.endswith(_PARAM_GROUP):
                    module = getattr(frame.f_locals.get("self"), "_module_fqn", None) or ""
            if maker is not _WRAPPER:
                api = code
            frame = frame.f_back
        else:
            return Site(origin or REDUCER, api, None, None, module)
        if code.co_filename not in self._cells:  # a module's function may be called from anywhere
            return Site(origin or USER, api, (code, frame.f_lasti), self._cell_above(frame), module)
        key = (code, frame.f_lasti, api, origin)
        met = self._met.get(key)
        if met is None or met.module != module:
            if len(self._met) >= _MOST_MET:
                self._met.clear()
            met = self._met[key] = Site(origin or USER, api, (code, frame.f_lasti), None, module)
        return met

    def _cell_above(self, frame: FrameType) -> tuple[CodeType, int] | None:
        back = frame.f_back
        while back is not None:
            if back.f_code.co_filename in self._cells:
                return back.f_code, back.f_lasti
            back = back.f_back
        return None


def _maker(code: CodeType) -> str:
    filename = code.co_filename
    if code.co_name == _ENGINE:
        return REDUCER
    if filename.startswith(_OURS) or (code.co_name in _WRAPPERS and filename.startswith(_TORCH)):
        return _WRAPPER
    if not filename.startswith(_TORCH):
        return "" if filename.endswith(_TRANSPARENT) else USER
    inside = filename[len(_TORCH) :]
    return next((maker for start, maker in _MAKERS.items() if inside.startswith(start)), "")
