"""The sentence about where the paths of ranks diverged.

The last common collective of the ranks is known, and the next one of each rank. The control flow between them shows
which decisions lead to which collective. A decision is reported only if every path passes it, and if each of its
branches leads to the collectives of one set of ranks. Otherwise there is no sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddp_notebook.records.words import group_by_value, list_ranks
from ddp_notebook.run.divergence.branches import branch, conditions, exception
from ddp_notebook.run.divergence.control_flow import ControlFlow
from ddp_notebook.run.divergence.diverging_paths import DivergingPaths, TooLargeError
from ddp_notebook.run.divergence.loops import left_loop
from ddp_notebook.run.divergence.paths import Event, Paths


def divergence(flow: ControlFlow, paths: Paths) -> str:
    """Return a sentence about where the paths of ranks diverged; "" if it is not certain.

    Args:
        flow: control flow of the cell.
        paths: collectives of the ranks.

    Example:
        >>> import ast
        >>> flow = ControlFlow({"": ast.parse("if rank == 0: all_reduce(t)\\nbarrier()")})
        >>> divergence(flow, Paths({0: [Event("", 1, "", "all_reduce")], 1: [Event("", 2, "", "barrier")]}))
        'line 1: rank 0 took `if rank == 0:`, rank 1 did not'
    """
    events = paths.events
    common = 0
    shortest = min(map(len, events.values()))
    first, *others = events.values()
    while common < shortest and all(path[common] == first[common] for path in others):
        common += 1
    if common == shortest:
        return ""
    prefix = first[:common]
    following = {rank: path[common] for rank, path in events.items()}
    try:
        diverging = DivergingPaths.of(flow, prefix, following, has_start=paths.has_start)
    except TooLargeError:
        return ""
    if diverging is None:
        return _two_functions(prefix, following)
    return left_loop(diverging) or branch(diverging) or exception(diverging) or conditions(diverging)


def _two_functions(prefix: Sequence[Event], following: Mapping[int, Event]) -> str:
    """Return a sentence for ranks that have called different functions, although the calls cannot be found."""
    by_function = group_by_value({rank: event.function for rank, event in following.items()})
    last = prefix[-1].function if prefix else ""
    if len(by_function) < 2 or last in by_function or not all(one and one[0] != "<" for one in by_function):
        return ""
    parts = [f"{list_ranks(ranks)} called `{one}` ({following[ranks[0]].place})" for one, ranks in by_function.items()]
    return ", ".join(parts)
