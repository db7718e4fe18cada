"""Suppress the C++ log of torch on fd 2 for connections that are closed on purpose (40 lines of frames each)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, ctypes, os

_LEVEL = "FLAGS_caffe2_log_level"
_FATAL = 3
_ASKED_FOR = "TORCH_CPP_LOG_LEVEL"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let the C++ code of torch log only fatal errors. Does nothing if the log level cannot be accessed.

    `TORCH_CPP_LOG_LEVEL` is read when torch is imported, and nothing public changes the level afterwards.
    """
    if (level := _level()) is None:
        yield
        return
    before = level.value
    level.value = _FATAL
    try:
        yield
    finally:
        level.value = before


def hush() -> None:
    """Log only fatal errors from now on, unless the user has set a level.

    When a rank dies, NCCL's watchdog writes 40 lines into the output of the other ranks. The cell's error contains the
    same in one line.
    """
    if _ASKED_FOR not in os.environ and (level := _level()) is not None:
        level.value = _FATAL


def _level() -> ctypes.c_int | None:
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so")), _LEVEL)
    except (OSError, ValueError):
        return None
