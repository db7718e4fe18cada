"""Control flow of the code of a cell: a graph of its calls and branches.

The graph contains only what decides the order of calls: calls, branches, loops, exception handlers and the ends of
functions. Functions of the code have their own graphs, and a walk enters them with a stack of calls.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["call", "branch", "loop", "entry", "exit", "raise", "plain"]
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(eq=False, slots=True)
class Node:
    """One point of the code.

    Attributes:
        source: name of the text that contains it: "" for the cell, "In[3]", or the name of a file.
        line: line in this text.
        name: name of the called function, for a call.
        edges: following nodes with their labels. A label is the number of the branch.
        callees: entries of the functions that a call may enter.
        may_skip: a call may also enter none of them.
        handlers: try statement and handlers that catch an exception here, from the innermost one.
        loops: the loops around it in its function, from the outermost one.
        tree: the statement or expression of a branch or loop.
    """

    kind: Kind
    source: str
    line: int
    name: str = ""
    edges: list[tuple[int, Node]] = field(default_factory=list)
    callees: list[Node] = field(default_factory=list)
    may_skip: bool = False
    handlers: tuple[tuple[ast.Try, tuple[Node, ...]], ...] = ()
    loops: tuple[Node, ...] = ()
    tree: ast.AST | None = None
    function: str = ""  # name of the function that contains it; "" for the code outside functions


@dataclass(frozen=True, slots=True)
class State:
    """A point of a walk: a node, and the calls that led into its function."""

    node: Node
    stack: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision of a walk: a branch or loop, or an exception that a try statement catches.

    Attributes:
        at: the branch, the loop or the try statement.
        label: number of the branch, or -1 - number of the handler for an exception.
    """

    at: Node | ast.Try
    label: int


