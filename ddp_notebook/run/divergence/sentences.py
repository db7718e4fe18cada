"""The sentence about where the paths of ranks diverged.

The last common collective of the ranks is known, and the next one of each rank. The control flow between them shows
which decisions lead to which collective. A decision is reported only if every path passes it, and if each of its
branches leads to the collectives of one set of ranks. Otherwise nothing is said.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ddp_notebook.records.words import group_by_value, list_ranks
from ddp_notebook.run.divergence.control_flow import Choice, ControlFlow, Node, State
from ddp_notebook.run.divergence.paths import END, Event, Paths

_MOST_STATES = 20_000
_MOST_EVENTS = 20_000  # common collectives that are followed, the last ones
_MOST_RECENT = 100  # among these a collective is found that a loop makes once per pass
_MOST_TEXT = 60  # characters of a condition

Removed = Callable[[State, Choice | None, State], bool]


def divergence(flow: ControlFlow, paths: Paths) -> str:
    """Return a sentence about where the paths of ranks diverged; "" if it is not certain.

    Args:
        flow: control flow of the cell.
        paths: collectives of the ranks.

    Example:
        >>> flow = ControlFlow({"": ast.parse("if rank == 0: all_reduce(t)\\nbarrier()")})
        >>> divergence(flow, Paths({0: [Event("", 1, "", "all_reduce")], 1: [Event("", 2, "", "barrier")]}))
        'line 1: rank 0 took `if rank == 0:`, rank 1 did not'
    """
    events = paths.events
    common = 0
    shortest = min(map(len, events.values()))
    while common < shortest and len({path[common] for path in events.values()}) == 1:
        common += 1
    if common == shortest:
        return ""
    prefix = next(iter(events.values()))[:common]
    following = {rank: path[common] for rank, path in events.items()}
    try:
        parting = _Parting.of(flow, prefix, following, has_start=paths.has_start)
    except _TooLargeError:
        return ""
    if parting is None:
        return _two_functions(prefix, following)
    return parting.left_loop() or parting.branch() or parting.exception() or parting.conditions()


def _two_functions(prefix: Sequence[Event], following: Mapping[int, Event]) -> str:
    """Return a sentence for ranks that have called different functions, although the calls cannot be found."""
    by_function = group_by_value({rank: event.function for rank, event in following.items()})
    last = prefix[-1].function if prefix else ""
    if len(by_function) < 2 or last in by_function or not all(one and one[0] != "<" for one in by_function):
        return ""
    parts = [f"{list_ranks(ranks)} called `{one}` ({following[ranks[0]].place})" for one, ranks in by_function.items()]
    return ", ".join(parts)


class _TooLargeError(Exception):
    """The control flow has too many states."""


@dataclass(slots=True)
class _Graph:
    """States that ranks may have passed since their last common collective."""

    starts: list[State]
    edges: dict[State, list[tuple[Choice | None, State]]] = field(default_factory=dict)
    ends: dict[State, set[int]] = field(default_factory=dict)  # numbers of the sets of ranks whose next event is here

    def reached(self, starts: Iterable[State], removed: Removed = lambda *_: False) -> set[int]:
        """Return the numbers of the sets whose next event can be reached."""
        seen, found = set(starts), set()
        open_states = list(seen)
        while open_states:
            state = open_states.pop()
            found |= self.ends.get(state, set())
            for choice, then in self.edges.get(state, ()):
                if then not in seen and not removed(state, choice, then):
                    seen.add(then)
                    open_states.append(then)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoopFacts:
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


class _Sites:
    """The calls of the code that belong to events."""

    def __init__(self, flow: ControlFlow, events: Iterable[Event]) -> None:
        self._calls: dict[tuple[str, int], list[Node]] = {}
        for node in flow.nodes:
            if node.kind == "call":
                self._calls.setdefault((node.source, node.line), []).append(node)
        self.certain = {nodes[0] for event in set(events) if len(nodes := self.of(event)) == 1}

    def of(self, event: Event) -> list[Node]:
        """Return the calls that may be this event."""
        calls = self._calls.get((event.source, event.line), [])
        return [one for one in calls if one.name in (event.api, event.op)] or [one for one in calls if not one.callees]


class _Parting:
    """The control flow from the last common collective to the next one of each rank.

    Args:
        graph: the states between them.
        sets: sets of ranks with the same next event, by their number.
        prefix: the common collectives.
        states: states in which each of the last common collectives may have happened.
        has_start: the first event of `prefix` is the first one of the cell.
    """

    def __init__(
        self,
        flow: ControlFlow,
        sites: _Sites,
        graph: _Graph,
        sets: Sequence[tuple[Event, list[int]]],
        prefix: Sequence[Event],
        states: Sequence[Sequence[State]],
        *,
        has_start: bool,
    ) -> None:
        self._has_start = has_start
        self._flow = flow
        self._sites = sites
        self._graph = graph
        self._sets = sets
        self._prefix = prefix
        self._states = states
        self._last = states[-1] if states else []
        self._all = set(range(len(sets)))
        order: dict[int, Node | ast.Try] = {}
        for edges in graph.edges.values():
            for choice, _ in edges:
                if choice is not None:
                    order.setdefault(id(choice.at), choice.at)
        self._decisions = list(order.values())  # in the order in which paths reach them

    @classmethod
    def of(
        cls, flow: ControlFlow, prefix: Sequence[Event], following: Mapping[int, Event], *, has_start: bool
    ) -> _Parting | None:
        """Return the parting of ranks; None if the code does not explain their paths.

        Args:
            prefix: common events.
            following: the next event of each rank.
            has_start: the first event of `prefix` is the first one of the cell.
        """
        sites = _Sites(flow, [*prefix, *following.values()])
        sets = list(group_by_value(following).items())
        places = [set(sites.of(event)) for event, _ in sets if event != END]
        if any(one & other for n, one in enumerate(places) for other in places[:n]):
            return None
        states = _states_of(flow, sites, prefix, has_start=has_start) if prefix else []
        last = states[-1] if prefix else []
        starts = [State(flow.entry)] if not prefix else [t for s in last for c, t in flow.following(s) if _goes_on(c)]
        graph = _Graph(starts)
        open_states = list(starts)
        for state in open_states:  # grows while it is read: breadth first
            if state in graph.edges:
                continue
            if len(graph.edges) > _MOST_STATES:
                raise _TooLargeError
            found = {n for n, (event, _) in enumerate(sets) if _is_at(flow, sites, state, event)}
            if found:
                graph.ends[state] = found
            graph.edges[state] = [] if state.node in sites.certain else list(flow.following(state))
            open_states += [then for _, then in graph.edges[state]]
        if graph.reached(starts) != set(range(len(sets))):
            return None
        has_all = has_start and len(prefix) <= _MOST_EVENTS
        return cls(flow, sites, graph, sets, prefix, states, has_start=has_all)

    # ---- a branch

    def branch(self) -> str:
        """Describe the branch that every rank has passed, and that separates them."""
        around = [loop for loop, _ in self._loops_around()]
        for at in self._decisions:
            if isinstance(at, Node) and at not in around and (labels := self._labels(at)) is not None:
                by_label: dict[int, list[int]] = {}
                for number, label in enumerate(labels):
                    by_label.setdefault(label, []).extend(self._sets[number][1])
                if len(by_label) > 1:
                    return self._words(at, {label: sorted(ranks) for label, ranks in sorted(by_label.items())})
        return ""

    def _labels(self, at: Node) -> list[int] | None:
        """Return the branch that leads to the next event of each set; None if it is not the only one of a set."""
        graph = self._graph

        def removed(_: State, choice: Choice | None, __: State) -> bool:
            return choice is not None and choice.at is at

        if graph.reached(graph.starts, removed):
            return None
        found: list[set[int]] = [set() for _ in self._sets]
        for edges in graph.edges.values():
            for choice, then in edges:
                if choice is not None and choice.at is at:
                    for number in graph.reached([then], removed):
                        found[number].add(choice.label)
        return [labels.pop() for labels in found] if all(len(labels) == 1 for labels in found) else None

    def _words(self, at: Node, by_label: Mapping[int, list[int]]) -> str:
        tree, place = at.tree, _place(at)
        who = {label: list_ranks(ranks) for label, ranks in by_label.items()}
        if isinstance(tree, ast.If):
            return self._if_words(at, tree, by_label, who)
        if isinstance(tree, ast.Match):
            cases = [f"{r} {_case(tree.cases[n])}" if n < len(tree.cases) else f"{r} no case" for n, r in who.items()]
            return f"{place}: {cases[0].replace(' `', ' took `', 1)}, {', '.join(cases[1:])}"
        if isinstance(tree, ast.IfExp):
            parts = [f"{r} ran `{_short(ast.unparse((tree.body, tree.orelse)[n]))}`" for n, r in who.items()]
            return f"{place}: {', '.join(parts)}"
        if isinstance(tree, ast.BoolOp):
            return f"{place}: {who[0]} ran `{_short(at.name)}`, {who[1]} did not"
        if at.kind == "loop":
            inside = "in the loop" if isinstance(tree, ast.stmt) else "in the comprehension"
            if self._passes_have_events(at):
                is_one = len(by_label[0]) == 1
                loop = inside.removeprefix("in ")
                return f"{place}: {who[1]} made no pass of {loop}, {who[0]} {'is' if is_one else 'are'} in the 1st"
            event = next(one for one, ranks in self._sets if ranks[0] in by_label[0])
            if event == END:
                return ""
            return f"{place}: {who[0]} reached {event.place} {inside}, {who[1]} did not"
        test = ast.unparse(tree) if tree is not None else ""  # the condition of a comprehension
        return f"{place}: `{_short(test)}` was true on {who[0]} and not on {who[1]}"

    def _if_words(self, at: Node, tree: ast.If, by_label: Mapping[int, list[int]], who: Mapping[int, str]) -> str:
        tests = [tree]
        while len(tests) < len(at.edges) - 1:
            following = tests[-1].orelse[0]
            assert isinstance(following, ast.If)
            tests.append(following)
        if early := self._early_return(at, [*(test.body for test in tests), tests[-1].orelse], by_label):
            return early
        parts: list[str] = []
        for label, ranks in who.items():
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

    def _early_return(self, at: Node, bodies: Sequence[Sequence[ast.stmt]], by_label: Mapping[int, list[int]]) -> str:
        """Describe a branch in which some ranks returned from a function, if they did nothing else."""
        returning = [label for label in by_label if bodies[label] and isinstance(bodies[label][-1], ast.Return)]
        calls = {state.stack[-1] for state in self._graph.edges if state.node is at and state.stack}
        if len(returning) != 1 or len(by_label) != 2 or not at.function or len(calls) != 1:
            return ""
        label = returning[0]
        if any(_is_in(event, at.source, bodies[label]) for event, _ in self._sets):
            return ""
        returned = Event(at.source, bodies[label][-1].lineno)
        call = calls.pop()
        line = f"line {call.line}" if call.source == at.source else Event(call.source, call.line).place
        return f"{returned.place}: {list_ranks(by_label[label])} returned early from `{at.function}` ({line})"

    # ---- a loop

    def left_loop(self) -> str:
        """Describe the loop that some ranks have left, while the others are in a later pass."""
        for at, stack in self._loops_around():
            if (sentence := self._left(at, stack)) is not None:
                return sentence
        return ""

    def _loops_around(self) -> list[tuple[Node, tuple[Node, ...]]]:
        """Return the loops around the last common event and the calls around each, from the innermost loop."""
        found: dict[int, tuple[Node, tuple[Node, ...]]] = {}
        for state in self._last[:1]:
            for depth, node in enumerate((*state.stack, state.node)):
                for loop in node.loops:
                    found[id(loop)] = loop, state.stack[:depth]
        return list(found.values())[::-1]

    def _left(self, at: Node, stack: tuple[Node, ...]) -> str | None:
        graph = self._graph

        def is_inside(state: State) -> bool:
            nodes = (*state.stack, state.node)
            return state.node is at or any(at in node.loops for node in nodes)

        def leaves(state: State, _: Choice | None, then: State) -> bool:
            return is_inside(state) and not is_inside(then)

        around = [loop for loop, _ in self._loops_around()]

        def starts_pass(state: State, choice: Choice | None, then: State) -> bool:
            return leaves(state, choice, then) or (choice is not None and choice.at in around and choice.label == 0)

        def starts_own_pass(state: State, choice: Choice | None, then: State) -> bool:
            return leaves(state, choice, then) or (choice is not None and choice.at is at and choice.label == 0)

        if not all(map(is_inside, graph.starts)):
            return None
        stay = graph.reached(graph.starts, leaves)
        outside = [then for state, edges in graph.edges.items() for c, then in edges if leaves(state, c, then)]
        left = graph.reached(outside)
        if not stay or not left or stay & left or stay | left != self._all or graph.reached(graph.starts, starts_pass):
            return None
        next_pass = [t for edges in graph.edges.values() for c, t in edges if c and c.at is at and c.label == 0]
        facts = _LoopFacts(
            at=at,
            stack=stack,
            is_inside=is_inside,
            left=sorted(rank for n in left for rank in self._sets[n][1]),
            stay=sorted(rank for n in stay for rank in self._sets[n][1]),
            may_run_again=any(state.node is at for state in self._reachable(outside)),
            is_in_next_pass=not graph.reached(graph.starts, starts_own_pass),
            may_leave_in_pass=bool(graph.reached(next_pass) & left),
        )
        return f"{_place(at)}: " + self._counted(facts)

    def _reachable(self, starts: Iterable[State]) -> set[State]:
        seen = set(starts)
        open_states = list(seen)
        while open_states:
            for _, then in self._graph.edges.get(open_states.pop(), ()):
                if then not in seen:
                    seen.add(then)
                    open_states.append(then)
        return seen

    def _counted(self, facts: _LoopFacts) -> str:
        """Describe a loop that ranks have left, with the number of passes if the recording has it."""
        loop = "the loop" if isinstance(facts.at.tree, ast.stmt) else "the comprehension"
        left = f"{list_ranks(facts.left)} left {loop}"
        stay = f"{list_ranks(facts.stay)} {'is' if len(facts.stay) == 1 else 'are'}"
        for event in dict.fromkeys(reversed(self._prefix[-_MOST_RECENT:])):
            node = next(iter(self._sites.of(event)), None)
            if node is None or node not in self._sites.certain:
                break
            if event.bucket < 0 and event.api not in ("", event.op):
                continue  # one call of it may make several collectives
            number = self._trailing(event, facts)
            if not number:
                break
            is_next = facts.is_in_next_pass and not facts.may_run_again
            if is_next and self._is_once_per_pass(facts.at, facts.stack, node):
                kind = "complete pass" if facts.may_leave_in_pass else "pass"
                return f"{left} after {number} {kind}{'es' * (number != 1)}, {stay} in the {_ordinal(number + 1)}"
            if event.bucket < 0 and all(one == event for one, ranks in self._sets if ranks[0] in facts.stay):
                runs = f"{event.place} had run {number} time{'s' * (number != 1)}"
                return f"{left} after {runs}, {stay} there for the {_ordinal(number + 1)} time"
        return f"{left}, {stay} still in it"

    def _trailing(self, event: Event, facts: _LoopFacts) -> int | None:
        """Return how often an event is among the last common events inside a loop; None if that is not certain."""
        number = 0
        for one, states in zip(reversed(self._prefix), reversed(self._states), strict=False):
            are_inside = {facts.is_inside(state) for state in states}
            if are_inside == {False}:
                return number
            if len(are_inside) != 1:
                return None
            number += one == event
        return number if self._has_start else None

    def _is_once_per_pass(self, at: Node, stack: tuple[Node, ...], node: Node) -> bool:
        """Return whether each pass of a loop makes a call exactly once, unless it leaves the loop."""
        head = State(at, stack)
        first = State(at.edges[0][1], stack)
        if self._reaches(first, head, without=node):
            return False
        seen, open_states = {first}, [first]
        while open_states:
            state = open_states.pop()
            for _, then in self._flow.following(state):
                if state.node is node and self._reaches(then, node, without=at):
                    return False
                if then not in seen and then != head:
                    seen.add(then)
                    open_states.append(then)
                if len(seen) > _MOST_STATES:
                    raise _TooLargeError
        return True

    def _reaches(self, start: State, target: State | Node, without: Node) -> bool:
        seen, open_states = {start}, [start]
        while open_states:
            state = open_states.pop()
            if target in (state, state.node):
                return True
            if state.node is without:
                continue
            for choice, then in self._flow.following(state):
                if then not in seen and _goes_on(choice):
                    seen.add(then)
                    open_states.append(then)
            if len(seen) > _MOST_STATES:
                raise _TooLargeError
        return False

    def _passes_have_events(self, at: Node) -> bool:
        """Return whether no pass of a loop can end without an event."""
        firsts = [then for edges in self._graph.edges.values() for c, then in edges if c and c.at is at and not c.label]
        return not any(state.node is at for state in self._reachable(firsts))

    # ---- an exception

    def exception(self) -> str:
        """Describe the exception that some ranks have caught, and that separates them."""
        graph = self._graph
        for at in self._decisions:
            if not isinstance(at, ast.Try):
                continue

            def caught(_: State, choice: Choice | None, __: State, at: ast.Try = at) -> bool:
                return choice is not None and choice.at is at

            without = graph.reached(graph.starts, caught)
            handlers: dict[int, set[int]] = {}
            source = ""
            for state, edges in graph.edges.items():
                for choice, then in edges:
                    if choice is not None and choice.at is at:
                        handlers.setdefault(choice.label, set()).update(graph.reached([then], caught))
                        source = state.stack[0].source if state.stack else state.node.source
            after = set().union(*handlers.values())
            if without and after and not without & after and without | after == self._all and len(handlers) == 1:
                handler = at.handlers[-1 - next(iter(handlers))]
                ran = sorted(rank for n in after for rank in self._sets[n][1])
                others = sorted(rank for n in without for rank in self._sets[n][1])
                kind = "" if handler.type is None else f" {_short(ast.unparse(handler.type))}"
                place = Event(source, at.lineno).place
                except_ = f"`except{kind}:` (line {handler.lineno})"
                return f"{place}: {list_ranks(ran)} ran {except_}, {list_ranks(others)} did not"
        return ""

    # ---- several conditions

    def conditions(self) -> str:
        """Describe the conditions through which some ranks reached a line that the others did not reach."""
        found = [self._conditions_of(number) for number in sorted(self._all)]
        known = [number for number, conditions in enumerate(found) if conditions]
        if len(self._sets) != 2 or len(known) != 1 or (event := self._sets[known[0]][0]) == END:
            return ""
        through = " and ".join(found[known[0]])
        ranks, others = (list_ranks(self._sets[n][1]) for n in (known[0], 1 - known[0]))
        return f"{event.place}: {ranks} reached it through {through}, {others} did not"

    def _conditions_of(self, number: int) -> list[str]:
        """Return the conditions that every path to the next event of a set has passed, with their lines."""
        graph, found = self._graph, []
        for at in self._decisions:
            if not isinstance(at, Node) or not isinstance(at.tree, ast.If) or len(at.edges) != 2:
                continue

            def removed(_: State, choice: Choice | None, __: State, at: Node = at) -> bool:
                return choice is not None and choice.at is at

            if number in graph.reached(graph.starts, removed):
                continue
            targets: dict[int, list[State]] = {}
            for edges in graph.edges.values():
                for choice, then in edges:
                    if choice is not None and choice.at is at:
                        targets.setdefault(choice.label, []).append(then)
            if [label for label, then in targets.items() if number in graph.reached(then, removed)] == [0]:
                found.append(f"`if {_short(ast.unparse(at.tree.test))}:` (line {at.line})")
        return found


def _states_of(flow: ControlFlow, sites: _Sites, prefix: Sequence[Event], *, has_start: bool) -> list[list[State]]:
    """Return the states in which each of the last common events may have happened.

    The last list is empty if the code does not explain them.
    """
    walk = _Walk(flow, sites)
    first, *others = prefix[-_MOST_EVENTS:]
    is_exact = has_start and len(prefix) <= _MOST_EVENTS
    found = [list(walk.next_states([State(flow.entry)], first, is_exact=is_exact))]
    for event in others:
        found.append(list(walk.next_states(found[-1], event, is_exact=True)))
        if not found[-1]:
            break
    return found


class _Walk:
    """Follows the events of a rank through the control flow."""

    def __init__(self, flow: ControlFlow, sites: _Sites) -> None:
        self._flow = flow
        self._sites = sites
        self._known: dict[tuple[State, Event], dict[State, None]] = {}

    def next_states(self, states: Sequence[State], event: Event, is_exact: bool) -> dict[State, None]:
        """Return the states in which the next event may happen.

        Args:
            is_exact: no other event has happened in between.
        """
        found: dict[State, None] = {}
        for state in states:
            key = (state, event)
            if key not in self._known or not is_exact:
                self._known[key] = self._from(state, event, is_exact)
            found |= self._known[key]
        return found

    def _from(self, start: State, event: Event, is_exact: bool) -> dict[State, None]:
        nodes = set(self._sites.of(event))
        found: dict[State, None] = {}
        if start.node in nodes and (event.bucket >= 0 or event.api != event.op):
            found[start] = None  # one call may make several collectives
        seen = {start}
        open_states = [start]
        while open_states:
            state = open_states.pop()
            for choice, then in self._flow.following(state):
                if then in seen or (state is start and not _goes_on(choice)):
                    continue
                seen.add(then)
                if len(seen) > _MOST_STATES:
                    raise _TooLargeError
                if then.node in nodes:
                    found[then] = None
                if not is_exact or then.node not in self._sites.certain:
                    open_states.append(then)
        if start.node in nodes and start not in found and self._comes_back(start):
            found[start] = None
        return found

    def _comes_back(self, start: State) -> bool:
        """Return whether a state may follow itself without another event."""
        seen: set[State] = set()
        open_states = [start]
        while open_states:
            state = open_states.pop()
            for choice, then in self._flow.following(state):
                if then == start:
                    return True
                if (
                    then not in seen
                    and then.node not in self._sites.certain
                    and (state is not start or _goes_on(choice))
                ):
                    seen.add(then)
                    open_states.append(then)
        return False


def _goes_on(choice: Choice | None) -> bool:
    """Return whether a step is none into an exception handler."""
    return choice is None or choice.label >= 0


def _is_at(flow: ControlFlow, sites: _Sites, state: State, event: Event) -> bool:
    if event == END:
        return state.node is flow.exit and not state.stack
    return state.node in sites.of(event)


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


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
