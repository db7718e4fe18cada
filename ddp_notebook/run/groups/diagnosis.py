"""Diagnose a hang: the operations of the ranks, the blocked ranks, and the cause in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ddp_notebook.records.names import readable
from ddp_notebook.records.operation import Operation
from ddp_notebook.records.threads import advice
from ddp_notebook.records.words import group_by_value, list_ranks
from ddp_notebook.run.groups.rank_view import NOTHING_REMOTE, RankView, Views
from ddp_notebook.run.groups.reasons import in_stores, is_on_its_way, loop_facts, missing_message

_SOON_S = 60.0  # an operation whose own limit ends it this soon is not ended by the notebook


class Absences:
    """The ranks that each waiting rank waits for.

    The set of a collective is the same for all of its waiting ranks, and is computed once. Otherwise the cost would be
    quadratic in the number of ranks.

    Args:
        views: activity of all ranks.

    Example:
        >>> call = Operation(name="barrier", number=1, group="default", ranks=(0, 1, 2))
        >>> views = {r: RankView(rank=r, state="waiting", operation=call) for r in (0, 1)}
        >>> sorted(Absences(views)[1])
        [2]
    """

    def __init__(self, views: Views) -> None:
        self._views = views
        self._of_collective: dict[tuple[tuple[int, ...], str, int, str], frozenset[int]] = {}

    def __getitem__(self, rank: int) -> frozenset[int]:
        operation = self._views[rank].operation
        assert operation is not None
        if operation.is_point_to_point:
            others = set(operation.ranks) - {rank} if operation.root is None else {operation.root}
            absent = frozenset(other for other in others if not _answers(self._views, other, rank, operation))
            is_any_enough = operation.root is None and absent != others
            return frozenset() if is_any_enough else absent
        # Ranks and name of the group: all groups of one mesh dimension have the same title, and so may other groups.
        key = operation.ranks, f"{operation.group} {operation.key}", operation.number, operation.name
        found = self._of_collective.get(key)
        if found is None:
            not_in_it = (other for other in operation.ranks if not _takes_part(self._views, other, operation))
            found = self._of_collective[key] = frozenset(not_in_it)
        return found


def stuck(views: Views) -> dict[int, tuple[str, int]]:
    """Return the ranks that are blocked whatever the running ranks do, and the operation in which each waits.

    A waiting rank is stuck if a rank that it needs has ended the cell, is dead, or is stuck itself. First assume that
    all waiting ranks are stuck. Then remove ranks that need no stuck or absent rank, until nothing changes.
    """
    gone = {rank for rank, view in views.items() if view.state in ("failed", "outside", "died") or _cannot_act(view)}
    held = {rank: view.operation for rank, view in views.items() if view.operation and view.state == "waiting"}
    absences = Absences(views)
    needed = {rank: absences[rank] for rank in held}
    while True:
        unable = gone | held.keys()
        hold = {absent: not absent.isdisjoint(unable) for absent in set(needed.values())}
        free = [rank for rank, operation in held.items() if not _is_held(operation, needed[rank], unable, hold)]
        if not free:
            return {rank: (operation.group, operation.number) for rank, operation in held.items()}
        for rank in free:
            del held[rank]


def _is_held(
    operation: Operation, needed: frozenset[int], unable: set[int], hold: Mapping[frozenset[int], bool]
) -> bool:
    if operation.name == "recv" and operation.root is None:  # a recv from any rank needs only one of them
        return bool(needed) and needed <= unable
    return hold[needed]


def _cannot_act(view: RankView) -> bool:
    """Return whether a rank has ended the cell and starts no more operations in it."""
    return view.state == "ended" and not (view.background or view.remote.serves)


class LeftBehind(NamedTuple):
    """A rank that waits for ranks which have ended the cell."""

    waits_in: str  # "all_reduce #3 of group default"
    may_end: bool  # False: the wait may end by itself, or by another program


def left_behind(views: Views) -> dict[int, LeftBehind]:
    """Return the ranks that can only wait, because a rank that they need has ended the cell, directly or indirectly.

    A message that is on its way counts as arrived. A rank that has ended the cell may still act by its threads, or if
    another rank calls its functions.
    """
    ended = {rank for rank, view in views.items() if view.is_heard and _cannot_act(view)}
    blocked = _blocked(views, ended)
    if blocked and any(_can_call(view) for rank, view in views.items() if rank not in blocked):
        ended = {rank for rank in ended if not views[rank].may_serve}
        blocked = _blocked(views, ended)
    return blocked


def _can_call(view: RankView) -> bool:
    return view.state not in ("ended", "outside", "died")


def _blocked(views: Views, ended: set[int]) -> dict[int, LeftBehind]:
    absences, blocked = Absences(views), dict[int, LeftBehind]()
    if not ended:
        return blocked
    while True:
        unable = ended | blocked.keys()
        found = {rank: left for rank in views.keys() - unable if (left := _left(views, rank, absences, unable))}
        if not found:
            return blocked
        blocked |= found


def _left(views: Views, rank: int, absences: Absences, unable: set[int]) -> LeftBehind | None:
    view = views[rank]
    if (store := view.store) is not None and view.state == "running":
        others = {other for other, one in views.items() if other != rank and one.state != "died"}
        return LeftBehind(str(store), store.is_of_session) if others and others <= unable else None
    if (operation := view.operation) is None or view.state != "waiting" or not operation.is_awaited:
        return None
    needed = absences[rank]
    takes_any = operation.name == "recv" and operation.root is None
    if not (bool(needed) and needed <= unable if takes_any else not needed.isdisjoint(unable)):
        return None
    is_over_soon = operation.limit_s is not None and operation.limit_s - operation.since_s < _SOON_S
    return LeftBehind(str(operation), not is_over_soon)


def _takes_part(views: Views, other: int, operation: Operation) -> bool:
    theirs = views[other].operation if other in views else None
    is_elsewhere = theirs is None or theirs.is_point_to_point or theirs.group != operation.group
    if theirs is None or is_elsewhere or _is_of_another_group(views[other], operation):
        counts = views[other].counts.get(operation.key) if other in views else None
        return counts is not None and counts["collective"] >= operation.number  # it has completed or started this one
    if theirs.number > operation.number:  # it has completed this one
        return True
    return theirs.number == operation.number and theirs.name == operation.name


def _is_of_another_group(view: RankView, operation: Operation) -> bool:
    """Return whether a rank waits in another group than an operation, although both groups have the same title."""
    theirs = view.operation
    return theirs is not None and theirs.key != operation.key and operation.key in view.counts


def _answers(views: Views, other: int, rank: int, operation: Operation) -> bool:
    theirs = views[other].operation if other in views else None
    wanted = "send" if operation.name == "recv" else "recv"
    if theirs is not None and theirs.name == wanted and theirs.root in (rank, None) and theirs.tag == operation.tag:
        return True
    return other in views and is_on_its_way(views, other, rank, operation)


def verdict(views: Views) -> str:
    """Return the cause of a hang as one sentence, or `""` if it is not certain.

    Example:
        >>> names = ["all_reduce", "all_reduce", "broadcast"]
        >>> calls = [Operation(name=name, number=5, group="default", ranks=(0, 1, 2)) for name in names]
        >>> verdict({r: RankView(rank=r, state="waiting", operation=call) for r, call in enumerate(calls)})
        'rank 2 is in broadcast #5, the others in all_reduce #5 of group default'
    """
    waiting = {rank: view.operation for rank, view in views.items() if view.operation is not None}
    if not waiting:
        return _in_calls(views) or _silent(views) or in_stores(views) or _in_children(views)
    for find in (
        _gone,
        _other_groups,
        _mismatch,
        _different_tensors,
        _failed,
        _ended,
        _outside,
        _each_other,
        _not_arrived,
    ):
        if sentence := find(views, waiting):
            return sentence + _in_threads(waiting, "; ")
    return in_stores(views) or _in_threads(waiting)


Waiting = Mapping[int, Operation]


def _in_threads(waiting: Waiting, start: str = "") -> str:
    """Describe threads that have used one group at the same time; "" if there are none.

    Args:
        start: text before the sentence.
    """
    found = group_by_value({rank: (op.group, op.threads) for rank, op in waiting.items() if op.threads})
    for (group, threads), ranks in found.items():
        return (
            f"{start}{threads} of {list_ranks(ranks)} use group {readable(group)} at the same time, and may start its "
            f"collectives in another order on each rank: {advice(threads)}"
        )
    return ""


def _awaited(views: Views, waiting: Waiting, states: set[str]) -> tuple[list[int], list[int], Operation | None]:
    """Return the awaited ranks in these states, the ranks that wait for them, and the operation of the first waiter."""
    absences = Absences(views)
    in_states = {rank for rank, view in views.items() if view.state in states}
    missing: set[int] = set()
    looked_at: dict[frozenset[int], bool] = {}  # True if the set contains a rank in these states
    waiters = []
    for rank in waiting:
        absent = absences[rank]
        if absent not in looked_at:
            looked_at[absent] = not absent.isdisjoint(in_states)
            missing |= absent & in_states
        if looked_at[absent]:
            waiters.append(rank)
    return sorted(missing), waiters, waiting[waiters[0]] if waiters else None


def _gone(views: Views, waiting: Waiting) -> str:
    missing, waiters, operation = _awaited(views, waiting, {"died"})
    if operation is None:
        return ""
    how = "; ".join(views[rank].place for rank in missing)
    return f"{list_ranks(missing)} {_is(missing)} gone ({how}), and {list_ranks(waiters)} {_wait(waiters)} for it"


def _other_groups(views: Views, waiting: Waiting) -> str:
    """Describe two groups of the same ranks, in which ranks wait for each other."""
    for ranks, group in {(op.ranks, op.group) for op in waiting.values() if not op.is_point_to_point}:
        there = {r: op for r, op in waiting.items() if (op.ranks, op.group) == (ranks, group)}
        first = min(there)
        others = [r for r in there if r != first and _is_of_another_group(views[r], there[first])]
        if others and not any(
            _takes_part(views, r, there[first]) or _takes_part(views, first, there[r]) for r in others
        ):
            return (
                f"rank {first} is in {there[first].short} of one group {readable(group)}, {list_ranks(others)} "
                f"{_is(others)} in {there[others[0]].short} of another group of the same ranks: use the groups in the "
                "same order on all ranks"
            )
    return ""


def _mismatch(views: Views, waiting: Waiting) -> str:
    for group in {op.group for op in waiting.values()}:
        there = {r: op for r, op in waiting.items() if op.group == group and not op.is_point_to_point}
        first = min((op.number for op in there.values()), default=0)
        names = {rank: op.short for rank, op in there.items() if op.number == first}
        if len(set(names.values())) > 1:
            return f"{_odd_ones(names)} of group {readable(group)}"
    return ""


def _odd_ones(names: Mapping[int, str]) -> str:
    """Return `"rank 2 is in broadcast #5, the others in all_reduce #5"`, the smaller sets first."""
    sets = sorted(group_by_value(names).items(), key=lambda item: len(item[1]))
    parts = [f"{list_ranks(ranks)} {_is(ranks)} in {name}" for name, ranks in sets]
    if len(sets) == 2 and len(sets[1][1]) > len(sets[0][1]):
        parts[1] = f"the others in {sets[1][0]}"
    return ", ".join(parts)


def _different_tensors(_: Views, waiting: Waiting) -> str:
    uneven = ("all_to_all", "all_to_all_single")
    for key in {(op.group, op.number, op.name) for op in waiting.values()}:
        there = {
            r: op.what for r, op in waiting.items() if (op.group, op.number, op.name) == key and key[2] not in uneven
        }
        if len(set(there.values())) > 1:
            sets = sorted(group_by_value(there).items(), key=lambda item: len(item[1]))
            parts = [f"{what} on {list_ranks(ranks)}" for what, ranks in sets]
            return f"{key[2]} #{key[1]} of group {readable(key[0])} has {', '.join(parts)}"
    return ""


def _failed(views: Views, waiting: Waiting) -> str:
    missing, waiters, operation = _awaited(views, waiting, {"failed"})
    if operation is None:
        return ""
    errors = group_by_value({rank: views[rank].place for rank in missing})
    told = ", ".join(f"{list_ranks(ranks)} {_has(ranks)} failed ({error})" for error, ranks in errors.items())
    return f"{told}, and {list_ranks(waiters)} {_wait(waiters)} in {operation.short}"


def _ended(views: Views, waiting: Waiting) -> str:
    missing, waiters, operation = _awaited(views, waiting, {"ended"})
    if operation is None:
        return ""
    what = missing_message(views, missing, waiters[0], operation) if operation.is_point_to_point else "it"
    cause = f"{list_ranks(missing)} {_has(missing)} ended the {views[missing[0]].runs} without {what}"
    if background := [rank for rank in missing if views[rank].background]:
        cause += f" ({views[background[0]].background} goes on)"
    told = f"{list_ranks(waiters)} {_wait(waiters)} in {operation.short}, and {cause}"
    return told if operation.is_point_to_point else told + loop_facts(views, missing, waiters, operation)


def _outside(views: Views, waiting: Waiting) -> str:
    missing, waiters, operation = _awaited(views, waiting, {"outside"})
    if operation is None:
        return ""
    who_waits = f"{list_ranks(waiters)} {_wait(waiters)} for it in {operation}"
    if views[missing[0]].runs == "script":
        return f"{list_ranks(missing)} {_is(missing)} not seen from here, and {who_waits}"
    return f"{list_ranks(missing)} {'does' if len(missing) == 1 else 'do'} not run this cell, and {who_waits}"


def _each_other(views: Views, waiting: Waiting) -> str:
    held, absences = stuck(views), Absences(views)
    if not held:
        return ""
    parts = []
    for rank in sorted(held)[:4]:
        others = sorted(absences[rank] & held.keys())
        whom = "" if waiting[rank].is_point_to_point else f" for {list_ranks(others)}"
        parts.append(f"rank {rank} in {waiting[rank]}{whom}")
    more = f" and {len(held) - 4} more" if len(held) > 4 else ""
    return "they wait for each other: " + ", ".join(parts) + more


def _in_calls(views: Views) -> str:
    """Describe the rank that has waited longest for a remote call. Used if no rank waits in an operation."""
    rank = max(views, key=lambda one: views[one].remote.since_s, default=0)
    if rank not in views or not (remote := views[rank].remote).function:
        return ""
    callee = views.get(remote.callee)
    does = NOTHING_REMOTE if callee is None else callee.remote
    return f"rank {rank} {remote.why(does, is_silent=callee is not None and callee.state == 'silent')}"


def _silent(views: Views) -> str:
    silent = [rank for rank, view in views.items() if view.state == "silent"]
    acts = group_by_value({rank: views[rank].doing for rank in silent})
    return ", ".join(f"{list_with_host(views, ranks)}: {act}" for act, ranks in acts.items())


def _in_children(views: Views) -> str:
    """Describe the ranks that wait for child processes, which may be working."""
    ranks = group_by_value({rank: view.child for rank, view in views.items() if view.child_s})
    parts = [
        f"{list_ranks(those)} {_wait(those)} for {'a child process' if len(those) == 1 else 'child processes'}"
        + (f" ({command})" if command else "")
        for command, those in ranks.items()
    ]
    return ", ".join(parts)


def only_wait_for_children(views: Views) -> bool:
    """Return whether ranks wait for child processes, and none waits for another rank or is unresponsive.

    Example:
        >>> only_wait_for_children({0: RankView(rank=0, state="running", child="sleep 60", child_s=12.0)})
        True
    """
    is_any = any(view.child_s for view in views.values())
    return is_any and not any(view.since_s or view.state == "silent" for view in views.values())


def _not_arrived(views: Views, waiting: Waiting) -> str:
    missing, _, operation = _awaited(views, waiting, {"running", "internal", "silent"})
    if operation is None:
        return ""
    acts = group_by_value({rank: views[rank].doing for rank in missing})
    parts = [
        f"{list_with_host(views, ranks)} {_is(ranks)} {act}"  # "rank 2 is at cell line 7"
        if views[ranks[0]].state in ("running", "internal")
        else f"{list_with_host(views, ranks)}: {act}"
        for act, ranks in acts.items()
    ]
    return f"not arrived at {operation.short}: " + ", ".join(parts)


def list_with_host(views: Views, ranks: Sequence[int]) -> str:
    """Return the ranks as text, with their host if they share one and the session has several.

    Example:
        >>> views = {r: RankView(rank=r, state="ended", host=host) for r, host in enumerate(["gpu1", "gpu1", "gpu2"])}
        >>> list_with_host(views, [0, 1]), list_with_host(views, [1, 2])
        ('ranks 0,1 on gpu1', 'ranks 1,2')
    """
    theirs = {views[rank].host if rank in views else "" for rank in ranks}
    host = theirs.pop() if len(theirs) == 1 else ""
    return list_ranks(ranks) + (f" on {host}" if host else "")


def by_what_they_do(views: Views, describe: Callable[[RankView], str]) -> list[tuple[list[int], str]]:
    """Group ranks with the same description of their activity."""
    return [(ranks, text) for text, ranks in group_by_value({r: describe(view) for r, view in views.items()}).items()]


def _is(ranks: list[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _has(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _wait(ranks: list[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"
