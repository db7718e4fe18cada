"""A cell as one rank reads it: which collectives it passes, in what order. For `foresee`, which compares the ranks."""

from __future__ import annotations

import ast
import builtins
import operator
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

T = TypeVar("T")
Value = Any  # what an expression is on one rank: a plain value of Python, or one of the classes below
Flow = frozenset[str]  # where a statement may lead: on, return, break, continue, raise

# Position of the group among the arguments -> the collectives. tests/test_foresee.py compares it with torch.
NO_GROUP: Final = 99
_NAMES: Final = {
    0: "barrier monitored_barrier split_group",
    1: "new_subgroups",
    2: "_all_gather_base all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single "
    "all_reduce all_reduce_coalesced all_to_all broadcast broadcast_object_list",
    3: "_reduce_scatter_base gather gather_object reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor "
    "scatter scatter_object_list",
    4: "all_to_all_single",
    NO_GROUP: "new_group new_subgroups_by_enumeration",
}
GROUP_AT: Final = {name: at for at, names in _NAMES.items() for name in names.split()}
# The same for what lives elsewhere in torch, under names that mean nothing else.
ELSEWHERE: Final = {
    **{"DistributedDataParallel": 6, "FullyShardedDataParallel": 1},
    **dict.fromkeys(("fully_shard", "init_device_mesh"), NO_GROUP),
}
_GROUP_NAMES: Final = ("group", "process_group", "mesh", "device_mesh", "parent_pg")
# These need not wait for ranks that stay away (gloo, torch 2.13), but what is done with the group later does.
MAKE_GROUPS: Final = {
    *("new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group", "init_device_mesh", "fully_shard")
}
_C10D: Final = ("torch.distributed", "torch.distributed.distributed_c10d")
_VARIANT: Final = re.compile(r"^_|_(base|coalesced|into_tensor|single|tensor)$")
_PURE: Final = {"abs", "bool", "int", "len", "list", "max", "min", "range", "tuple"}
# Calls that run no collective, as far as a name tells. Any other that cannot be looked into might.
_HARMLESS: Final = {
    *(*_PURE, "enumerate", "float", "format", "isinstance", "print", "repr", "str", "type", "zip"),
    *(name for name in dir(builtins) if name.endswith(("Error", "Exception", "Interrupt"))),
}
_HARMLESS_METHODS: Final = {
    *("append", "clone", "cpu", "cuda", "detach", "extend", "fill_", "format", "item", "numpy", "sleep", "to"),
    *("tolist", "write", "zero_"),
}
_OPERATORS: Final = {
    getattr(ast, node): getattr(operator, function)
    for node, function in (
        *(("Add", "add"), ("Sub", "sub"), ("Mult", "mul"), ("Div", "truediv"), ("FloorDiv", "floordiv")),
        *(("Mod", "mod"), ("BitAnd", "and_"), ("BitOr", "or_"), ("BitXor", "xor"), ("RShift", "rshift")),
        *(("USub", "neg"), ("UAdd", "pos"), ("Invert", "invert"), ("Not", "not_"), ("Is", "is_"), ("IsNot", "is_not")),
        *(("Eq", "eq"), ("NotEq", "ne"), ("Lt", "lt"), ("LtE", "le"), ("Gt", "gt"), ("GtE", "ge")),
    )
} | {ast.In: lambda item, items: item in items, ast.NotIn: lambda item, items: item not in items}
_MOST_STEPS: Final = 5000  # statements on one rank: functions that call each other twice would go on for ever
_MOST_REPEATED: Final = 16  # collectives that a loop is written out to
_LONGEST: Final = 10_000  # range that is looked into


@dataclass(frozen=True, slots=True)
class Group:
    """A group whose members are known."""

    members: tuple[int, ...]
    made_at: int = 0  # line of the cell; 0: the default group


