"""Abort the operation that a script waits in.

Its connections are aborted, and the operation raises the same error as after the death of a peer. Unlike in a cell,
later operations are not rejected, so a script that handles the error can continue.
"""

from __future__ import annotations

from collections.abc import Callable

from ddp_notebook.rank.group.calls import Call
from ddp_notebook.rank.group.connections.abort import Connections
from ddp_notebook.rank.group.cpp_log import quiet
from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.group.release import Release
from ddp_notebook.records.words import line_of
from ddp_notebook.stdlib import time

_LOOK_S = 0.02


_PATIENCE_S = 0.1  # after this time, waits at a store are aborted too


_LIMIT_S = 5.0


_FORMING_S = 0.5  # a group that forms faster is not aborted


def free(recorder: Recorder, connections: Connections, release: Release, name: str, group: str, number: int) -> str:
    """Abort the operation that this process waits in, until the wait has ended.

    Args:
        recorder: operations of the process.
        connections: connections to abort.
        release: current wait of the main thread.
        name, group, number: the operation to abort. With an empty name, abort the forming of a group.

    Returns:
        A description of the aborted operation: "all_reduce #46 of group default (train.py:13 in main)". "" if the
        process does not wait in it.
    """

    def calls() -> list[Call]:
        return [call for call in [*recorder.waiting.values(), release.waits_in()] if call is not None]

    doing = release.now()
    where = line_of(doing.thread or doing.place)
    what = "the forming of a group"
    if name:
        asked = next((call for call in calls() if _key(call) == (name, group, number)), None)
        if asked is None:
            return ""
        what = str(asked.describe())

        def waits() -> bool:
            return any(call is asked for call in calls())
    else:

        def waits() -> bool:
            return connections.is_connecting or connections.is_making

        if not _lasts(waits, _FORMING_S):
            return ""
    began = time.monotonic()
    with quiet():
        while waits() and (for_s := time.monotonic() - began) < _LIMIT_S:
            connections.cut_groups()
            if for_s > _PATIENCE_S or not name:
                connections.cut_stores()
            time.sleep(_LOOK_S)
    return what + (f" ({where})" if where else "")


def _key(call: Call) -> tuple[str, str, int]:
    operation = call.describe()
    return operation.name, operation.group, operation.number


def _lasts(waits: Callable[[], bool], for_s: float) -> bool:
    until = time.monotonic() + for_s
    while waits():
        if time.monotonic() > until:
            return True
        time.sleep(_LOOK_S)
    return False
