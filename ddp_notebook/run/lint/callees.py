"""Effect of a function call on a rank: a collective, a function of the cell, or an unknown function."""

from __future__ import annotations

import ast
import builtins
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Final

from ddp_notebook.run.lint.branches import Flow, GiveUpError
from ddp_notebook.run.lint.expressions import PURE, Expressions
from ddp_notebook.run.lint.groups import C10D, ELSEWHERE, GROUP_AT, GROUP_NAMES, ForeseenCollective, ForeseenGroup
from ddp_notebook.run.lint.known_values import (
    RANKED,
    UNKNOWN,
    Api,
    Function,
    Value,
    agreed,
    compute,
    settled,
)

# Methods that run no collective, judged by their names.
_HARMLESS_METHODS: Final = {
    *("append", "clone", "cpu", "cuda", "detach", "extend", "fill_", "format", "item", "numpy", "sleep", "to"),
    *("tolist", "write", "zero_"),
}


class Functions(Expressions, ABC):
    """Visiting a function call returns the result of the call."""

    @abstractmethod
    def block(self, statements: Sequence[ast.stmt]) -> Flow:
        """Visit statements in order, and return the possible continuations."""

    def visit_Call(self, node: ast.Call) -> Value:
        function = self.visit(node.func)
        given = [self.visit(argument) for argument in node.args]
        named = {str(keyword.arg): self.visit(keyword.value) for keyword in node.keywords}
        is_whole = "None" not in named and not any(isinstance(argument, ast.Starred) for argument in node.args)
        if isinstance(function, Function):
            return self._inline(function, node, given if is_whole else None, named)
        if isinstance(function, Api):
            return self._api(function.name, node, given, named, is_whole)
        self._tells_apart |= function is RANKED
        if not (isinstance(node.func, ast.Attribute) and node.func.attr in _HARMLESS_METHODS):
            self.unseen.add(node)
        return UNKNOWN

    def visit_Yield(self, node: ast.Yield | ast.YieldFrom) -> Value:
        self._yields = True
        return self.generic_visit(node)

    visit_YieldFrom = visit_Yield

    def _inline(self, function: Function, node: ast.Call, given: list[Value] | None, named: dict[str, Value]) -> Value:
        """Run a function of the cell. `given` is None if the assignment of arguments to parameters is unknown."""
        self._step()
        if function in self._running:
            self.unseen.add(node)
            return UNKNOWN
        kept = self._scopes, self._returned, self._called_at, self._yields
        self._scopes, self._returned, self._yields = [*function.scopes, {}], [], False
        self._bind_arguments(function.node.args, given, named)
        self._called_at = self._called_at or node.lineno
        self._running.append(function)
        result, trace = self._aside(partial(self._body, function.node.body))
        self._running.pop()
        yields = self._yields
        self._scopes, self._returned, self._called_at, self._yields = kept
        if yields:  # a generator runs nothing until it is iterated
            self.unseen.add(node)
            return UNKNOWN
        self.trace += trace
        return result

    def _body(self, body: ast.expr | list[ast.stmt]) -> Value:
        if isinstance(body, ast.expr):
            return self.visit(body)
        ranked = self._ranked
        flow = self.block(body)
        test = RANKED if self._ranked > ranked else UNKNOWN
        return agreed(*self._returned, *([None] if "on" in flow else []), test=test)

    def _bind_arguments(self, takes: ast.arguments, given: list[Value] | None, named: dict[str, Value]) -> None:
        names = [each.arg for each in (*takes.posonlyargs, *takes.args)]
        known: dict[str, Value] = {}
        if given is not None:
            defaults = zip(reversed(names), reversed(takes.defaults), strict=False)
            known = {name: self.visit(default) for name, default in defaults}
            for each, default in zip(takes.kwonlyargs, takes.kw_defaults, strict=True):
                known[each.arg] = UNKNOWN if default is None else self.visit(default)
            known |= {**dict(zip(names, given, strict=False)), **named}
        others = [each.arg for each in (*takes.kwonlyargs, takes.vararg, takes.kwarg) if each is not None]
        self._forget([*names, *others])
        self._scopes[-1].update({name: settled(value) for name, value in known.items()})

    def _api(
        self, full_name: str, node: ast.Call, given: list[Value], named: dict[str, Value], is_whole: bool
    ) -> Value:
        """Return the value of a call of a library function."""
        module, _, name = full_name.rpartition(".")
        package = module.partition(".")[0]
        if module in C10D:
            return self._c10d(name, node, given, named, is_whole)
        if package == "torch" and (at := ELSEWHERE.get(name)) is not None and is_whole:
            return self._collective(name, node, at, given, named)
        if module == "builtins":
            return compute(getattr(builtins, name), *given) if name in PURE and not named else UNKNOWN
        if full_name in ("os.getenv", "os.environ.get") and "os.environ" not in self._replaced:
            return self._environ.get(str(given[0]), UNKNOWN) if given else UNKNOWN
        may_communicate = package != "torch" or module.startswith("torch.distributed")
        if may_communicate and package not in sys.stdlib_module_names:
            self.unseen.add(node)
        return UNKNOWN

    def _c10d(self, name: str, node: ast.Call, given: list[Value], named: dict[str, Value], is_whole: bool) -> Value:
        """Return the value of a call of a `torch.distributed` function."""
        if name == "init_process_group" and ("store" in named or "fake" in (*given, *named.values())):
            raise GiveUpError
        if not is_whole:
            return UNKNOWN
        if (at := GROUP_AT.get(name)) is not None:
            return self._collective(name, node, at, given, named)
        if name in ("get_rank", "get_world_size"):
            group = self._group(0, given, named)
            return self._place(group)[name == "get_world_size"] if isinstance(group, ForeseenGroup) else UNKNOWN
        return UNKNOWN

    def _collective(self, name: str, node: ast.Call, at: int, given: list[Value], named: dict[str, Value]) -> Value:
        group = self._group(at, given, named)
        self._tells_apart |= group is RANKED
        # With `use_local_synchronization` only members call it. With `init_sync=False` the model is not sent to other
        # ranks.
        is_for_all = named.get("use_local_synchronization", False) is False and named.get("init_sync", True) is True
        if isinstance(group, ForeseenGroup) and is_for_all:
            is_async = [*given[at + 1 : at + 2], named.get("async_op", False)][0] is not False
            site = node.lineno, node.col_offset, self._called_at
            self.trace.append(ForeseenCollective(name, group, site, is_async, self._decided > 0))
        if name != "new_group":
            return UNKNOWN
        ranks = named.get("ranks", given[0] if given else None)
        members = self._world.members if ranks is None else compute(sorted, ranks)
        if isinstance(members, list | tuple) and all(isinstance(member, int) for member in members):
            return ForeseenGroup(tuple(members), node.lineno)
        return RANKED if members is RANKED else UNKNOWN

    def _place(self, group: ForeseenGroup) -> tuple[Value, Value]:
        """Return the values of `get_rank` and `get_world_size` for a group."""
        if group == self._world:
            return self._own, len(group.members)
        if self._own is RANKED:
            return RANKED, RANKED
        is_member = self.rank in group.members
        return (group.members.index(self.rank), len(group.members)) if is_member else (-1, -1)

    def _group(self, at: int, given: list[Value], named: dict[str, Value]) -> Value:
        """Return the group argument of a call, or the default group."""
        values = [*given[at : at + 1], *(named[name] for name in GROUP_NAMES if name in named)]
        return next((value for value in values if value is not None), self._world)
