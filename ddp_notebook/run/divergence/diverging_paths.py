"""The control flow between the last common collective of ranks and the next one of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ddp_notebook.records.words import group_by_value
from ddp_notebook.run.divergence.control_flow import Catching, Choice, ControlFlow, Node, State
from ddp_notebook.run.divergence.paths import END, Event

MOST_STATES = 20_000
_MOST_EVENTS = 20_000  # common collectives that are followed, the last ones

Removed = Callable[[State, Choice | None, State], bool]


class TooLargeError(Exception):
    """The control flow has too many states."""


@dataclass(slots=True)
class Graph:
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

    def reachable(self, starts: Iterable[State]) -> set[State]:
        """Return these states, and all states that may follow them."""
        seen = set(starts)
        open_states = list(seen)
        while open_states:
            for _, then in self.edges.get(open_states.pop(), ()):
                if then not in seen:
                    seen.add(then)
                    open_states.append(then)
        return seen

    def targets(self, at: Catching) -> dict[int, list[State]]:
        """Return the states after a decision, by the label of the branch."""
        found: dict[int, list[State]] = {}
        for edges in self.edges.values():
            for choice, then in edges:
                if choice is not None and choice.at is at:
                    found.setdefault(choice.label, []).append(then)
        return found


class Sites:
    """The calls of the code that belong to events."""

    def __init__(self, flow: ControlFlow, events: Iterable[Event]) -> None:
        self._calls: dict[tuple[str, int], list[Node]] = {}
        for node in flow.nodes:
            if node.kind == "call":
                self._calls.setdefault((node.source, node.line), []).append(node)
        # A `finally` block has several nodes for a call.
        groups = [nodes for event in set(events) if (nodes := self.of(event))]
        self.certain = {node for nodes in groups if len({id(one.tree) for one in nodes}) == 1 for node in nodes}
        self._all = {node for nodes in groups for node in nodes}

    def of(self, event: Event) -> list[Node]:
        """Return the calls that may be this event."""
        calls = self._calls.get((event.source, event.line), [])
        if event.function.isidentifier():  # otherwise the file was changed after its import
            calls = [one for one in calls if one.function == event.function]
        return [one for one in calls if one.name in (event.api, event.op)] or [one for one in calls if not one.callees]

    def are_hidden(self, flow: ControlFlow) -> bool:
        """Return whether a function that may run without a call in the graph reaches one of the calls."""
        seen = {State(entry) for entry in flow.hidden}
        open_states = list(seen)
        while open_states:
            state = open_states.pop()
            if state.node in self._all:
                return True
            if len(seen) > MOST_STATES:
                raise TooLargeError
            for _, then in flow.following(state):
                if then not in seen:
                    seen.add(then)
                    open_states.append(then)
        return False


def without(at: Catching) -> Removed:
    """Return a filter for `Graph.reached` that removes all branches of a decision."""
    return lambda _, choice, __: choice is not None and choice.at is at


class DivergingPaths:
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
        sites: Sites,
        graph: Graph,
        sets: Sequence[tuple[Event, list[int]]],
        prefix: Sequence[Event],
        states: Sequence[Sequence[State]],
        *,
        has_start: bool,
    ) -> None:
        self.has_start = has_start
        self.flow = flow
        self.sites = sites
        self.graph = graph
        self.sets = sets
        self.prefix = prefix
        self.states = states
        self.all = set(range(len(sets)))
        order: dict[int, Catching] = {}
        for edges in graph.edges.values():
            for choice, _ in edges:
                if choice is not None:
                    order.setdefault(id(choice.at), choice.at)
        self.decisions = list(order.values())  # in the order in which paths reach them

    def ranks(self, numbers: Iterable[int]) -> list[int]:
        """Return the ranks of these sets."""
        return sorted(rank for number in numbers for rank in self.sets[number][1])

    @classmethod
    def of(
        cls, flow: ControlFlow, prefix: Sequence[Event], following: Mapping[int, Event], *, has_start: bool
    ) -> DivergingPaths | None:
        """Return the diverging paths of ranks; None if the code does not explain them.

        Args:
            prefix: common events.
            following: the next event of each rank.
            has_start: the first event of `prefix` is the first one of the cell.
        """
        sites = Sites(flow, [*prefix, *following.values()])
        sets = list(group_by_value(following).items())
        places = [set(sites.of(event)) for event, _ in sets if event != END]
        if any(one & other for n, one in enumerate(places) for other in places[:n]) or sites.are_hidden(flow):
            return None
        states = _states_of(flow, sites, prefix, has_start=has_start) if prefix else []
        last = states[-1] if prefix else []
        starts = [State(flow.entry)] if not prefix else [t for s in last for c, t in flow.following(s) if goes_on(c)]
        graph = Graph(starts)
        open_states = list(starts)
        for state in open_states:  # grows while it is read: breadth first
            if state in graph.edges:
                continue
            if len(graph.edges) > MOST_STATES:
                raise TooLargeError
            found = {n for n, (event, _) in enumerate(sets) if _is_at(flow, sites, state, event)}
            if found:
                graph.ends[state] = found
            graph.edges[state] = [] if state.node in sites.certain else list(flow.following(state))
            open_states += [then for _, then in graph.edges[state]]
        if graph.reached(starts) != set(range(len(sets))):
            return None
        has_all = has_start and len(prefix) <= _MOST_EVENTS
        return cls(flow, sites, graph, sets, prefix, states, has_start=has_all)

    def loops_around(self) -> list[tuple[Node, tuple[Node, ...]]]:
        """Return the loops around the last common event and the calls around each, from the innermost loop."""
        found: dict[int, tuple[Node, tuple[Node, ...]]] = {}
        for state in self.states[-1][:1] if self.states else ():
            for depth, node in enumerate((*state.stack, state.node)):
                for loop in node.loops:
                    found[id(loop)] = loop, state.stack[:depth]
        return list(found.values())[::-1]


def _states_of(flow: ControlFlow, sites: Sites, prefix: Sequence[Event], *, has_start: bool) -> list[list[State]]:
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

    def __init__(self, flow: ControlFlow, sites: Sites) -> None:
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
                if then in seen or (state is start and not goes_on(choice)):
                    continue
                seen.add(then)
                if len(seen) > MOST_STATES:
                    raise TooLargeError
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
                    and (state is not start or goes_on(choice))
                ):
                    seen.add(then)
                    open_states.append(then)
        return False


def goes_on(choice: Choice | None) -> bool:
    """Return whether a step does not lead into an exception handler."""
    return choice is None or choice.label >= 0


def _is_at(flow: ControlFlow, sites: Sites, state: State, event: Event) -> bool:
    if event == END:
        return state.node is flow.exit and not state.stack
    return state.node in sites.of(event)