class ControlFlow:
    """Graph of a cell and of the functions that it may call.

    Args:
        sources: syntax trees by name: "" is the cell, the others are earlier cells and files, the oldest first.
            Functions are found by their names in all of them.
    """

    def __init__(self, sources: Mapping[str, ast.Module]) -> None:
        self.nodes: list[Node] = []
        self._functions: dict[str, list[_Function]] = {}
        self._methods: dict[str, list[_Function]] = {}
        self._source = ""
        self._calls: list[Node] = []
        self._modules = {name.removesuffix(".py") for name in sources}
        for name, tree in sources.items():
            self._find_functions(name, tree)
        for functions in (*self._functions.values(), *self._methods.values()):
            for function in functions:
                self._build(function)
        self._source = ""
        cell = _Function("", sources[""], self._node("entry", 0), self._node("exit", 0))
        self._build(cell)
        self.entry, self.exit = cell.entry, cell.exit
        for call in self._calls:
            self._resolve(call)

    def _find_functions(self, source: str, tree: ast.Module) -> None:
        self._source = source
        inside_class = {id(one) for cls in ast.walk(tree) if isinstance(cls, ast.ClassDef) for one in cls.body}
        for one in ast.walk(tree):
            if isinstance(one, _FUNCTIONS):
                function = _Function(source, one, self._node("entry", one.lineno), self._node("exit", one.lineno))
                if one in tree.body:  # it replaces a function of an earlier cell
                    self._functions[one.name] = [function]
                else:
                    kind = self._methods if id(one) in inside_class else self._functions
                    kind.setdefault(one.name, []).append(function)

    def _resolve(self, call: Node) -> None:
        """Find the functions that a call may enter. A method may belong to another object of the same method name."""
        assert isinstance(call.tree, ast.Call)
        called = call.tree.func
        found = self._functions.get(call.name, [])
        is_certain = isinstance(called, ast.Name)
        if isinstance(called, ast.Attribute):
            of_module = isinstance(called.value, ast.Name) and called.value.id in self._modules
            is_certain = of_module and bool(found)
            found = found if is_certain else self._methods.get(call.name, [])
        call.callees = [one.entry for one in found if not one.is_generator]
        call.may_skip = not is_certain or len(call.callees) != 1

    # ---- building

    def _node(self, kind: Kind, line: int, **fields: object) -> Node:
        node = Node(kind, self._source, line, **fields)  # type: ignore[arg-type]  # the names of the fields
        self.nodes.append(node)
        return node

    def _build(self, function: _Function) -> None:
        self._source = function.source
        inside = _Inside(function.name, function.exit)
        function.entry.function = function.exit.function = function.name
        body = function.tree.body
        function.entry.edges = [(0, self._block(body, function.exit, inside))]

    def _block(self, body: Sequence[ast.stmt], after: Node, inside: _Inside) -> Node:
        for statement in reversed(body):
            after = self._statement(statement, after, inside)
        return after

    def _statement(self, one: ast.stmt, after: Node, inside: _Inside) -> Node:
        match one:
            case ast.If():
                return self._if(one, after, inside)
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(one, after, inside)
            case ast.Try():
                return self._try(one, after, inside)
            case ast.With() | ast.AsyncWith():
                return self._with(one, after, inside)
            case ast.Match():
                branch = self._new("branch", one, inside)
                branch.edges = [(n, self._block(case.body, after, inside)) for n, case in enumerate(one.cases)]
                if not any(_is_wildcard(case) for case in one.cases):
                    branch.edges.append((len(one.cases), after))
                return self._expression(one.subject, branch, inside)
            case ast.Return():
                return self._expression(one.value, inside.leave("return"), inside)
            case ast.Break():
                return inside.leave("break")
            case ast.Continue():
                return inside.leave("continue")
            case ast.Raise():
                return self._expression(one.exc, self._new("raise", one, inside), inside)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Import() | ast.ImportFrom():
                return after
            case _:
                first = after
                for child in reversed([node for node in ast.iter_child_nodes(one) if isinstance(node, ast.expr)]):
                    first = self._expression(child, first, inside)
                if first is after and inside.handlers:  # it may raise
                    first = self._new("plain", one, inside)
                    first.edges = [(0, after)]
                return first

    def _new(self, kind: Kind, tree: ast.AST, inside: _Inside, name: str = "") -> Node:
        line = tree.lineno  # type: ignore[attr-defined]  # statements and expressions have one
        return self._node(
            kind, line, name=name, handlers=inside.handlers, loops=inside.loops, tree=tree, function=inside.function
        )

    def _if(self, one: ast.If, after: Node, inside: _Inside) -> Node:
        """Return the branch of an `if` with all its `elif`. Their tests are evaluated before the branch."""
        branch = self._new("branch", one, inside)
        tests = [one]
        while len(tests[-1].orelse) == 1 and isinstance(last := tests[-1].orelse[0], ast.If) and is_elif(last):
            tests.append(last)
        branch.edges = [(n, self._block(test.body, after, inside)) for n, test in enumerate(tests)]
        branch.edges.append((len(tests), self._block(tests[-1].orelse, after, inside)))
        return self._expression(one.test, branch, inside)

    def _loop(self, one: ast.For | ast.AsyncFor | ast.While, after: Node, inside: _Inside) -> Node:
        head = self._new("loop", one, inside)
        of_body = inside.in_loop(head, after)
        first = self._block(one.body, head, of_body)
        is_endless = isinstance(one, ast.While) and isinstance(one.test, ast.Constant) and bool(one.test.value)
        head.edges = [(0, first)] if is_endless else [(0, first), (1, self._block(one.orelse, after, inside))]
        return self._expression(one.iter, head, inside) if isinstance(one, ast.For | ast.AsyncFor) else head

    def _try(self, one: ast.Try, after: Node, inside: _Inside) -> Node:
        if one.finalbody:
            inside = inside.with_final(lambda then, outer: self._block(one.finalbody, then, outer))
            after = self._block(one.finalbody, after, inside.outside_final)
        handlers = tuple(self._block(handler.body, after, inside) for handler in one.handlers)
        of_body = inside.with_handlers(one, handlers) if handlers else inside
        return self._block(one.body, self._block(one.orelse, after, inside), of_body)

    def _with(self, one: ast.With | ast.AsyncWith, after: Node, inside: _Inside) -> Node:
        first = self._block(one.body, after, inside)
        for item in reversed(one.items):
            first = self._expression(item.context_expr, first, inside)
        return first

    def _expression(self, one: ast.expr | None, after: Node, inside: _Inside) -> Node:
        """Return the first node of an expression: its calls in the order of their evaluation."""
        match one:
            case None | ast.Lambda():
                return after
            case ast.IfExp():
                branch = self._new("branch", one, inside)
                branch.edges = [(n, self._expression(e, after, inside)) for n, e in enumerate((one.body, one.orelse))]
                return self._expression(one.test, branch, inside)
            case ast.BoolOp():
                first = self._expression(one.values[-1], after, inside)
                for value, following in reversed(list(itertools.pairwise(one.values))):
                    if first is not after:
                        branch = self._new("branch", one, inside, ast.unparse(following))
                        branch.edges = [(0, first), (1, after)]
                        first = branch
                    first = self._expression(value, first, inside)
                return first
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                return self._comprehension(one, after, inside)
            case ast.Call():
                called = one.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                call = self._new("call", one, inside, name)
                call.line = called.end_lineno or one.lineno  # Python names the line of the attribute
                call.edges = [(0, after)]
                self._calls.append(call)
                after = call
        for child in reversed([node for node in ast.iter_child_nodes(one)]):
            if isinstance(child, ast.keyword):
                child = child.value
            if isinstance(child, ast.expr):
                after = self._expression(child, after, inside)
        return after

    def _comprehension(
        self, one: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp, after: Node, inside: _Inside
    ) -> Node:
        first = one.generators[0]
        head = self._new("loop", one, inside)
        of_body = inside.in_loop(head, after)
        element = [one.key, one.value] if isinstance(one, ast.DictComp) else [one.elt]
        values = [*(part for generator in one.generators[1:] for part in (generator.iter, *generator.ifs)), *element]
        then = head
        for value in reversed(values):
            then = self._expression(value, then, of_body)
        if first.ifs:
            branch = self._new("branch", first.ifs[0], of_body)
            branch.edges = [(0, then), (1, head)]
            then = branch
        head.edges = [(0, then), (1, after)]
        return self._expression(first.iter, head, inside)

    # ---- walking

    def following(self, state: State) -> Iterator[tuple[Choice | None, State]]:
        """Yield the states that may follow a state, each with the decision that leads to it."""
        node, stack = state.node, state.stack
        if node.kind == "exit":
            if stack:
                yield None, State(stack[-1].edges[0][1], stack[:-1])
            return
        if node.kind in ("call", "raise", "plain"):
            yield from self._caught(state)
        for entry in node.callees:
            if len(stack) < MOST_CALLS:
                yield None, State(entry, (*stack, node))
        if not node.callees or node.may_skip:
            for label, then in node.edges:
                yield (Choice(node, label) if node.kind in ("branch", "loop") else None), State(then, stack)

    def _caught(self, state: State) -> Iterator[tuple[Choice, State]]:
        """Yield the handlers of an exception that is raised in this state."""
        node, stack = state.node, state.stack
        while True:
            for tree, handlers in node.handlers:
                for n, handler in enumerate(handlers):
                    yield Choice(tree, -1 - n), State(handler, stack)
            if not stack:
                return
            node, stack = stack[-1], stack[:-1]


