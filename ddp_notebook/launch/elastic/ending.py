"""Ending a job of torchrun's that was started anywhere on this machine, as Ctrl-C would where it was started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence

from ddp_notebook.errors import UsageError
from ddp_notebook.registry.entries import Entry
from ddp_notebook.registry.identities import is_running
from ddp_notebook.registry.torchrun import launcher

_END_S = 45.0  # torchrun itself gives its workers 30 s
_LOOK_S = 0.05


def end(ranks: Sequence[Entry]) -> None:
    """End a job: SIGTERM to its agents, which end their workers; to a rank itself that nobody has started.

    Args:
        ranks: those of it that are here.

    Raises:
        UsageError: it is still there after 45 s.
    """
    to_end = {launcher(entry.about) or entry.who for entry in ranks}
    for pid, _ in filter(is_running, to_end):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    left, until = to_end | {entry.who for entry in ranks}, time.monotonic() + _END_S
    while left := {one for one in left if is_running(one)}:
        if time.monotonic() > until:
            pids = " ".join(str(pid) for pid, _ in sorted(left))
            raise UsageError(f"{ranks[0].name} has not ended within {_END_S:g} s; to end it at once: kill -KILL {pids}")
        time.sleep(_LOOK_S)
    for entry in ranks:
        entry.remove()
