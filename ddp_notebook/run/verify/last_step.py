"""Find the training step in the text of the last training cell."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ddp_notebook.errors import UsageError

_ASKS = "give the loss and the batch, such as %ddp_verify F.cross_entropy(model(x), y) --batch x,y"
_AVERAGES = re.compile(r"\b(all_reduce|reduce_scatter|all_gather)\w*\(")  # a call that may combine gradients of ranks
_SCHEDULES = re.compile(r"_?(Schedule(GPipe|1F1B|Interleaved|LoopedBFS|ZBV|DualPipe)|PipelineSchedule)")  # of torch
_Function = ast.FunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundStep:
    """Training step in a cell.

    Attributes:
        before: statements that compute the names in the loss.
        loss: the differentiated expression.
        after: statements that change the gradients before the optimizer's step; "": none.
        batch: names with the batch.
        is_sure: the names are those of a loop over the data, or given; False: the ranks select the tensors among them.
        at: index of the cell among the given codes.
        may_accumulate: the optimizer's step is after the loop with `backward`, or inside of an `if` with a remainder,
            such as `(i + 1) % 4 == 0`.
        has_no_sync: `with model.no_sync() if ... else nullcontext():` is around `backward`, and is left out.
    """

    before: str
    loss: str
    after: str
    batch: tuple[str, ...]
    is_sure: bool
    at: int = 0
    may_accumulate: bool = False
    has_no_sync: bool = False


def averages_itself(codes: Sequence[str]) -> bool:
    """Return whether the last training cell, or a function that it may call, combines gradients of the ranks.

    Args:
        codes: texts of the last cells, the newest first.

    Example:
        >>> averages_itself(["for p in model.parameters(): dist.all_reduce(p.grad)"])
        True
    """
    return any(_AVERAGES.search(code) and "grad" in code for code in codes)


def find_step(codes: Sequence[str], data: Collection[str] = (), given: Collection[str] = ()) -> FoundStep:
    """Return the step of the last training cell.

    Args:
        codes: texts of the last cells, the newest first.
        data: names of variables that hold data, see `rank.verify.data_names`. Statements that only read such names
            are not repeated: their results are the batch.
        given: names with the batch; (): those that the step reads.

    Raises:
        UsageError: no cell calls `backward`, or the step is not clear.

    Example:
        >>> find_step(["for x, y in data:\\n    loss = f(model(x), y)\\n    loss.backward()\\n    opt.step()"]).before
        'loss = f(model(x), y)'
    """
    trees = {at: tree for at, code in enumerate(codes) if (tree := _parsed(code)) is not None}
    functions: dict[str, _Function] = {}
    for tree in reversed(trees.values()):  # later definitions replace earlier ones
        functions |= {node.name: node for node in ast.walk(tree) if isinstance(node, _Function)}
    training = _training_functions(trees.values())
    schedules = {name for tree in trees.values() for name in _pipeline_schedules(tree)}
    for at, tree in trees.items():
        _refuse_other_training(tree, schedules)
        direct = list(_paths(tree.body, _is_backward))
        called = list(_paths(tree.body, lambda one: _trains(one, functions)))
        if len(direct) + len(called) > 1:
            raise UsageError(f"the last training cell calls backward in several places: {_ASKS}")
        if direct:
            return replace(_step_of(direct[0], functions, None, data, given), at=at)
        if called:
            return replace(_step_in_function(called[0], functions, given), at=at)
        if name := next((one for one in _called_outside(tree) if one in training), ""):
            raise UsageError(f"{name}() calls backward, and its step is not clear: {_ASKS}")
    raise UsageError(f"no cell has called backward: {_ASKS}")


def _parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except SyntaxError:
        return None


def _refuse_other_training(tree: ast.Module, schedules: Collection[str]) -> None:
    """Raise an error for a cell with training that is not data parallel."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if not isinstance(call.func, ast.Attribute):
            continue
        of = ast.unparse(call.func.value)
        if call.func.attr == "step" and of in schedules:
            raise UsageError(
                f"the last training cell runs a pipeline ({of}.step), whose ranks compute different layers: "
                "%ddp_verify compares ranks that compute the same model for parts of the batch"
            )
        if call.func.attr == "backward" and re.search(r"\bdist\w*[._]autograd$", of):
            raise UsageError(
                f"the last training cell uses distributed autograd of RPC ({of}.backward), which stores no gradients "
                "in parameters: %ddp_verify cannot compare it"
            )


