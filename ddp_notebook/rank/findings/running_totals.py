"""Totals that a loop adds to and sums over ranks in each pass, so that earlier values are summed again."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

from ddp_notebook.rank.group.calls import Call
from ddp_notebook.rank.group.operators import flat
from ddp_notebook.stdlib import functools, threading, weakref

_SUM = "SUM"
_MOST = 64  # calls of a cell that are looked at
_READS = {"print", "float", "int", "round", "str", "len"}  # functions that do not change a tensor
_METHODS = {"item", "tolist", "clone", "detach", "mean", "sum", "max", "min", "cpu", "float", "double", "numpy"}


class RunningTotals:
    """Sums of the running cell.

    Args:
        cells: files of cells.
        note: keeps a fact.
        line: returns the user's line of a call.
    """

    def __init__(self, cells: Mapping[str, int], note: Callable[..., None], line: Callable[[Call], str]) -> None:
        self._cells, self._note, self._line = cells, note, line
        self._main = threading.get_ident()
        self.are_used = False  # no collective since then
        self._left = _MOST
        self._last: dict[tuple[CodeType, int], tuple[Callable[[], Any], int]] = {}  # tensor and version, by call

    def begin_cell(self) -> None:
        """Forget the sums of the last cell."""
        self.are_used = False
        self._left = _MOST
        self._last.clear()

    def begun(self, call: Call) -> None:
        """Look at a collective of the user before it begins."""
        self.are_used = True
        code, instruction = call.site[2:4]
        kernel = call.kernel
        if kernel.spec.name != "all_reduce" or not self._left or call.thread != self._main or code is None:
            return
        if code.co_filename not in self._cells or len(call.group.ranks) < 2:
            return
        self._left -= 1
        if kernel.reduce_op_of(call.arguments[kernel.at_rest :]) != _SUM:
            return
        tensors = () if kernel.at_tensors is None else flat(call.arguments[kernel.at_tensors])
        if len(tensors) != 1 or not (name := _total_of(code, instruction)):
            return
        tensor, last = tensors[0], self._last.get((code, instruction))
        self._last[code, instruction] = weakref.ref(tensor), tensor._version
        if last is not None and last[0]() is tensor and last[1] != tensor._version:
            self._note("running-total", 0, line=self._line(call), variable=name)


@functools.lru_cache(1000)
def _total_of(code: CodeType, instruction: int) -> str:
    """Return the variable that a call sums, if the loop around only adds to it; else ""."""
    position = list(code.co_positions())[instruction // 2]
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return ""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for call in parents:
        if isinstance(call, ast.Call) and _position_of(call) == position:
            first = next(iter([*call.args, *(one.value for one in call.keywords)]), None)
            loop = _loop_around(call, parents)
            if isinstance(first, ast.Name) and loop is not None and _only_adds(loop, first.id, call, parents):
                return first.id
    return ""


def _position_of(node: ast.expr) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _loop_around(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> ast.AST | None:
    """Return the innermost loop around a node in the same function; None if there is none."""
    while (found := parents.get(node)) is not None:
        if isinstance(found, ast.For | ast.While | ast.AsyncFor):
            return found
        if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            return None
        node = found
    return None


def _only_adds(loop: ast.AST, name: str, call: ast.Call, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Return whether a loop adds to a variable, and changes it in no other way except by the call.

    Args:
        loop: node of the loop.
        name: the variable.
        call: the call that sums it.
        parents: parent of each node.
    """
    adds = False
    for node in ast.walk(loop):
        if isinstance(node, ast.Name) and node.id == name:
            parent = parents[node]
            if isinstance(parent, ast.AugAssign) and parent.target is node:
                if not isinstance(parent.op, ast.Add):
                    return False
                adds = True
            elif not isinstance(node.ctx, ast.Load) or not _is_read(parent, call, parents):
                return False
    return adds


def _is_read(parent: ast.AST, call: ast.Call, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Return whether the parent of a variable certainly does not change its tensor."""
    if isinstance(parent, ast.Call):
        return parent is call or (isinstance(parent.func, ast.Name) and parent.func.id in _READS)
    if isinstance(parent, ast.Attribute):
        return parent.attr in _METHODS and isinstance(parents.get(parent), ast.Call)
    if isinstance(parent, ast.Subscript):
        return isinstance(parent.ctx, ast.Load) and not isinstance(parents.get(parent), ast.Call | ast.Attribute)
    return isinstance(parent, ast.BinOp | ast.Compare | ast.FormattedValue) or (
        isinstance(parent, ast.AugAssign) and isinstance(parent.op, ast.Add)
    )
