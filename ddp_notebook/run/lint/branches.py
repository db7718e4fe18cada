"""State of the reader for one rank: collectives so far, variables, and the branches of a test."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar

from ddp_notebook.run.lint.groups import ELSEWHERE, ForeseenCollective, ForeseenGroup
from ddp_notebook.run.lint.known_values import RANKED, UNKNOWN, Api, Function, Value, agreed, is_plain

T = TypeVar("T")
Flow = frozenset[str]  # possible continuations of a statement: on, return, break, continue, raise
_MOST_STEPS: Final = 5000  # statements read for one rank; limits recursive functions


class GiveUpError(Exception):
    """The cell takes too long to read, or creates its own default group."""


class Branches(ast.NodeVisitor):
    """State of one rank while its cell is read.

    Args:
        rank: number of the rank; None: any rank. Then tests on the rank stay open, and only their relevance is
            determined.
        world_size: number of ranks.
        local_rank: local rank; None: equal to the rank.
    """

    def __init__(self, rank: int | None, world_size: int, local_rank: int | None = None) -> None:
        self.rank = -1 if rank is None else rank
        local = rank if local_rank is None else local_rank
        self.trace: list[ForeseenCollective] = []
        # calls that cannot be followed, so that their collectives are not in the trace
        self.unseen: set[ast.Call] = set()
        self.exits: set[int] = set()  # lines of return, break, continue and raise
        self._world = ForeseenGroup(tuple(range(world_size)))
        self._own, text = (RANKED, RANKED) if rank is None else (rank, str(rank))
        self._environ = {
            "RANK": text,
            "LOCAL_RANK": text if local is None else str(local),
            "WORLD_SIZE": str(world_size),
        }
        self._scopes: list[dict[str, Value]] = [
            {
                **{
                    "rank": self._own,
                    "local_rank": self._own if local is None else local,
                    "world_size": world_size,
                    "__name__": "__main__",
                },
                **{"torch": Api("torch"), "dist": Api("torch.distributed")},
                # The cell may have imported these earlier.
                **{"nn": Api("torch.nn"), **{name: Api(f"torch.{name}") for name in ELSEWHERE}},
            }
        ]
        self._replaced: set[str] = set()  # names of torch that the cell has reassigned: `dist.barrier = mine`
        self._running: list[Function] = []
        self._returned: list[Value] = []
        self._yields = False  # the current function is a generator
        self._called_at = 0  # line in the cell of the outermost call
        self._decided = 0  # number of enclosing decided tests
        self._ranked = 0  # number of tests so far that depend on an unknown rank
        self._tells_apart = False
        self._steps = 0

    def passed(self, group: ForeseenGroup) -> list[ForeseenCollective]:
        """Return the collectives of the trace that belong to one group."""
        return [call for call in self.trace if call.group == group]

    def _step(self) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise GiveUpError

    def _perhaps(self, test: Value, run: Callable[[], T]) -> T:
        return self._either(test, run, lambda: None)[0]  # type: ignore[return-value]  # the result of `run`

    def _either(self, test: Value, *branches: Callable[[], T]) -> list[T]:
        """Run the branch that a test selects, or both. After both, only equal values of variables stay known."""
        if is_plain(test):
            self._decided += 1
            result = branches[not test]()
            self._decided -= 1
            return [result]
        self._ranked += test is RANKED
        before = [dict(scope) for scope in self._scopes]
        results, traces, after = [], [], []
        for branch in branches:
            for scope, names in zip(self._scopes, before, strict=True):
                scope.clear()
                scope.update(names)
            result, trace = self._aside(branch)
            results.append(result)
            traces.append(trace)
            after.append([dict(scope) for scope in self._scopes])
        for scope, one, other in zip(self._scopes, *after, strict=True):
            for name in one | other:
                scope[name] = agreed(one.get(name, UNKNOWN), other.get(name, UNKNOWN), test=test)
        shapes = [[(call.shape, call.group) for call in trace] for trace in traces]
        mark = "!" if test is RANKED else "?"
        self.trace += traces[0] if shapes[0] == shapes[1] else within(mark, [*traces[0], *traces[1]])
        return results

    def _aside(self, run: Callable[[], T]) -> tuple[T, list[ForeseenCollective]]:
        """Run a function. Return its result and its collectives, which are not added to the trace."""
        kept, self.trace = self.trace, []
        result, trace = run(), self.trace
        self.trace = kept
        return result, trace

    def _forget(self, names: list[str]) -> None:
        for name in names:
            self._scopes[-1][name] = UNKNOWN


def within(mark: str, trace: list[ForeseenCollective]) -> list[ForeseenCollective]:
    """Return the collectives marked as inside a loop or under a test."""
    return [replace(call, within=mark + call.within) for call in trace]
