"""Sentences about RPC calls: callees, waiting callers, queues."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median

from ddp_notebook.observe.remote import RemoteCall
from ddp_notebook.observe.steps.steps import StepTable
from ddp_notebook.observe.tables.matching import RowSource
from ddp_notebook.observe.tables.rpc_rows import calls
from ddp_notebook.records.units import ms, percent

_QUEUES_NS = 1_000_000  # shorter waits before a call begins are transfer time
_MOST_LISTED = 4  # functions of calls that have not returned
_WAITS = ("rpc_sync", "to_here")  # kinds of calls whose caller waits


def served(recording: RowSource, cell: int | None, steps: StepTable | None = None) -> tuple[str, ...]:
    """Return sentences about remote calls, without their full stops. Return () if there were no calls.

    Args:
        recording: the recorded tables.
        cell: number of a cell; None: all cells.
        steps: steps of the cell, to compare the time of calls with; None: there are none.
    """
    found = calls(recording, cell)
    by_callee: defaultdict[int, list[RemoteCall]] = defaultdict(list)
    by_caller: defaultdict[int, list[RemoteCall]] = defaultdict(list)
    for call in found:
        by_callee[call.dst].append(call)
        by_caller[call.src].append(call)
    notes = []
    answered = [(rank, [call for call in own if not call.is_open]) for rank, own in sorted(by_callee.items())]
    if serves := [_serves(rank, own, steps) for rank, own in answered if own]:
        notes.append(f"Remote calls: {', '.join(serves)}")
    waits = [(rank, _waited_ns(own)) for rank, own in sorted(by_caller.items())]
    if told := [f"rank {rank} {ms(waited_ns)}" for rank, waited_ns in waits if waited_ns]:
        notes.append(f"Waited for answers: {', '.join(told)}")
    if calls_open := [call for call in found if call.is_open]:
        notes.append(_open(calls_open))
    for rank, own in sorted(by_callee.items()):
        queued = [call.queued_ns for call in own if call.queued_ns is not None]
        ran = [call.running_ns for call in own if call.running_ns is not None]
        if queued and ran and (before := median(queued)) > _QUEUES_NS and before > median(ran):
            notes.append(
                f"Calls queue at rank {rank}: half of them begin {ms(before)} or more after they were sent, and the "
                f"median run time is {ms(median(ran))}. Make fewer and larger calls, or answer several at once "
                "(rpc.functions.async_execution)"
            )
    return tuple(notes)


def _open(own: Sequence[RemoteCall]) -> str:
    counted = Counter(f"{call.function} from rank {call.src} to rank {call.dst}" for call in own)
    listed = [f"{words} ({count} times)" if count > 1 else words for words, count in counted.most_common(_MOST_LISTED)]
    if (more := len(counted) - len(listed)) > 0:
        listed.append(f"{more} other{'s' * (more > 1)}")
    return f"Not returned when this report was made: {', '.join(listed)}"


def _serves(rank: int, own: Sequence[RemoteCall], steps: StepTable | None) -> str:
    ran_ns = sum(call.running_ns or 0 for call in own)
    count = f"{len(own)} call{'s' * (len(own) != 1)}"
    text = f"rank {rank} served {count} ({ms(ran_ns)} in their functions"
    if steps is not None and len(steps):
        begin_ns, end_ns = int(steps.start_ns.min()), int(steps.end_ns.max())
        text += (
            f", {percent(_executing_ns(own, begin_ns, end_ns) / max(end_ns - begin_ns, 1))} of the time of the steps"
        )
    return f"{text})"


def _executing_ns(own: Sequence[RemoteCall], begin_ns: int, end_ns: int) -> int:
    """Return the time between begin and end in which at least one of the calls was executed."""
    executed = sorted(
        (one.begun_ns, one.ended_ns) for one in own if one.begun_ns is not None and one.ended_ns is not None
    )
    total_ns, until_ns = 0, begin_ns
    for begun_ns, ended_ns in executed:
        ended_ns = min(ended_ns, end_ns)
        total_ns += max(0, ended_ns - max(begun_ns, until_ns))
        until_ns = max(until_ns, ended_ns)
    return total_ns


def _waited_ns(own: Sequence[RemoteCall]) -> int:
    """Return the time in which at least one thread of a rank waited."""
    waited_ns = until_ns = 0
    for call in own:  # ordered by the time when they were sent
        if call.kind in _WAITS and call.returned_ns is not None and call.returned_ns > until_ns:
            waited_ns += call.returned_ns - max(until_ns, call.sent_ns)
            until_ns = call.returned_ns
    return waited_ns
