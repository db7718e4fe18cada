"""Names of modules for a backward whose forward was not marked (see `rank.group.modules`): marks cost a training loop
time, and its steps are alike, so collectives get the names of a marked step with the identical sequence of calls.

Identical are operation, group, shapes, type and line, and outside of the backward the module, which is known in every
step: where blocks are left out at random this tells which. Where marked steps with one sequence have other names, there
is none. All but `add` runs in the recorder's own thread, or where somebody asks what is under way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ddp_notebook.rank.group.calls import Call
from ddp_notebook.stdlib import logging

_MOST_CALLS = 4_000  # of a step that are compared; a loop without an optimizer never comes to the end of one
_MOST_KNOWN = 16  # sequences of a cell; a model that does something else in each step has no names in others
_Facts = tuple[Any, ...]
_log = logging.getLogger(__name__)


class Known:
    """The sequences of a cell's marked steps."""

    def __init__(self) -> None:
        self._known: list[tuple[list[_Facts], list[str]]] = []

    def learn(self, facts: list[_Facts], names: list[str]) -> None:
        """A marked step is over."""
        for others, known in self._known:
            if others == facts:
                known[:] = [one if one == name else "" for one, name in zip(known, names, strict=True)]
                return
        if len(self._known) < _MOST_KNOWN:
            self._known.append((facts, names))

    def names(self, facts: list[_Facts], *, is_over: bool) -> list[str]:
        """The modules of these calls; empty if no marked step had the same.

        Args:
            is_over: these are all calls of a step, not its first ones.
        """
        count = len(facts)
        found = [
            known[:count]
            for others, known in self._known
            if (len(others) == count or not is_over) and others[:count] == facts
        ]
        return [names[0] if len({*names}) == 1 else "" for names in zip(*found, strict=True)]


class Sequence:
    """The calls of DTensor and functional collectives in a step, in order.

    Args:
        known: what marked steps of the same cell have told.
        is_marked: whether this is one.
    """

    __slots__ = ("_known", "calls", "is_marked", "is_over")

    def __init__(self, known: Known, *, is_marked: bool) -> None:
        self.is_marked = is_marked
        self.is_over = False
        self._known = known
        self.calls: list[Call] | None = []  # None: too many, or nobody needs them any more

    def add(self, call: Call) -> None:
        """A call begins."""
        if (calls := self.calls) is not None:
            calls.append(call)
            if len(calls) > _MOST_CALLS:
                self.calls = None

    def end(self) -> None:
        """The step is over: learn its names, or give it some. Forgets the calls, which refer to this sequence."""
        if self.is_marked and (calls := self.calls) is not None:
            self._known.learn([_facts(call) for call in calls], [call.site[5] for call in calls])
        self.name()
        self.calls = None

    def name(self) -> None:
        """Give the calls so far their names, if this is not a marked step."""
        calls = [*(self.calls or ())]
        if self.is_marked or all(call.site[5] or not _is_in_backward(call) for call in calls):
            return
        names = self._known.names([_facts(call) for call in calls], is_over=self.is_over)
        if any(call.site[5] not in ("", name) for call, name in zip(calls, names, strict=False)):
            return  # a part of the forward that was run again in the backward is known, and is another one
        for call, name in zip(calls, names, strict=False):
            if name:
                call.site = (*call.site[:5], name)


class Moment(NamedTuple):
    """A rank's position in its training. Replaced when that changes, so that a call holds a single reference."""

    cell: int
    title: int  # the cell's number in `In [n]`
    step: int  # optimizer steps of the cell
    values: int  # tells whether calls keep tensor values, such as `KEPT`
    sequence: Sequence | None = None  # the step's calls that may need a name; None: all steps are marked


def name_modules(records: Iterable[Any]) -> None:
    """Give calls the modules that marked steps tell, these and earlier ones.

    Args:
        records: from the event buffer.
    """
    calls = []
    last: Sequence | None = None
    try:
        for record in records:
            if type(record) is Sequence:
                record.end()
            elif type(record) is Call:
                calls.append(record)
        for call in calls:
            if call.moment is not None and (one := call.moment.sequence) is not last:
                last = one
                if one is not None:  # the step goes on
                    one.name()
    except Exception:  # the records are not to be lost
        _log.info("modules have no names", exc_info=True)


def _is_in_backward(call: Call) -> bool:
    return call.backward is not None


def _facts(call: Call) -> _Facts:
    """What two calls of the same place in a step have in common."""
    kernel, site, arguments = call.kernel, call.site, call.arguments
    # A call that another thread compacts meanwhile has its shapes before it loses its arguments.
    shapes, rest = (kernel.shapes_of(arguments), arguments[kernel.at_rest :]) if arguments else (call.shapes, call.rest)
    module = None if _is_in_backward(call) else site[5]
    return kernel, call.group.serial, shapes, *kernel.facts_of(rest), site[2], site[3], site[4], module