MOST_CALLS = 8  # calls inside each other that a walk enters


@dataclass(eq=False, slots=True)
class _Function:
    source: str
    tree: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
    entry: Node
    exit: Node

    @property
    def name(self) -> str:
        return "" if isinstance(self.tree, ast.Module) else self.tree.name

    @property
    def is_generator(self) -> bool:
        """Return whether a call of it runs nothing of its body."""
        return any(isinstance(one, ast.Yield | ast.YieldFrom) for one in ast.walk(self.tree))


Final = Callable[[Node, "_Inside"], Node]


@dataclass(frozen=True, slots=True)
class _Inside:
    """Statements around a statement, inside its function."""

    function: str
    exit: Node
    loops: tuple[Node, ...] = ()
    ends: tuple[Node, ...] = ()  # node after each loop
    handlers: tuple[tuple[ast.Try, tuple[Node, ...]], ...] = ()
    finals: tuple[tuple[int, Final, _Inside], ...] = ()  # number of loops around it, its code, and its own surroundings

    @property
    def outside_final(self) -> _Inside:
        return self.finals[-1][2]

    def in_loop(self, head: Node, after: Node) -> _Inside:
        return _replace(self, loops=(*self.loops, head), ends=(*self.ends, after))

    def with_handlers(self, tree: ast.Try, handlers: tuple[Node, ...]) -> _Inside:
        return _replace(self, handlers=((tree, handlers), *self.handlers))

    def with_final(self, final: Final) -> _Inside:
        return _replace(self, finals=(*self.finals, (len(self.loops), final, self)))

    def leave(self, how: Literal["return", "break", "continue"]) -> Node:
        """Return the node that follows a `return`, `break` or `continue`, with the `finally` blocks on the way."""
        if how == "return" or not self.loops:  # `break` outside a loop is a syntax error, which the rank reports
            then, depth = self.exit, 0
        else:
            then, depth = (self.ends if how == "break" else self.loops)[-1], len(self.loops)
        for loops, final, outer in self.finals:  # the outermost one runs last
            if loops >= depth:
                then = final(then, outer)
        return then


def _replace(inside: _Inside, **fields: object) -> _Inside:
    values = {name: getattr(inside, name) for name in _Inside.__slots__}
    return _Inside(**{**values, **fields})


def is_elif(one: ast.If) -> bool:
    """Return whether this `if`, the only statement of an `else`, was written as `elif`."""
    return bool(getattr(one, "is_elif", False))


def mark_elifs(tree: ast.Module, text: str) -> ast.Module:
    """Note which `if` statements were written as `elif`. Their syntax trees are equal."""
    lines = text.split("\n")
    for one in ast.walk(tree):
        if isinstance(one, ast.If):
            one.is_elif = lines[one.lineno - 1].encode()[one.col_offset :].startswith(b"elif")  # type: ignore[attr-defined]
    return tree


def _is_wildcard(case: ast.match_case) -> bool:
    return case.guard is None and isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None
