"""Combine the rows that both sides of RPC calls report: calls, remote references, distributed autograd contexts.

The caller and the callee each report a call with the same number. Each side may send another row earlier, while the
call is open. References and contexts are computed from their events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from ddp_notebook.observe.remote import (
    AutogradContext,
    MessagePair,
    OptimizerStep,
    Reference,
    ReferenceUser,
    RemoteCall,
)
from ddp_notebook.records.schema import CONTEXT_EVENTS, REFERENCE_EVENTS, RPC_KINDS, RPC_SIDES, Rows

_CALLER, _CALLEE = map(RPC_SIDES.index, ("caller", "callee"))
_TORCHS = RPC_KINDS.index("torch")
_MADE, _TAKEN, _DELETED, _LET_GO = map(REFERENCE_EVENTS.index, ("made", "taken", "deleted", "let go"))
_CONTEXT, _PAIR, _GRADIENT, _BACKWARD, _STEP = map(
    CONTEXT_EVENTS.index, ("context", "pair", "gradient", "backward", "step")
)


class RemoteRowSource(Protocol):
    """Source of rows: a recording. Times are on the notebook's clock."""

    def rows(self, table: str) -> Rows: ...

    def text(self, number: int) -> str: ...


def calls(recording: RemoteRowSource, cell: int | None = None, rows: Rows | None = None) -> list[RemoteCall]:
    """Return the result of `Recording.calls`, from these rows of the table `rpc`; None: from all rows."""
    rows = latest(recording.rows("rpc") if rows is None else rows)
    callees = {int(row["number"]): row for row in rows[rows["side"] == _CALLEE]}
    chosen = (rows["side"] == _CALLER) & (rows["kind"] != _TORCHS)
    if cell is not None:
        chosen &= rows["cell"] == cell
    rows = rows[chosen]
    return [_call(recording, row, callees.get(int(row["number"]))) for row in rows[rows["start_ns"].argsort()]]


def latest(rows: Rows) -> Rows:
    """Return for each side of a call the row of its end, or else the row of the open call, whose `end_ns` is negative.

    The row of the open call may arrive after that of the end, if another thread was about to report the call.
    """
    is_open = rows["end_ns"] < 0
    if not is_open.any():
        return rows
    ends_first = np.concatenate((np.flatnonzero(~is_open), np.flatnonzero(is_open)))
    keys = rows["number"] * len(RPC_SIDES) + rows["side"]
    _, at = np.unique(keys[ends_first], return_index=True)
    return rows[np.sort(ends_first[at])]


def _call(recording: RemoteRowSource, row: Any, callee: Any) -> RemoteCall:
    begun = ended = done = None
    error = recording.text(int(row["error"]))
    if callee is not None:
        begun, ended = _known(callee["start_ns"]), _known(callee["end_ns"])
        done = _known(callee["done_ns"]) or ended
        error = recording.text(int(callee["error"])) or error  # the callers of `remote` do not get the error
    return RemoteCall(
        id=int(row["number"]),
        cell=int(row["cell"]),
        kind=RPC_KINDS[row["kind"]],
        src=int(row["src"]),
        dst=int(row["dst"]),
        function=recording.text(int(row["function"])),
        site=recording.text(int(row["site"])),
        parent=int(row["parent"]) or None,
        nbytes=_known(row["nbytes"]),
        nbytes_back=_known(row["nbytes_back"]),
        sent_ns=int(row["start_ns"]),
        begun_ns=begun,
        ended_ns=ended,
        done_ns=done,
        returned_ns=_known(row["end_ns"]),
        error=error,
        reference=int(row["reference"]) or None,
    )


def _known(number: Any) -> int | None:
    return None if number < 0 else int(number)


# ---- references


def references(recording: RemoteRowSource, cell: int | None = None) -> list[Reference]:
    """Return the result of `Recording.references`."""
    rows = recording.rows("reference")
    rows = rows[rows["time_ns"].argsort(kind="stable")]
    let_go: dict[int, list[int]] = {}  # times at which a rank has released all references, by rank
    events: dict[int, list[Any]] = {}  # events by reference
    for row in rows:
        if row["event"] == _LET_GO:
            let_go.setdefault(int(row["rank"]), []).append(int(row["time_ns"]))
        else:
            events.setdefault(int(row["reference"]), []).append(row)
    found = [_reference(recording, its, let_go) for its in events.values()]
    makers = {call.reference: call.function for call in calls(recording) if call.kind == "remote"} if found else {}
    return [
        Reference(**one, what=what or (f"{makers[one['id']]}()" if one["id"] in makers else ""))
        for one, what in filter(None, found)
        if cell in (None, one["cell"])
    ]


