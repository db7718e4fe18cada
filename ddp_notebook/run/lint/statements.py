"""Read a cell for one rank, statement by statement, and find its collectives in their order."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

from ddp_notebook.run.lint.branches import Flow, within
from ddp_notebook.run.lint.callees import Functions
from ddp_notebook.run.lint.expressions import is_stored
from ddp_notebook.run.lint.groups import C10D, GROUP_AT
from ddp_notebook.run.lint.known_values import (
    RANKED,
    UNKNOWN,
    Api,
    Function,
    Value,
    compute,
    is_plain,
    settled,
    strongest,
)

_ON: Final = frozenset({"on"})
_MOST_REPEATED: Final = 16  # loops with at most this number of collectives are unrolled


class Reader(Functions):
    """Reads a cell as one rank would run it.

    Visiting an expression returns its value, and visiting a statement returns its possible continuations.

    Args:
        rank: number of the rank; None: any rank. Then tests on the rank stay open, and only their relevance is
            determined.
        world_size: number of ranks.
    """

    def tells_apart(self, cell: ast.Module) -> bool:
        """Return whether the reached collectives of a cell depend on the rank."""
        self.block(cell.body)
        return self._tells_apart or any("!" in call.within for call in self.trace)

    def block(self, statements: Sequence[ast.stmt]) -> Flow:
        """Visit statements in order, and return the possible continuations."""
        for number, statement in enumerate(statements):
            self._step()
            ranked = self._ranked
            flow: Flow = self.visit(statement)
            if "on" not in flow:
                return flow
            if flow != _ON:
                test = RANKED if self._ranked > ranked else UNKNOWN
                return flow - _ON | self._perhaps(test, partial(self.block, statements[number + 1 :]))
        return _ON

    # ---- control flow

    def generic_visit(self, node: ast.AST) -> Value:
        for child in ast.iter_child_nodes(node):
            self.visit(child)
        return UNKNOWN if isinstance(node, ast.expr) else _ON

    def visit_Expr(self, node: ast.Expr) -> Flow:
        self.visit(node.value)
        return _ON

    def visit_If(self, node: ast.If) -> Flow:
        branches = partial(self.block, node.body), partial(self.block, node.orelse)
        return _union(self._either(self.visit(node.test), *branches))

    def visit_Match(self, node: ast.Match) -> Flow:
        return self._cases(self.visit(node.subject), node.cases)

    def _cases(self, subject: Value, cases: list[ast.match_case]) -> Flow:
        if not cases:
            return _ON
        case, *others = cases
        for part in ast.walk(case.pattern):
            if name := getattr(part, "name", None) or getattr(part, "rest", None):
                self._scopes[-1][name] = UNKNOWN
        test = self._fits(case.pattern, subject)
        if case.guard is not None and (test is True or not is_plain(test)):
            guard = self.visit(case.guard)
            test = guard if test is True or guard is False else RANKED if RANKED in (test, guard) else UNKNOWN
        return _union(self._either(test, partial(self.block, case.body), partial(self._cases, subject, others)))

    def _fits(self, pattern: ast.pattern, subject: Value) -> Value:
        match pattern:
            case ast.MatchAs(pattern=None):
                return True
            case ast.MatchValue():
                return compute(operator.eq, subject, self.visit(pattern.value))
            case ast.MatchOr():
                fits = [self._fits(each, subject) for each in pattern.patterns]
                return strongest(fits, True, RANKED, UNKNOWN, False)
        return RANKED if subject is RANKED else UNKNOWN

    def visit_For(self, node: ast.For | ast.AsyncFor) -> Flow:
        count = compute(len, self.visit(node.iter))
        return self._loop(node, count, turns=count)

    visit_AsyncFor = visit_For

    def visit_While(self, node: ast.While) -> Flow:
        return self._loop(node, self.visit(node.test), turns=UNKNOWN, is_endless=isinstance(node.test, ast.Constant))

    def _loop(self, node: Any, test: Value, turns: Value, is_endless: bool = False) -> Flow:
        if is_plain(test) and not test:
            return self.block(node.orelse)
        begins = is_plain(test)
        changing, ranked = list(_targets(node)), self._ranked
        self._forget(changing)
        flow, body = self._aside(partial(self.block, node.body))
        self._forget(changing)
        goes_on = bool(flow & {"on", "continue"})  # after its first iteration
        goes_through = flow <= {"on", "continue"}
        if begins and not goes_on:
            self.trace += body
        elif is_plain(turns) and goes_through and turns * len(body) <= _MOST_REPEATED:
            self.trace += body * turns
        else:
            is_ranked = RANKED in (test, turns) or (self._ranked > ranked and not goes_through)
            self.trace += within("!" if is_ranked else "*", body)
        leaves = flow & {"return", "raise"}
        if begins and "break" not in flow and (is_endless or not goes_on):
            return leaves or _ON
        if "break" in flow:
            return leaves | _ON | self._perhaps(UNKNOWN, partial(self.block, node.orelse))
        return leaves | self.block(node.orelse)

    def visit_Try(self, node: Any) -> Flow:
        flow = self.block(node.body)
        if "on" in flow:
            flow = flow - _ON | self.block(node.orelse)
        if node.handlers:
            flow -= {"raise"}
        for handler in node.handlers:
            self._forget([handler.name] if handler.name else [])
            flow |= self._perhaps(UNKNOWN, partial(self.block, handler.body))
        last = self.block(node.finalbody)
        return flow | last - _ON if "on" in last else last

    visit_TryStar = visit_Try

    def visit_With(self, node: ast.With | ast.AsyncWith) -> Flow:
        for item in node.items:
            self.visit(item)
        flow = self.block(node.body)
        return flow | _ON if "raise" in flow else flow  # the context manager may suppress it

    visit_AsyncWith = visit_With

    def visit_Return(self, node: ast.Return) -> Flow:
        self._returned.append(settled(self.visit(node.value)) if node.value is not None else None)
        return self._exit(node)

    def visit_Raise(self, node: ast.Raise) -> Flow:
        self.generic_visit(node)
        return self._exit(node)

    def _exit(self, node: ast.stmt) -> Flow:
        self.exits.add(node.lineno)
        return frozenset({type(node).__name__.lower()})

    visit_Break = visit_Continue = _exit

    # ---- names

    def visit_Assign(self, node: ast.Assign) -> Flow:
        value = self.visit(node.value)
        for target in node.targets:
            self._bind(target, value)
        return _ON

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Flow:
        if node.value is not None:
            self._bind(node.target, self.visit(node.value))
        return _ON

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> Flow:
        for scope in self._scopes:
            scope.update(dict.fromkeys(node.names, UNKNOWN))
        return _ON

    visit_Nonlocal = visit_Global

    def visit_Import(self, node: ast.Import) -> Flow:
        for alias in node.names:
            first = alias.name.partition(".")[0]
            self._scopes[-1][alias.asname or first] = Api(alias.name if alias.asname else first)
        return _ON

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Flow:
        for alias in node.names:
            is_all = alias.name == "*" and node.module in C10D
            for name in (*GROUP_AT, "get_rank", "get_world_size") if is_all else [alias.name]:
                self._scopes[-1][alias.asname or name] = Api(f"{node.module}.{name}")
        return _ON

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Flow:
        bases = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
        wrappers = [self.visit(base) for base in bases]
        # Decorators of torch, such as no_grad(), run the function unchanged.
        is_transparent = all(isinstance(each, Api) and each.name.startswith("torch.") for each in wrappers)
        self._scopes[-1][node.name] = Function(node, list(self._scopes)) if is_transparent else UNKNOWN
        return _ON

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> Flow:
        self._forget([node.name])
        return _ON

    def _bind(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self._scopes[-1][target.id] = settled(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, tuple | list) and len(value) == len(target.elts):
            for part, each in zip(target.elts, value, strict=True):
                self._bind(part, each)
        else:
            self.visit(target)


def _targets(statement: Any) -> Iterator[str]:
    """Yield the names that a statement and its inner statements assign, without names in expressions."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AugAssign(target=ast.Name(id=name)):
            yield name  # the usual case, and fast
            return
        case ast.Expr():
            return
        case ast.Assign() | ast.Delete():
            parts = statement.targets
        case ast.For() | ast.AsyncFor() | ast.AugAssign() | ast.AnnAssign():
            parts = [statement.target]
        case ast.With() | ast.AsyncWith():
            parts = [item.optional_vars for item in statement.items if item.optional_vars is not None]
        case _:
            parts = []
    for part in parts:
        yield from (each.id for each in ast.walk(part) if isinstance(each, ast.Name) and is_stored(each))
    for inside in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(statement, inside, ()):
            yield from _targets(each)


def _union(flows: list[Flow]) -> Flow:
    return frozenset().union(*flows)
