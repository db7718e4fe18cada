"""Control flow of the code of a cell: a graph of its calls and branches.

The graph contains only what decides the order of calls: calls, branches, loops, exception handlers and the ends of
functions. Functions of the code have their own graphs, and a walk enters them with a stack of calls.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Kind = Literal["call", "branch", "loop", "entry", "exit", "raise", "plain"]
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Decorators that call their function exactly once per call.
_TRANSPARENT = {
    "no_grad",
    "inference_mode",
    "enable_grad",
    "autocast",
    "compile",
    "record",
    "staticmethod",
    "classmethod",
}
_SUPPRESSING = {"suppress", "raises", "assertRaises"}  # context managers that may suppress an exception


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
        handlers: what catches an exception here, from the innermost one: the try or with statement and the nodes that
            follow, or the end of a `finally` block, which raises the exception again.
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
    handlers: Handlers = ()
    loops: tuple[Node, ...] = ()
    tree: ast.AST | None = None
    function: str = ""  # name of the function that contains it; "" for the code outside functions


Catching: TypeAlias = ast.Try | ast.With | ast.AsyncWith | Node
Handlers: TypeAlias = tuple[tuple[Catching, tuple[Node, ...]], ...]


@dataclass(frozen=True, slots=True)
class State:
    """A point of a walk: a node, and the calls that led into its function."""

    node: Node
    stack: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision of a walk: a branch or loop, or an exception that is caught.

    Attributes:
        at: the branch, the loop, or what catches the exception, see `Node.handlers`.
        label: number of the branch, or -1 - number of the handler for an exception.
    """

    at: Catching
    label: int


class ControlFlow:
    """Graph of a cell and of the functions that it may call.

    Args:
        sources: syntax trees by name: "" is the cell, the others are earlier cells and files, the oldest first.
            Functions are found by their names in all of them.

    Attributes:
        hidden: entries of functions that may also run without a call in the graph.
    """

    def __init__(self, sources: Mapping[str, ast.Module]) -> None:
        self.nodes: list[Node] = []
        self._functions: dict[str, list[_Function]] = {}
        self._methods: dict[str, list[_Function]] = {}
        self._source = ""
        self._calls: list[Node] = []
        self._modules = {name.removesuffix(".py") for name in sources}
        self._classes = {
            one.name for tree in sources.values() for one in ast.walk(tree) if isinstance(one, ast.ClassDef)
        }
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
        self.hidden = self._hidden(sources)

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

    def _hidden(self, sources: Mapping[str, ast.Module]) -> list[Node]:
        """Return the entries of functions that may also run without a call in the graph.

        They are used as values, have another value for their name, are called in parts that the graph lacks, such as
        the test of a `while`, are called by Python or by a decorator, or run as a task.
        """
        known = {id(call.tree) for call in self._calls}
        functions = [one for own in (*self._functions.values(), *self._methods.values()) for one in own]
        coroutines = {one.name for one in functions if isinstance(one.tree, ast.AsyncFunctionDef)}
        names: set[str] = set()
        for source, tree in sources.items():
            called = {id(one.func) for one in ast.walk(tree) if isinstance(one, ast.Call)}
            visible = known | {id(one) for one in _calls_before(tree)} if source else known
            awaited = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Await)}
            for one in ast.walk(tree):
                match one:
                    case ast.Name(id=name) if id(one) not in called:
                        names.add(name)
                    case ast.Attribute(attr=name) if id(one) not in called:
                        names.add(name)
                    case ast.arg(arg=name):
                        names.add(name)
                    case ast.Call(func=func) if id(one) not in visible:
                        names.add(_last_name(func))
                    case ast.Call(func=func) if id(one) not in awaited and _last_name(func) in coroutines:
                        names.add(_last_name(func))
        return [one.entry for one in functions if one.name in names or one.is_called_by_others]

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
            raised = self._new("raise", one, inside)
            of_exception = self._block(one.finalbody, raised, inside)
            inside = inside.with_final(lambda then, outer: self._block(one.finalbody, then, outer))
            after = self._block(one.finalbody, after, inside.outside_final)
            inside = inside.with_handlers(raised, (of_exception,))
        handlers = tuple(self._block(handler.body, after, inside) for handler in one.handlers)
        of_body = inside.with_handlers(one, handlers) if handlers else inside
        return self._block(one.body, self._block(one.orelse, after, inside), of_body)

    def _with(self, one: ast.With | ast.AsyncWith, after: Node, inside: _Inside) -> Node:
        suppresses = any(map(self._may_suppress, one.items))
        first = self._block(one.body, after, inside.with_handlers(one, (after,)) if suppresses else inside)
        for item in reversed(one.items):
            first = self._expression(item.context_expr, first, inside)
        return first

    def _may_suppress(self, item: ast.withitem) -> bool:
        """Return whether a context manager may suppress an exception."""
        manager = item.context_expr
        if not isinstance(manager, ast.Call):  # such as a variable
            return True
        name = _last_name(manager.func)
        return name in _SUPPRESSING or name in self._functions or name in self._classes

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
                call = self._new("call", one, inside, _last_name(called))
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
        if node.kind in ("call", "raise", "plain") or (node.kind in ("branch", "loop") and _may_raise(node.tree)):
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
    is_generator: bool = field(init=False)  # a call of it runs nothing of its body

    @property
    def name(self) -> str:
        return "" if isinstance(self.tree, ast.Module) else self.tree.name

    def __post_init__(self) -> None:
        self.is_generator = any(isinstance(one, ast.Yield | ast.YieldFrom) for one in ast.walk(self.tree))

    @property
    def is_called_by_others(self) -> bool:
        """Return whether Python, torch or a decorator may call it, or not call it."""
        if isinstance(self.tree, ast.Module):
            return False
        decorators = [one.func if isinstance(one, ast.Call) else one for one in self.tree.decorator_list]
        is_special = self.name == "forward" or (self.name.startswith("__") and self.name.endswith("__"))
        return is_special or self.is_generator or any(_last_name(one) not in _TRANSPARENT for one in decorators)


