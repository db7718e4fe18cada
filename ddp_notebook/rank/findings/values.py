"""Values that the user's collectives get: gradients by name, variables, and passes of loops.

Ranks that pass different values of equal size get a wrong result without an error. So each rank keeps the values of
the first calls of a cell, and the notebook compares them (`run/findings/rank_comparison`).
"""

from __future__ import annotations

import ast
import linecache
import opcode
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from sys import _getframe
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from ddp_notebook.rank.group.calls import Call
from ddp_notebook.rank.group.operators import flat
from ddp_notebook.stdlib import functools, threading, weakref

_MOST = 64  # calls of a cell that are kept, and calls of one line
_OF_LINE = 32
_MOST_CHARS = 40
_FOR = opcode.opmap["FOR_ITER"]
_REDUCES = ("all_reduce", "reduce")  # begin of names: others may get another variable on each rank
_HAS_VARIABLES = sys.version_info >= (3, 13)  # in older ones, reading a function's variables keeps them alive
_Instruction = tuple[CodeType | None, int]
GRADIENT, LOOP, VARIABLE = "gradient", "loop", "variable"  # kinds of names


class _Place(NamedTuple):
    """A call in a cell."""

    variable: str  # first argument, if it is a variable
    keys: tuple[str, ...]  # variables of the loops over which the argument runs
    counters: tuple[str, ...]  # variables of `range` and `enumerate` in the loops around the call, outermost first


_NO_PLACE = _Place("", (), ())


class Values:
    """Values of the calls of the running cell.

    Args:
        cells: files of cells.
        line: returns the user's line of a call.
        parameters: returns parameters with their names.
    """

    def __init__(
        self,
        cells: Mapping[str, int],
        line: Callable[[Call], str],
        parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    ) -> None:
        self._cells = cells
        self._line = line
        self._parameters = parameters
        self._main = threading.get_ident()
        # Parameters with their names, by shape and id; None before they are needed in a cell
        self._named: dict[torch.Size, dict[int, tuple[str, Callable[[], Any]]]] | None = None
        self._of_line: Counter[_Instruction] = Counter()  # number of calls of a line
        self._lines: dict[_Instruction, str] = {}
        self._calls: list[tuple[list[Any], str, str, list[list[Any]], _Instruction]] = []
        self.are_used = False  # the cell has called a collective

    def begin_cell(self) -> None:
        """Forget the calls of the last cell."""
        self._calls.clear()
        self._of_line.clear()
        self._lines.clear()
        self._named = None
        self.are_used = False

    def begun(self, call: Call) -> None:
        """Keep a collective of the user."""
        code, instruction, cell = call.site[2:5]
        if len(self._calls) >= _MOST or call.thread != self._main or call.backward is not None or code is None:
            return
        if cell is not None:
            code, instruction = cell
        if code.co_filename not in self._cells:
            return
        self.are_used = True
        self._of_line[code, instruction] += 1
        if self._of_line[code, instruction] > _OF_LINE:
            return
        place, texts, passes = self._described(_getframe(1))
        site = call.site[2:4]
        if (line := self._lines.get(site)) is None:
            line = self._lines[site] = self._line(call)
        group = f"{call.group.title} {list(call.group.ranks)}"
        name = call.kernel.spec.name
        self._calls.append(([group, call.number, name, line], self._gradient(call), texts, passes, place))

    @property
    def calls(self) -> list[list[Any]]:
        """Return the kept calls: group, number, operation, line, kind of the name, name, passes of loops.

        Returns [] if all have the same value.
        """
        if len(self._calls) < 2:
            return []
        found = []
        for call, gradient, texts, passes, (code, instruction) in self._calls:
            if gradient:
                kind, name = GRADIENT, gradient
            elif texts:
                kind, name = LOOP, texts
            else:
                kind, name = VARIABLE, ""
                if call[2].startswith(_REDUCES) and code is not None:
                    name = _place_of(code, instruction).variable
            if name or passes:
                found.append([*call, kind, name, passes])
        return found if len({(one[5], str(one[6])) for one in found}) > 1 else []

    def _described(self, frame: FrameType | None) -> tuple[_Instruction, str, list[list[Any]]]:
        """Return the outermost call, the texts of loops that select the value, and the counters of the loops around.

        All functions of cells that are on the stack count.
        """
        outermost: _Instruction = None, 0
        texts: list[str] = []
        numbers: list[list[Any]] = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename in self._cells:
                is_cell = code.co_name == "<module>"
                if (is_cell or _HAS_VARIABLES) and _has_loops(code):
                    place = _place_of(code, frame.f_lasti)
                    values = frame.f_locals
                    keys = [(name, values.get(name)) for name in place.keys]
                    texts[:0] = [f"{name}={value[:_MOST_CHARS]!r}" for name, value in keys if type(value) is str]
                    counters = [[name, values.get(name)] for name in place.counters]
                    numbers[:0] = [one for one in counters if type(one[1]) is int]
                outermost = code, frame.f_lasti
                if is_cell:
                    break
            frame = frame.f_back
        return outermost, " and ".join(texts), numbers

    # ---- gradients

    def _gradient(self, call: Call) -> str:
        """Return the name of the gradient or parameter that a call gets; "" if it gets another tensor."""
        tensors = flat(call.arguments[call.kernel.at_tensors]) if call.kernel.at_tensors is not None else ()
        if len(tensors) != 1 or tensors[0].numel() == 1 or tensors[0].grad_fn is not None:
            return ""
        (tensor,) = tensors
        if self._named is None:
            self._named = {}
            for name, p in self._parameters():
                self._named.setdefault(p.shape, {}).setdefault(id(p), (name, weakref.ref(p)))
        if not (some := self._named.get(tensor.shape)):
            return ""
        if (found := some.get(id(tensor))) is not None and found[1]() is tensor:
            return found[0]
        for key, (name, reference) in some.items():
            if (parameter := reference()) is not None and parameter.grad is tensor:
                some[key] = some.pop(key)  # a loop over the parameters finds the next one first
                return f"the gradient of {name}"
        return ""


