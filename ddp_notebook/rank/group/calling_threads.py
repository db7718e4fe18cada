"""Threads that call collectives of one group.

Ranks must start the collectives of a group in the same order. Two threads that do not wait for each other may start
them in another order on each rank. The recorder calls `enter` if a thread starts a collective after another thread.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddp_notebook.records.operation import Operation
from ddp_notebook.records.threads import advice
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import threading

if TYPE_CHECKING:
    from ddp_notebook.rank.group.calls import Call, Group

MAIN = threading.main_thread().ident


def name_of(thread: int) -> str:
    """Return the name of a Python thread; "" for threads of C++, such as those of a backward on a GPU.

    Example:
        >>> name_of(threading.get_ident()), name_of(0)
        ('the main thread', '')
    """
    if thread == MAIN:
        return "the main thread"
    for one in threading.enumerate():
        if one.ident == thread:
            return "" if type(one).__name__ == "_DummyThread" else f"thread {one.name!r}"
    return ""


def enter(group: Group, thread: int, waiting: Mapping[int, Call]) -> None:
    """Note that this thread is about to start a collective of a group, after another thread.

    Print a warning when, for the first time, that other thread is still inside a collective of this group: only chance
    decides which of the two operations starts first.

    Args:
        waiting: the calls in which threads wait.
    """
    group.thread = thread
    if not (name := name_of(thread)):
        return
    alive = {one.ident for one in threading.enumerate()}
    group.threads = {one: known for one, known in group.threads.items() if one in alive} | {thread: name}
    if len(group.threads) < 2 or group.has_overlapped:
        return
    for other, call in list(waiting.items()):
        if other != thread and call.group is group and call.kernel.spec.kind == "collective" and not call.is_done:
            if other in group.threads:
                group.has_overlapped = True
                _warn(group, name, group.threads[other], call.describe())
            return


def _warn(group: Group, thread: str, other: str, operation: Operation) -> None:
    remedy = advice(thread + other, is_of_checkpoint=operation.origin == "checkpoint")
    print(
        f"ddp_notebook: {thread} starts a collective of group {group.title} while {other} is in {operation.short}. "
        f"Ranks may start them in a different order; {remedy}",
        file=sys.stderr,
    )