Final = Callable[[Node, "_Inside"], Node]


@dataclass(frozen=True, slots=True)
class _Inside:
    """Statements around a statement, inside its function."""

    function: str
    exit: Node
    loops: tuple[Node, ...] = ()
    ends: tuple[Node, ...] = ()  # node after each loop
    handlers: Handlers = ()
    finals: tuple[tuple[int, Final, _Inside], ...] = ()  # number of loops around it, its code, and its own surroundings

    @property
    def outside_final(self) -> _Inside:
        return self.finals[-1][2]

    def in_loop(self, head: Node, after: Node) -> _Inside:
        return _replace(self, loops=(*self.loops, head), ends=(*self.ends, after))

    def with_handlers(self, at: Catching, handlers: tuple[Node, ...]) -> _Inside:
        return _replace(self, handlers=((at, handlers), *self.handlers))

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


def _last_name(called: ast.expr) -> str:
    """Return "step" for `step` and for `trainer.step`."""
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _calls_before(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the calls outside functions, which have run when an earlier cell ran or a file was imported."""
    open_nodes: list[ast.AST] = [tree]
    while open_nodes:
        one = open_nodes.pop()
        if isinstance(one, ast.Call):
            yield one
        if not isinstance(one, (*_FUNCTIONS, ast.Lambda)):
            open_nodes += ast.iter_child_nodes(one)


_CANNOT_RAISE = (
    *(ast.Name, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.expr_context),
    *(ast.cmpop, ast.boolop, ast.unaryop, ast.Add, ast.Sub, ast.Mult, ast.Mod),
)  # conditions such as `rank % 2 == 0`


def _may_raise(tree: ast.AST | None) -> bool:
    """Return whether the condition of a branch or the next pass of a loop may raise an exception."""
    if isinstance(tree, ast.For | ast.AsyncFor):
        return not (isinstance(tree.iter, ast.Call) and _last_name(tree.iter.func) == "range")
    match tree:
        case ast.If() | ast.While() | ast.IfExp():
            tests = [tree.test]
            while isinstance(tree, ast.If) and len(tree.orelse) == 1 and isinstance(tree.orelse[0], ast.If):
                tree = tree.orelse[0]
                tests.append(tree.test)
        case ast.BoolOp():
            tests = tree.values
        case _:
            return True
    return not all(isinstance(part, _CANNOT_RAISE) for test in tests for part in ast.walk(test))
