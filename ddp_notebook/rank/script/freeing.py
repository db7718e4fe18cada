"""Ending what a script waits in: the connections of its groups are cut, and the operation raises what it raises when a
peer is gone. Unlike in a cell nothing else is refused afterwards, so a script that handles such an error goes on."""

from __future__ import annotations

import time

from ddp_notebook.rank.group.calls import Call
from ddp_notebook.rank.group.connections.cutting import Connections
from ddp_notebook.rank.group.cpp_log import quiet
from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.group.release import Release

_LOOK_S = 0.02
_PATIENCE_S = 0.1  # then waits at a store are cut too
_LIMIT_S = 5.0


def free(recorder: Recorder, connections: Connections, release: Release) -> str:
    """Cut what this process waits in now, until it does not wait there any more.

    Returns:
        What was cut, in words: "all_reduce #46 of group default (train.py:13 in main)"; "": it waits in nothing.
    """
    doing, call = release.now(), release.waits_in()
    calls = [*recorder.waiting.values(), *([] if call is None else [call])]
    if not calls and not connections.is_connecting and not connections.is_making:
        return ""
    began = time.monotonic()
    with quiet():
        while _waits(calls, recorder, release) or connections.is_connecting or connections.is_making:
            connections.cut_groups()
            if (for_s := time.monotonic() - began) > _LIMIT_S:
                break
            if for_s > _PATIENCE_S:
                connections.cut_stores()
            time.sleep(_LOOK_S)
    where = doing.thread or doing.place
    what = "the forming of a group" if doing.operation is None else str(doing.operation)
    return what + (f" ({where.partition(', in ')[0]})" if where else "")


def _waits(calls: list[Call], recorder: Recorder, release: Release) -> bool:
    now = [*recorder.waiting.values(), release.waits_in()]
    return any(call is one for call in calls for one in now)
