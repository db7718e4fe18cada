"""The log of torch's C++ side on fd 2: silent about connections that are cut on purpose (40 lines of frames each)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import torch

_LEVEL = "FLAGS_caffe2_log_level"
_FATAL = 3


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let torch's C++ side log only fatal errors. If its level cannot be reached, nothing is hidden.

    `TORCH_CPP_LOG_LEVEL` is read when torch is imported, and nothing public changes the level afterwards.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        level = ctypes.c_int.in_dll(library, _LEVEL)
    except (OSError, ValueError):
        yield
        return
    before = level.value
    level.value = _FATAL
    try:
        yield
    finally:
        level.value = before
