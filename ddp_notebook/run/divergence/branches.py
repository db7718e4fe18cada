"""The branch, the caught exception or the conditions that separate ranks."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from ddp_notebook.records.words import list_ranks
from ddp_notebook.run.divergence.control_flow import Node
from ddp_notebook.run.divergence.diverging_paths import DivergingPaths, without
from ddp_notebook.run.divergence.loops import passes_have_events
from ddp_notebook.run.divergence.paths import END, Event

_MOST_TEXT = 60  # characters of a condition


def branch(diverging: DivergingPaths) -> str:
    """Describe the branch that every rank has passed, and that separates them."""
    around = [loop for loop, _ in diverging.loops_around()]
    for at in diverging.decisions:
        if isinstance(at, Node) and at not in around and (labels := _labels(diverging, at)) is not None:
            by_label: dict[int, list[int]] = {}
            for number, label in enumerate(labels):
                by_label.setdefault(label, []).extend(diverging.sets[number][1])
            if len(by_label) > 1 and _is_recursive(diverging, at):
                return ""  # ranks may have passed it in earlier calls too
            if len(by_label) > 1:
                return _words(diverging, at, {label: sorted(ranks) for label, ranks in sorted(by_label.items())})
    return ""


def _is_recursive(diverging: DivergingPaths, at: Node) -> bool:
    """Return whether a branch is in a function that has called itself."""
    states = [state for state in diverging.graph.edges if state.node is at]
    return any([node.name for node in state.stack].count(at.function) > 1 for state in states)


def _labels(diverging: DivergingPaths, at: Node) -> list[int] | None:
    """Return the branch that leads to the next event of each set; None if it is not the only one of a set."""
    graph = diverging.graph
    if graph.reached(graph.starts, without(at)):
        return None
    found: list[set[int]] = [set() for _ in diverging.sets]
    for label, states in graph.targets(at).items():
        for number in graph.reached(states, without(at)):
            found[number].add(label)
    return [labels.pop() for labels in found] if all(len(labels) == 1 for labels in found) else None


def _words(diverging: DivergingPaths, at: Node, by_label: Mapping[int, list[int]]) -> str:
    tree, place = at.tree, _place(at)
    ranks_at = {label: list_ranks(ranks) for label, ranks in by_label.items()}
    if isinstance(tree, ast.If):
        return _if_words(diverging, at, tree, by_label, ranks_at)
    if isinstance(tree, ast.Match):
        cases = [
            f"{ranks} {_case(tree.cases[label]) if label < len(tree.cases) else 'no case'}"
            for label, ranks in ranks_at.items()
        ]
        return f"{place}: {cases[0].replace(' `', ' took `', 1)}, {', '.join(cases[1:])}"
    if isinstance(tree, ast.IfExp):
        parts = [f"{r} ran `{_short(ast.unparse((tree.body, tree.orelse)[n]))}`" for n, r in ranks_at.items()]
        return f"{place}: {', '.join(parts)}"
    if isinstance(tree, ast.BoolOp):
        return f"{place}: {ranks_at[0]} ran `{_short(at.name)}`, {ranks_at[1]} did not"
    if at.kind == "loop":
        inside = "in the loop" if isinstance(tree, ast.stmt) else "in the comprehension"
        if passes_have_events(diverging, at):
            is_one = len(by_label[0]) == 1
            loop = inside.removeprefix("in ")
            return (
                f"{place}: {ranks_at[1]} made no pass of {loop}, {ranks_at[0]} {'is' if is_one else 'are'} in the 1st"
            )
        event = next(one for one, ranks in diverging.sets if ranks[0] in by_label[0])
        if event == END:
            return ""
        return f"{place}: {ranks_at[0]} reached {event.place} {inside}, {ranks_at[1]} did not"
    test = ast.unparse(tree) if tree is not None else ""  # the condition of a comprehension
    return f"{place}: `{_short(test)}` was true on {ranks_at[0]} and not on {ranks_at[1]}"


def _if_words(
    diverging: DivergingPaths, at: Node, tree: ast.If, by_label: Mapping[int, list[int]], ranks_at: Mapping[int, str]
) -> str:
    tests = [tree]
    while len(tests) < len(at.edges) - 1:
        following = tests[-1].orelse[0]
        assert isinstance(following, ast.If)
        tests.append(following)
    if early := _early_return(diverging, at, [*(test.body for test in tests), tests[-1].orelse], by_label):
        return early
    parts: list[str] = []
    for label, ranks in ranks_at.items():
        took = " took" if not parts else ""
        if label < len(tests):
            word = "elif" if label else "if"
            line = f" (line {tests[label].lineno})" if label else ""
            parts.append(f"{ranks}{took} `{word} {_short(ast.unparse(tests[label].test))}:`{line}")
        elif tests[-1].orelse:
            parts.append(f"{ranks}{took} its `else`")
        else:
            parts.append(f"{ranks} did not" if len(tests) == 1 else f"{ranks} took none of its branches")
    return f"{_place(at)}: {', '.join(parts)}"


def _early_return(
    diverging: DivergingPaths, at: Node, bodies: Sequence[Sequence[ast.stmt]], by_label: Mapping[int, list[int]]
) -> str:
    """Describe a branch in which some ranks returned from a function, if they did nothing else."""
    returning = [label for label in by_label if bodies[label] and isinstance(bodies[label][-1], ast.Return)]
    calls = {state.stack[-1] for state in diverging.graph.edges if state.node is at and state.stack}
    if len(returning) != 1 or len(by_label) != 2 or not at.function or len(calls) != 1:
        return ""
    label = returning[0]
    if any(_is_in(event, at.source, bodies[label]) for event, _ in diverging.sets):
        return ""
    returned = Event(at.source, bodies[label][-1].lineno)
    call = calls.pop()
    line = f"line {call.line}" if call.source == at.source else Event(call.source, call.line).place
    return f"{returned.place}: {list_ranks(by_label[label])} returned early from `{at.function}` ({line})"


def exception(diverging: DivergingPaths) -> str:
    """Describe the exception that some ranks have caught, and that separates them."""
    graph = diverging.graph
    for at in diverging.decisions:
        if not isinstance(at, ast.Try):
            continue
        uncaught = graph.reached(graph.starts, without(at))
        targets = graph.targets(at)
        caught = {number for states in targets.values() for number in graph.reached(states, without(at))}
        if len(targets) == 1 and uncaught and caught and not uncaught & caught and uncaught | caught == diverging.all:
            [(label, states)] = targets.items()
            handler = at.handlers[-1 - label]
            kind = "" if handler.type is None else f" {_short(ast.unparse(handler.type))}"
            place = Event(states[0].node.source, at.lineno).place
            ran, others = list_ranks(diverging.ranks(caught)), list_ranks(diverging.ranks(uncaught))
            return f"{place}: {ran} ran `except{kind}:` (line {handler.lineno}), {others} did not"
    return ""


def conditions(diverging: DivergingPaths) -> str:
    """Describe the conditions through which some ranks reached a line that the others did not reach."""
    found = [_conditions_of(diverging, number) for number in sorted(diverging.all)]
    known = [number for number, conditions in enumerate(found) if conditions]
    if len(diverging.sets) != 2 or len(known) != 1 or (event := diverging.sets[known[0]][0]) == END:
        return ""
    through = " and ".join(found[known[0]])
    ranks, others = (list_ranks(diverging.sets[n][1]) for n in (known[0], 1 - known[0]))
    return f"{ranks} reached {event.place} through {through}, {others} did not"


def _conditions_of(diverging: DivergingPaths, number: int) -> list[str]:
    """Return the conditions that every path to the next event of a set has passed, with their lines."""
    graph, found = diverging.graph, []
    for at in diverging.decisions:
        if not isinstance(at, Node) or not isinstance(at.tree, ast.If) or len(at.edges) != 2:
            continue
        if number in graph.reached(graph.starts, without(at)) or _is_recursive(diverging, at):
            continue
        targets = graph.targets(at)
        if [label for label, then in targets.items() if number in graph.reached(then, without(at))] == [0]:
            found.append(f"`if {_short(ast.unparse(at.tree.test))}:` (line {at.line})")
    return found


def _is_in(event: Event, source: str, body: Sequence[ast.stmt]) -> bool:
    return event.source == source and body[0].lineno <= event.line <= (body[-1].end_lineno or body[-1].lineno)


def _place(at: Node) -> str:
    return Event(at.source, at.line).place


def _case(case: ast.match_case) -> str:
    guard = "" if case.guard is None else f" if {ast.unparse(case.guard)}"
    return f"`{_short(f'case {ast.unparse(case.pattern)}{guard}')}:` (line {case.pattern.lineno})"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 3] + "..."