@dataclass(frozen=True, slots=True)
class Call:
    """A collective that a rank passes."""

    name: str
    group: Group
    site: tuple[int, int, int]  # line, column, and the line of the call that leads there, or 0
    is_async: bool
    is_branched: bool = field(compare=False)  # stands under a test that was decided
    # For each loop around it `*`, for each test on data `?`, and `!` for one on the rank while that is not known.
    within: str = field(default="", compare=False)

    @property
    def shape(self) -> tuple[str, str]:
        """Equal for what can meet: `all_gather` on one rank and `all_gather_into_tensor` on another do."""
        return _VARIANT.sub("", self.name), self.within


@dataclass(frozen=True, slots=True)
class _Api:
    """Something that was imported, by its full name: `torch.distributed.all_reduce`."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class _Function:
    """A function of the cell."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scopes: list[dict[str, Value]]


class GiveUpError(Exception):
    """A cell that takes too long to read, or whose default group is one of its own."""


_UNKNOWN: Final = object()
_RANKED: Final = object()  # unknown, but it depends on the rank
_ON: Final = frozenset({"on"})


class Reader(ast.NodeVisitor):
    """Goes through a cell as one rank would. Visiting an expression gives its value, visiting a statement its flow.

    Args:
        rank: this rank; None: any. Its tests on the rank are left open too, and it only looks whether they matter.
        world_size: how many there are.
    """

    def __init__(self, rank: int | None, world_size: int) -> None:
        self.rank = -1 if rank is None else rank
        self.trace: list[Call] = []
        self.unseen: set[ast.Call] = set()  # calls that it cannot look into: what they run is not in the trace
        self.exits: set[int] = set()  # lines of return, break, continue and raise
        self._world = Group(tuple(range(world_size)))
        self._own, text = (_RANKED, _RANKED) if rank is None else (rank, str(rank))
        self._environ = {"RANK": text, "LOCAL_RANK": text, "WORLD_SIZE": str(world_size)}
        self._scopes: list[dict[str, Value]] = [
            {
                **{"rank": self._own, "local_rank": self._own, "world_size": world_size, "__name__": "__main__"},
                **{"torch": _Api("torch"), "dist": _Api("torch.distributed")},
                # Imported in an earlier cell, as far as one can tell.
                **{"nn": _Api("torch.nn"), **{name: _Api(f"torch.{name}") for name in ELSEWHERE}},
            }
        ]
        self._replaced: set[str] = set()  # what the cell has put its own things into: `dist.barrier = mine`
        self._running: list[_Function] = []
        self._returned: list[Value] = []
        self._yields = False  # the function that runs is a generator
        self._called_at = 0  # line of the cell
        self._decided = 0  # tests that lead here
        self._ranked = 0  # tests so far that depend on a rank that is not known
        self._tells_apart = False
        self._steps = 0

    def tells_apart(self, cell: ast.Module) -> bool:
        """Whether the rank matters to what a cell passes."""
        self.block(cell.body)
        return self._tells_apart or any("!" in call.within for call in self.trace)

    def passed(self, group: Group) -> list[Call]:
        """The trace, as far as one group is concerned."""
        return [call for call in self.trace if call.group == group]

    def block(self, statements: Sequence[ast.stmt]) -> Flow:
        """Statements one after the other; where they may lead."""
        for number, statement in enumerate(statements):
            self._step()
            ranked = self._ranked
            flow: Flow = self.visit(statement)
            if "on" not in flow:
                return flow
            if flow != _ON:
                test = _RANKED if self._ranked > ranked else _UNKNOWN
                return flow - _ON | self._perhaps(test, partial(self.block, statements[number + 1 :]))
        return _ON

    def _step(self) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise GiveUpError

    def _perhaps(self, test: Value, run: Callable[[], T]) -> T:
        return self._either(test, run, lambda: None)[0]  # type: ignore[return-value]  # the way of `run`

    def _either(self, test: Value, *ways: Callable[[], T]) -> list[T]:
        """The way that a test takes, or both; then no more is known than what they agree on."""
        if _is_plain(test):
            self._decided += 1
            result = ways[not test]()
            self._decided -= 1
            return [result]
        self._ranked += test is _RANKED
        before = [dict(scope) for scope in self._scopes]
        results, traces, after = [], [], []
        for way in ways:
            for scope, names in zip(self._scopes, before, strict=True):
                scope.clear()
                scope.update(names)
            result, trace = self._aside(way)
            results.append(result)
            traces.append(trace)
            after.append([dict(scope) for scope in self._scopes])
        for scope, one, other in zip(self._scopes, *after, strict=True):
            for name in one | other:
                scope[name] = _agreed(one.get(name, _UNKNOWN), other.get(name, _UNKNOWN), test=test)
        shapes = [[(call.shape, call.group) for call in trace] for trace in traces]
        mark = "!" if test is _RANKED else "?"
        self.trace += traces[0] if shapes[0] == shapes[1] else _within(mark, [*traces[0], *traces[1]])
        return results

    def _aside(self, run: Callable[[], T]) -> tuple[T, list[Call]]:
        """A result, and what was passed on the way to it, kept out of the trace."""
        kept, self.trace = self.trace, []
        result, trace = run(), self.trace
        self.trace = kept
        return result, trace

    # ---- statements

    def generic_visit(self, node: ast.AST) -> Value:
        for child in ast.iter_child_nodes(node):
            self.visit(child)
        return _UNKNOWN if isinstance(node, ast.expr) else _ON

    def visit_Expr(self, node: ast.Expr) -> Flow:
        self.visit(node.value)
        return _ON

    def visit_If(self, node: ast.If) -> Flow:
        ways = partial(self.block, node.body), partial(self.block, node.orelse)
        return _union(self._either(self.visit(node.test), *ways))

    def visit_Match(self, node: ast.Match) -> Flow:
        return self._cases(self.visit(node.subject), node.cases)

    def _cases(self, subject: Value, cases: list[ast.match_case]) -> Flow:
        if not cases:
            return _ON
        case, *others = cases
        for part in ast.walk(case.pattern):
            if name := getattr(part, "name", None) or getattr(part, "rest", None):
                self._scopes[-1][name] = _UNKNOWN
        test = self._fits(case.pattern, subject)
        if case.guard is not None and (test is True or not _is_plain(test)):
            guard = self.visit(case.guard)
            test = guard if test is True or guard is False else _RANKED if _RANKED in (test, guard) else _UNKNOWN
        return _union(self._either(test, partial(self.block, case.body), partial(self._cases, subject, others)))

    def _fits(self, pattern: ast.pattern, subject: Value) -> Value:
        match pattern:
            case ast.MatchAs(pattern=None):
                return True
            case ast.MatchValue():
                return _compute(operator.eq, subject, self.visit(pattern.value))
            case ast.MatchOr():
                fits = [self._fits(each, subject) for each in pattern.patterns]
                return _strongest(fits, True, _RANKED, _UNKNOWN, False)
        return _RANKED if subject is _RANKED else _UNKNOWN

    def visit_For(self, node: ast.For | ast.AsyncFor) -> Flow:
        count = _compute(len, self.visit(node.iter))
        return self._loop(node, count, turns=count)

    visit_AsyncFor = visit_For

    def visit_While(self, node: ast.While) -> Flow:
        return self._loop(node, self.visit(node.test), turns=_UNKNOWN, is_endless=isinstance(node.test, ast.Constant))

    def _loop(self, node: Any, test: Value, turns: Value, is_endless: bool = False) -> Flow:
        if _is_plain(test) and not test:
            return self.block(node.orelse)
        begins = _is_plain(test)
        changing, ranked = list(_targets(node)), self._ranked
        self._forget(changing)
        flow, body = self._aside(partial(self.block, node.body))
        self._forget(changing)
        goes_on = bool(flow & {"on", "continue"})  # after its first turn
        goes_through = flow <= {"on", "continue"}
        if begins and not goes_on:
            self.trace += body
        elif _is_plain(turns) and goes_through and turns * len(body) <= _MOST_REPEATED:
            self.trace += body * turns
        else:
            is_ranked = _RANKED in (test, turns) or (self._ranked > ranked and not goes_through)
            self.trace += _within("!" if is_ranked else "*", body)
        leaves = flow & {"return", "raise"}
        if begins and "break" not in flow and (is_endless or not goes_on):
            return leaves or _ON
        if "break" in flow:
            return leaves | _ON | self._perhaps(_UNKNOWN, partial(self.block, node.orelse))
        return leaves | self.block(node.orelse)

    def visit_Try(self, node: Any) -> Flow:
        flow = self.block(node.body)
        if "on" in flow:
            flow = flow - _ON | self.block(node.orelse)
        if node.handlers:
            flow -= {"raise"}
        for handler in node.handlers:
            self._forget([handler.name] if handler.name else [])
            flow |= self._perhaps(_UNKNOWN, partial(self.block, handler.body))
        last = self.block(node.finalbody)
        return flow | last - _ON if "on" in last else last

    visit_TryStar = visit_Try

    def visit_With(self, node: ast.With | ast.AsyncWith) -> Flow:
        for item in node.items:
            self.visit(item)
        flow = self.block(node.body)
        return flow | _ON if "raise" in flow else flow  # it may be one that catches

    visit_AsyncWith = visit_With

    def visit_Return(self, node: ast.Return) -> Flow:
        self._returned.append(_settled(self.visit(node.value)) if node.value is not None else None)
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

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Value:
        for scope in self._scopes:  # in a comprehension the name belongs to the function around it
            scope.pop(node.target.id, None)
        return self.visit(node.value)

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> Flow:
        for scope in self._scopes:
            scope.update(dict.fromkeys(node.names, _UNKNOWN))
        return _ON

    visit_Nonlocal = visit_Global

    def visit_Import(self, node: ast.Import) -> Flow:
        for alias in node.names:
            first = alias.name.partition(".")[0]
            self._scopes[-1][alias.asname or first] = _Api(alias.name if alias.asname else first)
        return _ON

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Flow:
        for alias in node.names:
            is_all = alias.name == "*" and node.module in _C10D
            for name in (*GROUP_AT, "get_rank", "get_world_size") if is_all else [alias.name]:
                self._scopes[-1][alias.asname or name] = _Api(f"{node.module}.{name}")
        return _ON

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Flow:
        bases = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
        wrappers = [self.visit(base) for base in bases]
        is_plain = all(isinstance(each, _Api) and each.name.startswith("torch.") for each in wrappers)  # no_grad() ...
        self._scopes[-1][node.name] = _Function(node, list(self._scopes)) if is_plain else _UNKNOWN
        return _ON

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> Value:
        return _Function(node, list(self._scopes))

    def visit_ClassDef(self, node: ast.ClassDef) -> Flow:
        self._forget([node.name])
        return _ON

    def _forget(self, names: list[str]) -> None:
        for name in names:
            self._scopes[-1][name] = _UNKNOWN

    def _bind(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self._scopes[-1][target.id] = _settled(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, tuple | list) and len(value) == len(target.elts):
            for part, each in zip(target.elts, value, strict=True):
                self._bind(part, each)
        else:
            self.visit(target)

    # ---- expressions

    def visit_Constant(self, node: ast.Constant) -> Value:
        return node.value

    def visit_Name(self, node: ast.Name) -> Value:
        if _is_stored(node):
            self._forget([node.id])
            return _UNKNOWN
        for scope in reversed(self._scopes):
            if node.id in scope:
                return scope[node.id]
        return _Api(f"builtins.{node.id}") if node.id in _HARMLESS else _UNKNOWN

    def visit_Attribute(self, node: ast.Attribute) -> Value:
        base = self.visit(node.value)
        name = f"{base.name}.{node.attr}" if isinstance(base, _Api) else ""
        if _is_stored(node) and name:
            self._replaced.add(name)
        if not name or name in self._replaced:
            return _UNKNOWN
        return self._world if name.startswith("torch.distributed.") and node.attr == "WORLD" else _Api(name)

    def visit_Subscript(self, node: ast.Subscript) -> Value:
        base, key = self.visit(node.value), self.visit(node.slice)
        if isinstance(base, list | tuple) and key is _RANKED:
            return _RANKED
        if isinstance(base, _Api):
            if _is_stored(node):
                self._replaced.add(base.name)
            is_environ = base.name == "os.environ" and base.name not in self._replaced
            return self._environ.get(str(key), _UNKNOWN) if is_environ else _UNKNOWN
        is_item = isinstance(base, list | tuple) and isinstance(key, int) and -len(base) <= key < len(base)
        return base[key] if is_item else _UNKNOWN

    def visit_Tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Value:
        values = [self.visit(element) for element in node.elts]
        if any(isinstance(element, ast.Starred) for element in node.elts):
            return _UNKNOWN
        return tuple(values) if isinstance(node, ast.Tuple) else values

    visit_List = visit_Set = visit_Tuple

    def visit_IfExp(self, node: ast.IfExp) -> Value:
        test = self.visit(node.test)
        return _agreed(*self._either(test, partial(self.visit, node.body), partial(self.visit, node.orelse)), test=test)

    def visit_BoolOp(self, node: ast.BoolOp) -> Value:
        return self._bool(node.values, isinstance(node.op, ast.Or))

    def _bool(self, operands: list[ast.expr], decides: bool) -> Value:
        first = self.visit(operands[0])
        if len(operands) == 1 or (_is_plain(first) and bool(first) is decides):
            return first
        rest = partial(self._bool, operands[1:], decides)
        if _is_plain(first):
            return self._either(True, rest)[0]
        second = self._perhaps(first, rest)
        if _is_plain(second) and bool(second) is decides:
            return decides
        return _strongest([first, second, _UNKNOWN], _RANKED, _UNKNOWN)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Value:
        return _compute(_OPERATORS[type(node.op)], self.visit(node.operand))

    def visit_BinOp(self, node: ast.BinOp) -> Value:
        values = self.visit(node.left), self.visit(node.right)
        function = _OPERATORS.get(type(node.op))
        is_number = not any(isinstance(value, str | list | tuple | range) for value in values)  # [0] * 10**9 takes long
        return _compute(function, *values) if function is not None and is_number else _UNKNOWN

    def visit_Compare(self, node: ast.Compare) -> Value:
        values = [self.visit(node.left), *map(self.visit, node.comparators)]
        tests = zip(node.ops, values, values[1:], strict=False)
        results = [_compute(_OPERATORS[type(test)], *two) for test, *two in tests]
        return _strongest(results, False, _RANKED, _UNKNOWN, True)

    def visit_ListComp(self, node: Any) -> Value:
        self._scopes.append({})
        _, body = self._aside(partial(self._generate, node))
        self._scopes.pop()
        self.trace += _within("*", body)
        return _UNKNOWN

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def _generate(self, node: Any) -> None:
        tests = [test for generator in node.generators for test in generator.ifs]
        for generator in node.generators:
            self.visit(generator.iter)
            self.visit(generator.target)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        test = self._bool(tests, False) if tests else True
        self._either(test, lambda: list(map(self.visit, parts)), list)

    # ---- calls

    def visit_Call(self, node: ast.Call) -> Value:
        function = self.visit(node.func)
        given = [self.visit(argument) for argument in node.args]
        named = {str(keyword.arg): self.visit(keyword.value) for keyword in node.keywords}
        is_whole = "None" not in named and not any(isinstance(argument, ast.Starred) for argument in node.args)
        if isinstance(function, _Function):
            return self._inline(function, node, given if is_whole else None, named)
        if isinstance(function, _Api):
            return self._api(function.name, node, given, named, is_whole)
        self._tells_apart |= function is _RANKED
        if not (isinstance(node.func, ast.Attribute) and node.func.attr in _HARMLESS_METHODS):
            self.unseen.add(node)
        return _UNKNOWN

    def visit_Yield(self, node: ast.Yield | ast.YieldFrom) -> Value:
        self._yields = True
        return self.generic_visit(node)

    visit_YieldFrom = visit_Yield

    def _inline(self, function: _Function, node: ast.Call, given: list[Value] | None, named: dict[str, Value]) -> Value:
        """What a function of the cell does. `given` is None where it cannot be told which argument is which."""
        self._step()
        if function in self._running:
            self.unseen.add(node)
            return _UNKNOWN
        kept = self._scopes, self._returned, self._called_at, self._yields
        self._scopes, self._returned, self._yields = [*function.scopes, {}], [], False
        self._bind_arguments(function.node.args, given, named)
        self._called_at = self._called_at or node.lineno
        self._running.append(function)
        result, trace = self._aside(partial(self._body, function.node.body))
        self._running.pop()
        yields = self._yields
        self._scopes, self._returned, self._called_at, self._yields = kept
        if yields:  # calling a generator runs nothing yet
            self.unseen.add(node)
            return _UNKNOWN
        self.trace += trace
        return result

    def _body(self, body: ast.expr | list[ast.stmt]) -> Value:
        if isinstance(body, ast.expr):
            return self.visit(body)
        ranked = self._ranked
        flow = self.block(body)
        test = _RANKED if self._ranked > ranked else _UNKNOWN
        return _agreed(*self._returned, *([None] if "on" in flow else []), test=test)

    def _bind_arguments(self, takes: ast.arguments, given: list[Value] | None, named: dict[str, Value]) -> None:
        names = [each.arg for each in (*takes.posonlyargs, *takes.args)]
        known: dict[str, Value] = {}
        if given is not None:
            defaults = zip(reversed(names), reversed(takes.defaults), strict=False)
            known = {name: self.visit(default) for name, default in defaults}
            for each, default in zip(takes.kwonlyargs, takes.kw_defaults, strict=True):
                known[each.arg] = _UNKNOWN if default is None else self.visit(default)
            known |= {**dict(zip(names, given, strict=False)), **named}
        others = [each.arg for each in (*takes.kwonlyargs, takes.vararg, takes.kwarg) if each is not None]
        self._forget([*names, *others])
        self._scopes[-1].update({name: _settled(value) for name, value in known.items()})

    def _api(
        self, full_name: str, node: ast.Call, given: list[Value], named: dict[str, Value], is_whole: bool
    ) -> Value:
        module, _, name = full_name.rpartition(".")
        is_c10d, is_torch = module in _C10D, module.partition(".")[0] == "torch"
        if is_c10d and name == "init_process_group" and ("store" in named or "fake" in (*given, *named.values())):
            raise GiveUpError
        at = GROUP_AT.get(name) if is_c10d else ELSEWHERE.get(name) if is_torch else None
        if at is not None and is_whole:
            return self._collective(name, node, at, given, named)
        if is_c10d and name in ("get_rank", "get_world_size") and is_whole:
            group = self._group(0, given, named)
            return self._place(group)[name == "get_world_size"] if isinstance(group, Group) else _UNKNOWN
        if module == "builtins":
            return _compute(getattr(builtins, name), *given) if name in _PURE and not named else _UNKNOWN
        if full_name in ("os.getenv", "os.environ.get") and "os.environ" not in self._replaced:
            return self._environ.get(str(given[0]), _UNKNOWN) if given else _UNKNOWN
        is_harmless = is_c10d or (is_torch and not module.startswith("torch.distributed"))
        if not is_harmless and module.partition(".")[0] not in sys.stdlib_module_names:
            self.unseen.add(node)
        return _UNKNOWN

    def _collective(self, name: str, node: ast.Call, at: int, given: list[Value], named: dict[str, Value]) -> Value:
        group = self._group(at, given, named)
        self._tells_apart |= group is _RANKED
        # Only members call the first; the second says that a model is not sent to the other ranks.
        is_for_all = named.get("use_local_synchronization", False) is False and named.get("init_sync", True) is True
        if isinstance(group, Group) and is_for_all:
            is_async = [*given[at + 1 : at + 2], named.get("async_op", False)][0] is not False
            site = node.lineno, node.col_offset, self._called_at
            self.trace.append(Call(name, group, site, is_async, self._decided > 0))
        if name != "new_group":
            return _UNKNOWN
        ranks = named.get("ranks", given[0] if given else None)
        members = self._world.members if ranks is None else _compute(sorted, ranks)
        if isinstance(members, list | tuple) and all(isinstance(member, int) for member in members):
            return Group(tuple(members), node.lineno)
        return _RANKED if members is _RANKED else _UNKNOWN

    def _place(self, group: Group) -> tuple[Value, Value]:
        """What `get_rank` and `get_world_size` say about a group."""
        if group == self._world:
            return self._own, len(group.members)
        if self._own is _RANKED:
            return _RANKED, _RANKED
        is_member = self.rank in group.members
        return (group.members.index(self.rank), len(group.members)) if is_member else (-1, -1)

    def _group(self, at: int, given: list[Value], named: dict[str, Value]) -> Value:
        """The group that a call names, or the default one."""
        values = [*given[at : at + 1], *(named[name] for name in _GROUP_NAMES if name in named)]
        return next((value for value in values if value is not None), self._world)


def _within(mark: str, trace: list[Call]) -> list[Call]:
    return [replace(call, within=mark + call.within) for call in trace]


def _targets(statement: Any) -> Iterator[str]:
    """The names that a statement and those inside it set, without a look into expressions."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AugAssign(target=ast.Name(id=name)):
            yield name  # most of them, and fast
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
        yield from (each.id for each in ast.walk(part) if isinstance(each, ast.Name) and _is_stored(each))
    for inside in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(statement, inside, ()):
            yield from _targets(each)


def _is_stored(node: Any) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _is_plain(value: Value) -> bool:
    if isinstance(value, range):
        return (value.stop - value.start) // value.step <= _LONGEST
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str)


def _compute(function: Callable[..., Value], *values: Value) -> Value:
    if any(map(_is_ranked, values)):
        return _RANKED
    if not all(map(_is_plain, values)):
        return _UNKNOWN
    try:
        return function(*values)
    except (TypeError, ValueError, ArithmeticError):
        return _UNKNOWN  # the rank will say so


def _is_ranked(value: Value) -> bool:
    return value is _RANKED or (isinstance(value, list | tuple) and any(map(_is_ranked, value)))


def _strongest(values: list[Value], *order: Value) -> Value:
    """The first in an order that is among the values: what decides an `and` or an `or`."""
    return next(each for each in order if each in values)


def _settled(value: Value) -> Value:
    """A list that has a name may change whenever somebody uses the name."""
    if isinstance(value, tuple):
        return tuple(map(_settled, value))
    return _UNKNOWN if isinstance(value, list) else value


def _agreed(*values: Value, test: Value) -> Value:
    """What all of them are; not known if they differ because of a test, or if there is none."""
    first = values[0] if values else _UNKNOWN
    if all(value == first for value in values):
        return first
    return _RANKED if test is _RANKED or any(map(_is_ranked, values)) else _UNKNOWN


def _union(flows: list[Flow]) -> Flow:
    return frozenset().union(*flows)