@functools.lru_cache(1000)
def _has_loops(code: CodeType) -> bool:
    return _FOR in code.co_code[::2]


class _Loop(NamedTuple):
    """A loop around a call."""

    variables: frozenset[str]
    counter: str  # variable of `range` or `enumerate`


@functools.lru_cache(1000)
def _place_of(code: CodeType, instruction: int) -> _Place:
    position = list(code.co_positions())[instruction // 2]
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return _NO_PLACE
    for call, loops in _calls_of(tree, ()):
        if (call.lineno, call.end_lineno, call.col_offset, call.end_col_offset) == position:
            first: Any = next(iter([*call.args, *(one.value for one in call.keywords)]), None)
            used = set() if first is None else {one.id for one in ast.walk(first) if isinstance(one, ast.Name)}
            keys = [name for loop in loops if used & loop.variables for name in sorted(loop.variables)]
            text = ast.unparse(first) if isinstance(first, ast.Name | ast.Attribute) else ""
            counters = tuple(loop.counter for loop in loops if loop.counter)
            return _Place(text[:_MOST_CHARS], tuple(keys), counters)
    return _NO_PLACE


def _calls_of(node: ast.AST, around: tuple[_Loop, ...]) -> Iterator[tuple[ast.Call, tuple[_Loop, ...]]]:
    """Yield the calls in a node, with the loops around them, outermost first."""
    if isinstance(node, ast.Call):
        yield node, around
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
        around = ()
    loops: list[Any] = [node] if isinstance(node, ast.For | ast.AsyncFor) else getattr(node, "generators", [])
    inside = (*around, *map(_loop, loops))
    for child in ast.iter_child_nodes(node):
        yield from _calls_of(child, inside)


def _loop(node: ast.For | ast.comprehension) -> _Loop:
    variables = [one.id for one in ast.walk(node.target) if isinstance(one, ast.Name)]
    over = node.iter.func if isinstance(node.iter, ast.Call) else None
    is_counted = isinstance(over, ast.Name) and over.id in ("range", "enumerate")
    first: Any = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
    return _Loop(frozenset(variables), first.id if is_counted and isinstance(first, ast.Name) else "")
