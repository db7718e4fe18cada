"""Module names for a backward whose forward was not marked (see `rank.group.modules`).

Marks slow a training loop down, and its steps are alike. So collectives of an unmarked step get the names of a marked
step with the identical sequence of calls.

Calls are identical if operation, group, shapes, dtype and line are equal. Outside the backward the module must be equal
too, since it is known in every step. This distinguishes steps of a model that skips blocks at random. If marked steps
with one sequence have different names, a call gets no name. All functions except `add` run in the recorder's thread, or
in a thread that queries operations in progress.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ddp_notebook.rank.group.calls import Call
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import logging

_MOST_CALLS = 4_000  # compared calls of a step; in a loop without an optimizer a step never ends
_MOST_KNOWN = 16  # sequences of a cell; a model that does something else in each further step gets no names
_Facts = tuple[Any, ...]
_log = logging.getLogger(__name__)


class Known:
    """The sequences of a cell's marked steps."""

    def __init__(self) -> None:
        self._known: list[tuple[list[_Facts], list[str]]] = []

    def learn(self, facts: list[_Facts], names: list[str]) -> None:
        """Store the sequence of a complete marked step."""
        for others, known in self._known:
            if others == facts:
                known[:] = [one if one == name else "" for one, name in zip(known, names, strict=True)]
                return
        if len(self._known) < _MOST_KNOWN:
            self._known.append((facts, names))

    def names(self, facts: list[_Facts], *, is_over: bool) -> list[str]:
        """Return the modules of these calls; empty if no marked step has the same sequence.

        Args:
            is_over: `facts` contains all calls of a step, not only the first ones.
        """
        count = len(facts)
        found = [
            known[:count]
            for others, known in self._known
            if (len(others) == count or not is_over) and others[:count] == facts
        ]
        return [names[0] if len({*names}) == 1 else "" for names in zip(*found, strict=True)]


class Sequence:
    """The calls of DTensor and of functional collectives in a step, in order.

    Args:
        known: sequences of the cell's marked steps.
        is_marked: this step is marked.
    """

    __slots__ = ("_known", "calls", "is_marked", "is_over")

    def __init__(self, known: Known, *, is_marked: bool) -> None:
        self.is_marked = is_marked
        self.is_over = False
        self._known = known
        self.calls: list[Call] | None = []  # None if there are too many calls, or after the end

    def add(self, call: Call) -> None:
        """Add a call that starts."""
        if (calls := self.calls) is not None:
            calls.append(call)
            if len(calls) > _MOST_CALLS:
                self.calls = None

    def end(self) -> None:
        """End the step: learn its names, or name its calls. Drop the calls, since they refer to this sequence."""
        if self.is_marked and (calls := self.calls) is not None:
            self._known.learn([_facts(call) for call in calls], [call.site[5] for call in calls])
        self.name()
        self.calls = None

    def name(self) -> None:
        """Name the calls so far, unless this step is marked."""
        calls = [*(self.calls or ())]
        if self.is_marked or all(call.site[5] or not _is_in_backward(call) for call in calls):
            return
        names = self._known.names([_facts(call) for call in calls], is_over=self.is_over)
        if any(call.site[5] not in ("", name) for call, name in zip(calls, names, strict=False)):
            return  # a part of the forward, run again in the backward, has a known module, and it differs
        for call, name in zip(calls, names, strict=False):
            if name:
                call.site = (*call.site[:5], name, call.site[6])


class Moment(NamedTuple):
    """A rank's position in its training. It is replaced on each change, so that a call holds a single reference."""

    cell: int
    title: int  # the cell's number in `In [n]`
    step: int  # optimizer steps of the cell
    values: int  # selection of the tensor values that calls keep, for example `KEPT`
    sequence: Sequence | None = None  # calls of the step that may need a name; None if all steps are marked


def name_modules(records: Iterable[Any]) -> None:
    """Name the modules of these calls and of earlier ones, from the marked steps.

    Args:
        records: records from the event buffer.
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
                if one is not None:  # the step continues
                    one.name()
    except Exception:  # the records must not be lost
        _log.info("modules have no names", exc_info=True)


def _is_in_backward(call: Call) -> bool:
    return call.backward is not None


def _facts(call: Call) -> _Facts:
    """Return the features that are equal for two calls at the same position of a step."""
    kernel, site, arguments = call.kernel, call.site, call.arguments
    # If another thread compacts a call now, it sets the shapes before it drops the arguments.
    shapes, rest = (kernel.shapes_of(arguments), arguments[kernel.at_rest :]) if arguments else (call.shapes, call.rest)
    module = None if _is_in_backward(call) else site[5]
    return kernel, call.group.serial, shapes, *kernel.facts_of(rest), site[2], site[3], site[4], module