def _reference(
    recording: RemoteRowSource, events: list[Any], let_go: dict[int, list[int]]
) -> tuple[dict[str, Any], str] | None:
    """Return all fields except `what`, and the type. Return None if no rank has reported the creation."""
    made = next((row for row in events if row["event"] == _MADE), None)
    if made is None:
        return None
    owner, ends = int(made["owner"]), []
    users, still_there = [], Counter(int(row["fork"]) for row in events if row["event"] in (_MADE, _TAKEN))
    deleted = {}  # deletion of the last handle, by fork
    for row in events:
        if row["event"] == _DELETED:
            still_there[int(row["fork"])] -= 1
            deleted[int(row["fork"])] = int(row["time_ns"])
    for row in events:
        fork, since = int(row["fork"]), int(row["time_ns"])
        if row["event"] not in (_MADE, _TAKEN) or not fork:
            continue
        rank = int(row["rank"])
        end = deleted.get(fork) if still_there[fork] <= 0 else _first(let_go.get(rank, ()), since)
        ends.append(end)
        parent = None if row["event"] == _MADE else _known(row["parent"])
        users.append(ReferenceUser(rank=rank, parent=parent, since_ns=since, deleted_ns=end))
    if 0 in still_there:
        ends.append(deleted.get(0) if still_there[0] <= 0 else None)
    end = max(one or 0 for one in ends) if ends and None not in ends else None
    fields = {
        "id": int(made["reference"]),
        "owner": owner,
        "cell": int(made["cell"]),
        "made_ns": int(made["time_ns"]),
        "made_by": int(made["rank"]),
        "users": tuple(users),
        "deleted_ns": end or _first(let_go.get(owner, ()), int(made["time_ns"])),
    }
    return fields, recording.text(int(made["name"]))


def _first(times: Iterable[int], since: int) -> int | None:
    return next((one for one in times if one >= since), None)


# ---- distributed autograd


def contexts(recording: RemoteRowSource, cell: int | None = None) -> list[AutogradContext]:
    """Return the result of `Recording.contexts`."""
    rows = recording.rows("context")
    events: dict[int, list[Any]] = {}
    for row in rows[rows["start_ns"].argsort(kind="stable")]:
        events.setdefault(int(row["context"]), []).append(row)
    found = [_context(recording, number, its) for number, its in events.items()]
    return [one for one in found if cell in (None, one.cell)]


def _context(recording: RemoteRowSource, number: int, events: list[Any]) -> AutogradContext:
    kinds: dict[int, list[Any]] = {}
    for row in events:
        kinds.setdefault(int(row["event"]), []).append(row)
    whole, backward = (next(iter(kinds.get(kind, ())), None) for kind in (_CONTEXT, _BACKWARD))
    opened = next((one for one in (whole, backward) if one is not None), events[0])
    passed: dict[int, int] = {}  # time of the gradients, by message
    for row in kinds.get(_GRADIENT, ()):
        passed.setdefault(int(row["message"]), int(row["start_ns"]))
    return AutogradContext(
        id=number,
        rank=int(opened["rank"]),
        cell=int(opened["cell"]),
        began_ns=int(opened["start_ns"] if whole is not None else events[0]["start_ns"]),
        ended_ns=None if whole is None else int(whole["end_ns"]),
        backward_began_ns=None if backward is None else int(backward["start_ns"]),
        backward_ended_ns=None if backward is None else int(backward["end_ns"]),
        pairs=tuple(
            MessagePair(
                message=int(row["message"]),
                call=int(row["call"]) or None,
                src=int(row["src"]),
                dst=int(row["dst"]),
                nbytes=_known(row["nbytes"]),
                forward_ns=int(row["start_ns"]),
                backward_ns=passed.get(int(row["message"])),
            )
            for row in kinds.get(_PAIR, ())
        ),
        steps=tuple(
            OptimizerStep(
                rank=int(row["rank"]),
                name=recording.text(int(row["name"])),
                began_ns=int(row["start_ns"]),
                ended_ns=int(row["end_ns"]),
            )
            for row in kinds.get(_STEP, ())
        ),
    )
