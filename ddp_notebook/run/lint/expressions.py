"""Evaluate expressions for one rank."""

from __future__ import annotations

import ast
import builtins
from functools import partial
from typing import Any, Final

from ddp_notebook.run.lint.branches import Branches, within
from ddp_notebook.run.lint.known_values import (
    OPERATORS,
    RANKED,
    UNKNOWN,
    Api,
    Function,
    Value,
    agreed,
    compute,
    is_plain,
    strongest,
)

PURE: Final = {"abs", "bool", "int", "len", "list", "max", "min", "range", "tuple"}
# Functions that run no collective, judged by their names. Other unknown functions may run one.
_HARMLESS: Final = {
    *(*PURE, "enumerate", "float", "format", "isinstance", "print", "repr", "str", "type", "zip"),
    *(name for name in dir(builtins) if name.endswith(("Error", "Exception", "Interrupt"))),
}


class Expressions(Branches):
    """Visiting an expression returns its value, and adds its collectives to the trace."""

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Value:
        for scope in self._scopes:  # in a comprehension the name belongs to the enclosing function
            scope.pop(node.target.id, None)
        return self.visit(node.value)

    def visit_Lambda(self, node: ast.Lambda) -> Value:
        return Function(node, list(self._scopes))

    def visit_Constant(self, node: ast.Constant) -> Value:
        return node.value

    def visit_Name(self, node: ast.Name) -> Value:
        if is_stored(node):
            self._forget([node.id])
            return UNKNOWN
        for scope in reversed(self._scopes):
            if node.id in scope:
                return scope[node.id]
        return Api(f"builtins.{node.id}") if node.id in _HARMLESS else UNKNOWN

    def visit_Attribute(self, node: ast.Attribute) -> Value:
        base = self.visit(node.value)
        name = f"{base.name}.{node.attr}" if isinstance(base, Api) else ""
        if is_stored(node) and name:
            self._replaced.add(name)
        if not name or name in self._replaced:
            return UNKNOWN
        return self._world if name.startswith("torch.distributed.") and node.attr == "WORLD" else Api(name)

    def visit_Subscript(self, node: ast.Subscript) -> Value:
        base, key = self.visit(node.value), self.visit(node.slice)
        if isinstance(base, list | tuple) and key is RANKED:
            return RANKED
        if isinstance(base, Api):
            if is_stored(node):
                self._replaced.add(base.name)
            is_environ = base.name == "os.environ" and base.name not in self._replaced
            return self._environ.get(str(key), UNKNOWN) if is_environ else UNKNOWN
        is_item = isinstance(base, list | tuple) and isinstance(key, int) and -len(base) <= key < len(base)
        return base[key] if is_item else UNKNOWN

    def visit_Tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Value:
        values = [self.visit(element) for element in node.elts]
        if any(isinstance(element, ast.Starred) for element in node.elts):
            return UNKNOWN
        return tuple(values) if isinstance(node, ast.Tuple) else values

    visit_List = visit_Set = visit_Tuple

    def visit_IfExp(self, node: ast.IfExp) -> Value:
        test = self.visit(node.test)
        return agreed(*self._either(test, partial(self.visit, node.body), partial(self.visit, node.orelse)), test=test)

    def visit_BoolOp(self, node: ast.BoolOp) -> Value:
        return self._bool(node.values, isinstance(node.op, ast.Or))

    def _bool(self, operands: list[ast.expr], decides: bool) -> Value:
        first = self.visit(operands[0])
        if len(operands) == 1 or (is_plain(first) and bool(first) is decides):
            return first
        rest = partial(self._bool, operands[1:], decides)
        if is_plain(first):
            return self._either(True, rest)[0]
        second = self._perhaps(first, rest)
        if is_plain(second) and bool(second) is decides:
            return decides
        return strongest([first, second, UNKNOWN], RANKED, UNKNOWN)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Value:
        return compute(OPERATORS[type(node.op)], self.visit(node.operand))

    def visit_BinOp(self, node: ast.BinOp) -> Value:
        values = self.visit(node.left), self.visit(node.right)
        function = OPERATORS.get(type(node.op))
        # [0] * 10**9 would take long
        is_number = not any(isinstance(value, str | list | tuple | range) for value in values)
        return compute(function, *values) if function is not None and is_number else UNKNOWN

    def visit_Compare(self, node: ast.Compare) -> Value:
        values = [self.visit(node.left), *map(self.visit, node.comparators)]
        tests = zip(node.ops, values, values[1:], strict=False)
        results = [compute(OPERATORS[type(test)], *two) for test, *two in tests]
        return strongest(results, False, RANKED, UNKNOWN, True)

    def visit_ListComp(self, node: Any) -> Value:
        self._scopes.append({})
        _, body = self._aside(partial(self._generate, node))
        self._scopes.pop()
        self.trace += within("*", body)
        return UNKNOWN

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def _generate(self, node: Any) -> None:
        tests = [test for generator in node.generators for test in generator.ifs]
        for generator in node.generators:
            self.visit(generator.iter)
            self.visit(generator.target)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        test = self._bool(tests, False) if tests else True
        self._either(test, lambda: list(map(self.visit, parts)), list)


def is_stored(node: Any) -> bool:
    return not isinstance(node.ctx, ast.Load)
