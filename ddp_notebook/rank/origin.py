"""Whose call an operation is: the user's own, or DDP's, FSDP's, DTensor's.

Frames are told by their code objects, which are looked at once each: 0.2 us a frame.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_MAKERS = {
    "nn/parallel/": "DDP",
    "distributed/fsdp/": "FSDP",
    "distributed/_composable/": "FSDP",
    "distributed/tensor/": "DTensor",
    "distributed/_functional_collectives.py": "DTensor",
    "distributed/pipelining/": "pipeline",
    "distributed/optim/": "optimizer",
    "distributed/checkpoint/": "checkpoint",
    "distributed/algorithms/": "DDP",
    "autograd/": "backward",
}
_TRANSPARENT = ("typing_extensions.py", "contextlib.py")
_known: dict[CodeType, str] = {}  # "": torch's own frame that says nothing; "user"
USER = "user"


def origin(depth: int = 1) -> str:
    """`"user"`, or who in torch has called.

    Args:
        depth: frames to leave out, of the caller's side.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        maker = _known.get(code)
        if maker is None:
            maker = _known[code] = _maker(code.co_filename)
        if maker:
            return maker
        frame = frame.f_back
    return "backward"  # a thread of autograd's


def _maker(filename: str) -> str:
    if not filename.startswith(_TORCH):
        return "" if filename.endswith(_TRANSPARENT) else USER
    inside = filename[len(_TORCH) :]
    return next((maker for start, maker in _MAKERS.items() if inside.startswith(start)), "")