def _pipeline_schedules(tree: ast.Module) -> Iterator[str]:
    """Yield the variables with a schedule of `torch.distributed.pipelining`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = ast.unparse(node.value.func).rpartition(".")[2]
            if _SCHEDULES.match(made):
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _training_functions(trees: Iterable[ast.Module]) -> set[str]:
    """Return the functions and methods that call `backward`, also in a function that they call."""
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, _Function)]
    found = {one.name for one in functions if _backward_calls(one)}
    calls = {one.name: {name for part in one.body for name in _called(part)} for one in functions}
    while more := {name for name, called in calls.items() if called & found} - found:
        found |= more
    return found - {"backward", "forward", "__init__"}


def _called(node: ast.AST) -> Iterator[str]:
    """Yield the names of called functions and methods, and of functions in arguments."""
    for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
        yield from (name for one in (call.func, *call.args) for name in _name_of(one))


def _name_of(node: ast.expr) -> list[str]:
    """Return the name of a function or a method; [] for other expressions."""
    if isinstance(node, ast.Name):
        return [node.id]
    return [node.attr] if isinstance(node, ast.Attribute) else []


def _called_outside(node: ast.AST) -> Iterator[str]:
    """Yield the names of functions that a cell calls outside of its functions and classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(child, ast.Call):
            yield from (name for one in (child.func, *child.args) for name in _name_of(one))
        yield from _called_outside(child)


@dataclass(frozen=True, slots=True)
class _Path:
    """A statement, the statements around it, and the loop targets."""

    statements: list[ast.stmt]
    at: int
    targets: frozenset[str]
    unclear: str  # the kind of an enclosing statement that changes the step; "": none
    is_before_step: bool = False  # the optimizer's step is after the loop around the statement
    has_no_sync: bool = False  # a conditional `no_sync` is around the statement


def _paths(
    statements: list[ast.stmt], is_wanted: object, targets: frozenset[str] = frozenset(), unclear: str = ""
) -> Iterator[_Path]:
    """Yield the wanted statements, outside of functions and classes."""
    for at, one in enumerate(statements):
        if is_wanted(one):  # type: ignore[operator]
            yield _Path(statements, at, targets, unclear)
        elif isinstance(one, ast.For | ast.While):
            inside = targets | _names(one.target, ast.Store) if isinstance(one, ast.For) else targets
            is_before = not any(map(_calls_step, one.body)) and any(map(_calls_step, statements[at + 1 :]))
            for path in _paths(one.body, is_wanted, inside, unclear):
                yield replace(path, is_before_step=path.is_before_step or is_before)
        elif isinstance(one, ast.With) and _is_conditional_no_sync(one):
            for path in _paths(one.body, is_wanted, targets, unclear):
                if path.statements is one.body:
                    around = [*statements[:at], *one.body, *statements[at + 1 :]]
                    path = replace(path, statements=around, at=at + path.at)
                yield replace(path, has_no_sync=True)
        elif isinstance(one, ast.With):
            yield from _paths(one.body, is_wanted, targets, "with")
        elif isinstance(one, ast.If | ast.Try):
            for body in (one.body, one.orelse):
                yield from _paths(body, is_wanted, targets, "if" if isinstance(one, ast.If) else "try")


def _is_conditional_no_sync(node: ast.With) -> bool:
    """Return whether a `with` is the usual one of gradient accumulation, such as
    `with model.no_sync() if (i + 1) % 4 else nullcontext():`."""
    context = node.items[0].context_expr
    if len(node.items) > 1 or not isinstance(context, ast.IfExp):
        return False
    branches = [_name_of(one.func) for one in (context.body, context.orelse) if isinstance(one, ast.Call)]
    return sorted(branches) == [["no_sync"], ["nullcontext"]]


def _calls_step(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Call) and _name_of(one.func) == ["step"] for one in ast.walk(node))


def _may_accumulate(path: _Path) -> bool:
    return path.is_before_step or any(map(_steps_sometimes, path.statements[path.at + 1 :]))


def _steps_sometimes(node: ast.AST) -> bool:
    """Return whether a statement is an `if` with a remainder around the optimizer's step."""
    if not isinstance(node, ast.If) or not _calls_step(node):
        return False
    return any(isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod) for one in ast.walk(node.test))


def _names(node: ast.AST, kind: type[ast.expr_context]) -> frozenset[str]:
    return frozenset(one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, kind))


def _backward_calls(node: ast.AST) -> list[ast.Call]:
    return [
        one
        for one in ast.walk(node)
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr == "backward"
    ]


def _is_backward(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and bool(_backward_calls(statement))


def _trains(statement: ast.stmt, functions: Mapping[str, _Function]) -> bool:
    """Return whether a statement calls a function of the user that calls `backward`."""
    if not isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign):
        return False
    return bool(_training_calls(statement, functions))


def _training_calls(statement: ast.stmt, functions: Mapping[str, _Function]) -> list[tuple[_Function, ast.Call | None]]:
    """Return the functions with `backward` that a statement calls, with the call.

    A closure has no call with arguments: `optimizer.step(closure)` calls it.
    """
    found: list[tuple[_Function, ast.Call | None]] = []
    for one in ast.walk(statement):
        if not isinstance(one, ast.Call):
            continue
        if isinstance(one.func, ast.Name):
            found += [(functions[name], one) for name in _name_of(one.func) if name in functions]
        elif isinstance(one.func, ast.Attribute) and one.func.attr == "step":
            closures = [*one.args, *(keyword.value for keyword in one.keywords)]
            found += [(functions[name], None) for part in closures for name in _name_of(part) if name in functions]
    return [(function, call) for function, call in found if _backward_calls(function)]


