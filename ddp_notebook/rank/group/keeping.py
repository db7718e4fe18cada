"""Groups that were destroyed are kept for a while.

Who frees a group holds the interpreter's lock and waits for gloo's thread, which may wait for that lock to let go of
the last all_reduce: a model in DDP that ends after its group, as in `cleanup()` of the tutorial, hangs so. A script
with 100 such groups hangs in its first ones by itself (torch 2.13, two cores), and nearly always where the end of
operations is told to Python, as the recorder has it.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import deque
from typing import Any

import torch.distributed as dist

_QUIET_S = 0.05  # what gloo's threads get to let go of their last operation
_ended: deque[Any] = deque(maxlen=4)
_destroy_process_group = dist.destroy_process_group


@functools.wraps(_destroy_process_group)
def _destroy_and_keep(group: Any = None) -> None:
    _ended.append(dist.group.WORLD if group is None else group)
    _destroy_process_group(group)


def install() -> None:
    """Keep what `dist.destroy_process_group` destroys, wherever a module has that function."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("destroy_process_group") is _destroy_process_group:
            module.destroy_process_group = _destroy_and_keep  # type: ignore[attr-defined]


def let_go() -> None:
    """Free them, before the process ends: gloo's threads must not outlive it."""
    if _ended:
        time.sleep(_QUIET_S)
        _ended.clear()
