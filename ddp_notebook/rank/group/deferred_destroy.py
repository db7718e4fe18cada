"""Keep destroyed groups alive for a while.

Freeing a group joins gloo's thread while it holds the GIL. That thread may need the GIL to release the last all_reduce.
A DDP model that is deleted after its group, as in `cleanup()` of torch's tutorial, hangs that way. Even without this
package, a script with 100 such groups hangs within the first ones (torch 2.13, two cores). With the recorder it nearly
always hangs, since the end of each operation calls Python.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch.distributed as dist

from ddp_notebook.rank.patching import replace
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import functools, threading, time

_QUIET_S = 0.05  # time for the gloo threads to release their last operation
_KEPT = 4
_ended: deque[list[Any]] = deque()
TORCHS = dist.destroy_process_group


def keep(group: Any) -> None:
    """Keep one or several unused groups. Free the oldest ones in a thread, since that waits for gloo once per
    connection."""
    _ended.append([group])
    if len(_ended) > _KEPT:
        threading.Thread(target=_ended.popleft().clear, name="ddp-free").start()  # scripts join it at exit


@functools.wraps(TORCHS)
def _destroy_and_keep(group: Any = None) -> None:
    ended = dist.group.WORLD if group is None else group
    try:
        TORCHS(group)
    finally:
        if isinstance(ended, dist.ProcessGroup):  # otherwise torch has refused it
            keep(ended)


def install() -> None:
    """Replace `dist.destroy_process_group`."""
    replace(TORCHS, _destroy_and_keep)


def let_go() -> None:
    """Free the groups before the process ends: gloo's threads must not outlive it."""
    if _ended:
        time.sleep(_QUIET_S)
        _ended.clear()