def _step_of(
    path: _Path,
    functions: Mapping[str, _Function],
    bound: Mapping[str, str] | None,
    data: Collection[str],
    given: Collection[str],
) -> FoundStep:
    """Return the step around a `backward` statement.

    Args:
        bound: in a function, the arguments by parameter.
        data, given: see `find_step`.
    """
    if path.unclear:
        raise UsageError(f"backward is inside of {path.unclear!r} in the last training cell: {_ASKS}")
    [call, *more] = _backward_calls(path.statements[path.at])
    if more or call.args or not isinstance(call.func, ast.Attribute):
        raise UsageError(f"the loss is not clear in {ast.unparse(call)!r}: {_ASKS}")
    loss = call.func.value
    needed = set(_names(loss, ast.Load))
    before: list[str] = []
    read: set[str] = set()  # names assigned by a statement that reads the data, such as x, y = next(batches)
    made: set[str] = set()  # names assigned by another statement that only reads data, such as x = data[step]
    for one in reversed(path.statements[: path.at]):
        assigned = (_assigned(one) & needed) - set(given)
        if not assigned:
            continue
        if _reads_data(one, functions, data):
            made |= assigned
            needed -= assigned
            continue
        if any(isinstance(part, ast.Name) and part.id == "next" for part in ast.walk(one)):
            read |= assigned
            continue
        before.insert(0, ast.unparse(one))
        needed = (needed - assigned if isinstance(one, ast.Assign) else needed) | _names(one, ast.Load)
    for name in sorted(needed & set(bound or {})):
        argument = (bound or {})[name]
        if argument != name:
            before.insert(0, f"{name} = {argument}")
        needed = (needed - {name}) | _names(ast.parse(argument), ast.Load)
    batch = set(given) or (needed & path.targets) | read | made
    return FoundStep(
        before="\n".join(before),
        loss=ast.unparse(loss),
        after=_after(path, functions),
        batch=tuple(sorted(batch or needed)),
        is_sure=bool(given) or (bool(batch) and made <= path.targets),
        may_accumulate=_may_accumulate(path),
        has_no_sync=path.has_no_sync,
    )


def _reads_data(node: ast.AST, functions: Mapping[str, _Function], data: Collection[str]) -> bool:
    """Return whether an assignment, or a function of the user, computes only with data."""
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.FunctionDef):
        return False
    own = _names(node, ast.Store) if isinstance(node, ast.FunctionDef) else frozenset[str]()
    if isinstance(node, ast.FunctionDef):
        own |= {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)} | {node.name}
    inside = {
        one for part in ast.walk(node) if isinstance(part, ast.comprehension) for one in _names(part.target, ast.Store)
    }
    others = _names(node, ast.Load) - own - inside - set(data) - set(dir(builtins))
    return all(name in functions and _reads_data(functions[name], functions, data) for name in others)


def _assigned(statement: ast.stmt) -> frozenset[str]:
    """Return the names that a statement assigns, also inside of a `with`."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return frozenset()
    return _names(statement, ast.Store)


def _after(path: _Path, functions: Mapping[str, _Function]) -> str:
    """Return the statements between `backward` and the optimizer's step, if they combine gradients of the ranks."""
    found: list[ast.stmt] = []
    for one in path.statements[path.at + 1 :]:
        if any(isinstance(part, ast.Attribute) and part.attr == "step" for part in ast.walk(one)):
            break
        if "grad" in ast.unparse(one) or _combines(one, functions) or "parameters(" in ast.unparse(one):
            found.append(one)
    return "\n".join(map(ast.unparse, found)) if any(_combines(one, functions) for one in found) else ""


def _combines(statement: ast.stmt, functions: Mapping[str, _Function]) -> bool:
    """Return whether a statement calls a collective, also in a function of the user."""
    called = [functions[name] for name in _names(statement, ast.Load) if name in functions]
    return any(_AVERAGES.search(ast.unparse(one)) for one in (statement, *called))


def _step_in_function(path: _Path, functions: Mapping[str, _Function], given: Collection[str]) -> FoundStep:
    """Return the step of a function that the training cell calls for each batch."""
    calls = _training_calls(path.statements[path.at], functions)
    function, call = calls[0]
    inside = list(_paths(function.body, _is_backward))
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    arguments, keywords = ([], []) if call is None else (call.args, call.keywords)
    if len(calls) != 1 or len(inside) != 1 or inside[0].targets or len(arguments) > len(names):
        raise UsageError(f"the step in {function.name}() is not clear: {_ASKS}")
    bound = {name: ast.unparse(value) for name, value in zip(names, arguments, strict=False)}
    bound |= {one.arg: ast.unparse(one.value) for one in keywords if one.arg}
    step = replace(inside[0], targets=path.targets, has_no_sync=path.has_no_sync or inside[0].has_no_sync)
    return _step_of(step, functions, bound, (), given)
