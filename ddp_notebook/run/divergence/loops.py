"""The loop that some ranks have left, while the others are in a later pass of it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from ddp_notebook.records.words import list_ranks
from ddp_notebook.run.divergence.control_flow import Choice, Node, State
from ddp_notebook.run.divergence.diverging_paths import MOST_STATES, DivergingPaths, Removed, TooLargeError
from ddp_notebook.run.divergence.paths import Event

_MOST_RECENT = 100  # among these collectives one is found that a loop makes once per pass


def left_loop(diverging: DivergingPaths) -> str:
    """Describe the loop that some ranks have left, while the others are in a later pass; "" if there is none."""
    for at, stack in diverging.loops_around():
        if (loop := _left(diverging, at, stack)) is not None:
            return f"{Event(at.source, at.line).place}: " + _words(diverging, loop)
    return ""


def passes_have_events(diverging: DivergingPaths, at: Node) -> bool:
    """Return whether no pass of a loop can end without a collective."""
    firsts = diverging.graph.targets(at).get(0, [])
    return not any(state.node is at for state in diverging.graph.reachable(firsts))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loop:
    """A loop that some ranks have left.

    Attributes:
        at: the loop.
        stack: calls around it.
        is_inside: returns whether a state is in the loop.
        left, stay: ranks that have left it, and ranks that are in a later pass of it or of a loop inside.
        is_in_next_pass: the latter are in its next pass.
        may_run_again: it may have run more than once without another collective in between.
        may_leave_in_pass: the ranks may have begun one more pass before they left it.
    """

    at: Node
    stack: tuple[Node, ...]
    is_inside: Callable[[State], bool]
    left: list[int]
    stay: list[int]
    may_run_again: bool
    is_in_next_pass: bool
    may_leave_in_pass: bool


def _left(diverging: DivergingPaths, at: Node, stack: tuple[Node, ...]) -> _Loop | None:
    """Return the facts about a loop, if some ranks have left it, and the others have not.

    Args:
        stack: calls around it.
    """
    graph = diverging.graph

    def is_inside(state: State) -> bool:
        return state.node is at or any(at in node.loops for node in (*state.stack, state.node))

    def leaves(state: State, _: Choice | None, then: State) -> bool:
        return is_inside(state) and not is_inside(then)

    def starts_pass_of(loops: list[Node]) -> Removed:
        def removed(state: State, choice: Choice | None, then: State) -> bool:
            return leaves(state, choice, then) or (choice is not None and choice.at in loops and choice.label == 0)

        return removed

    if not all(map(is_inside, graph.starts)):
        return None
    stay = graph.reached(graph.starts, leaves)
    outside = [then for state, edges in graph.edges.items() for c, then in edges if leaves(state, c, then)]
    left = graph.reached(outside)
    if not stay or not left or stay & left or stay | left != diverging.all:
        return None
    if graph.reached(graph.starts, starts_pass_of([loop for loop, _ in diverging.loops_around()])):
        return None  # some ranks are in the same pass
    return _Loop(
        at=at,
        stack=stack,
        is_inside=is_inside,
        left=diverging.ranks(left),
        stay=diverging.ranks(stay),
        may_run_again=any(state.node is at for state in graph.reachable(outside)),
        is_in_next_pass=not graph.reached(graph.starts, starts_pass_of([at])),
        may_leave_in_pass=bool(graph.reached(graph.targets(at).get(0, [])) & left),
    )


def _words(diverging: DivergingPaths, loop: _Loop) -> str:
    """Describe a loop that ranks have left, with the number of passes if the recording has it."""
    name = "the loop" if isinstance(loop.at.tree, ast.stmt) else "the comprehension"
    left = f"{list_ranks(loop.left)} left {name}"
    stay = f"{list_ranks(loop.stay)} {'is' if len(loop.stay) == 1 else 'are'}"
    for event in dict.fromkeys(reversed(diverging.prefix[-_MOST_RECENT:])):
        node = next(iter(diverging.sites.of(event)), None)
        if node is None or node not in diverging.sites.certain:
            break
        if event.bucket < 0 and event.api not in ("", event.op):
            continue  # one call of it may make several collectives
        number = _trailing(diverging, event, loop)
        if not number:
            break
        is_next = loop.is_in_next_pass and not loop.may_run_again
        if is_next and _is_once_per_pass(diverging, loop.at, loop.stack, node):
            kind = "complete pass" if loop.may_leave_in_pass else "pass"
            return f"{left} after {number} {kind}{'es' * (number != 1)}, {stay} in the {_ordinal(number + 1)}"
        if event.bucket < 0 and all(one == event for one, ranks in diverging.sets if ranks[0] in loop.stay):
            runs = f"{event.place} had run {number} time{'s' * (number != 1)}"
            return f"{left} after {runs}, {stay} there for the {_ordinal(number + 1)} time"
    return f"{left}, {stay} still in it"


def _trailing(diverging: DivergingPaths, event: Event, loop: _Loop) -> int | None:
    """Return how often an event is among the last common events inside a loop; None if that is not certain."""
    number = 0
    for one, states in zip(reversed(diverging.prefix), reversed(diverging.states), strict=False):
        are_inside = {loop.is_inside(state) for state in states}
        if are_inside == {False}:
            return number
        if len(are_inside) != 1:
            return None
        number += one == event
    return number if diverging.has_start else None


def _is_once_per_pass(diverging: DivergingPaths, at: Node, stack: tuple[Node, ...], node: Node) -> bool:
    """Return whether each pass of a loop makes a call exactly once, unless it leaves the loop."""
    head = State(at, stack)
    first = State(at.edges[0][1], stack)
    if _reaches(diverging, first, head, without=node):
        return False
    seen, open_states = {first}, [first]
    while open_states:
        state = open_states.pop()
        for _, then in diverging.flow.following(state):
            if state.node is node and _reaches(diverging, then, node, without=at):
                return False
            if then not in seen and then != head:
                seen.add(then)
                open_states.append(then)
            if len(seen) > MOST_STATES:
                raise TooLargeError
    return True


def _reaches(diverging: DivergingPaths, start: State, target: State | Node, without: Node) -> bool:
    seen, open_states = {start}, [start]
    while open_states:
        state = open_states.pop()
        if target in (state, state.node):
            return True
        if state.node is without:
            continue
        for _, then in diverging.flow.following(state):  # exceptions too: a pass may end by one
            if then not in seen:
                seen.add(then)
                open_states.append(then)
        if len(seen) > MOST_STATES:
            raise TooLargeError
    return False


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
