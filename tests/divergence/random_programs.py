"""Random programs whose ranks may diverge, with a log of each decision that a rank made."""

from __future__ import annotations

import ast
import random
from dataclasses import dataclass, field
from typing import Any

_CONDITIONS = ("rank == 0", "n % 2 == rank", "n > 2", "n == 1 + rank", "rank == 1 and n == 2", "n % 3 == 1", "True")
_COUNTS = ("range(2)", "range(2 + rank)", "range(1, 4)", "range(rank, 3)", "range(rank)")


class Generator:
    """Writes random programs of nested statements.

    Args:
        seed: seed of the random choices.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lines: list[str] = []
        self._functions: list[str] = []
        self._left = 14  # statements

    def code(self) -> str:
        """Return a program."""
        self._lines = ["n = 0"]
        for name in ("f", "g")[: self._random.randrange(3)]:
            self._lines.append(f"def {name}(n):")
            self._block(1, in_loop=False, in_function=True)
            self._functions.append(name)
        self._block(0, in_loop=False, in_function=False)
        return "\n".join(self._lines)

    def _block(self, depth: int, *, in_loop: bool, in_function: bool) -> None:
        for _ in range(self._random.randint(1, 3)):
            self._statement(depth, in_loop=in_loop, in_function=in_function)

    def _statement(self, depth: int, *, in_loop: bool, in_function: bool) -> None:
        self._left -= 1
        choice, pad = self._random, "    " * depth
        kinds = ["collective"] * 3 + ["count"]
        if depth < 4 and self._left > 0:
            kinds += ["if", "if", "else", "for", "for", "try", "while"]
        if in_loop:
            kinds += ["break", "continue"]
        if in_function:
            kinds += ["return"]
        if self._functions:
            kinds += ["call", "call"]
        kind = choice.choice(kinds)
        more = {"in_loop": in_loop, "in_function": in_function}
        condition = choice.choice(_CONDITIONS)
        match kind:
            case "collective":
                op = choice.choice(("all_reduce", "all_reduce", "broadcast", "barrier"))
                self._lines.append(f"{pad}dist.{op}(n)")
            case "count":
                self._lines.append(f"{pad}n += 1")
            case "call":
                self._lines.append(f"{pad}{choice.choice(self._functions)}(n)")
            case "if" | "else":
                self._lines.append(f"{pad}if {condition}:")
                self._block(depth + 1, **more)
                if kind == "else":
                    self._lines.append(f"{pad}else:")
                    self._block(depth + 1, **more)
            case "for":
                self._lines.append(f"{pad}for n in {choice.choice(_COUNTS)}:")
                self._block(depth + 1, in_loop=True, in_function=in_function)
            case "while":
                self._lines += [f"{pad}n = 0", f"{pad}while n < {choice.choice(('2', '1 + rank', '3'))}:"]
                self._lines.append(f"{pad}    n += 1")
                self._block(depth + 1, in_loop=True, in_function=in_function)
            case "try":
                self._lines.append(f"{pad}try:")
                if is_late := choice.random() < 0.5:
                    self._block(depth + 1, **more)
                self._lines += [f"{pad}    if {condition}:", f"{pad}        raise ValueError(n)"]
                if not is_late:
                    self._block(depth + 1, **more)
                self._lines.append(f"{pad}except ValueError:")
                self._block(depth + 1, **more)
            case "break" | "continue" | "return":
                self._lines += [f"{pad}if {condition}:", f"{pad}    {kind}"]


@dataclass
class Log:
    """Decisions of one rank, each with the number of collectives before it."""

    entries: list[tuple[int, str, int, Any]] = field(default_factory=list)  # collectives so far, kind, line, value
    events: list[int] = field(default_factory=list)  # lines of the collectives

    def note(self, kind: str, line: int, value: Any = None) -> Any:
        self.entries.append((len(self.events), kind, line, value))
        if len(self.entries) > 5000:
            raise RuntimeError("endless program")
        return value

    def passes(self, line: int, values: Any) -> Any:
        """Yield the values of a loop, and note each pass and the entry."""
        self.note("enter", line)
        for value in values:
            self.note("pass", line)
            yield value


class Instrument(ast.NodeTransformer):
    """Adds a note to each branch, loop, handler and return of a program."""

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        node.test = _call("note", ast.Constant("if"), ast.Constant(node.lineno), _bool(node.test))
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        node.iter = _call("passes", ast.Constant(node.lineno), node.iter)
        return node

    def visit_While(self, node: ast.While) -> Any:
        self.generic_visit(node)
        node.body = [ast.Expr(_call("note", ast.Constant("pass"), ast.Constant(node.lineno))), *node.body]
        return [ast.Expr(_call("note", ast.Constant("enter"), ast.Constant(node.lineno))), node]

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(node)
        node.body = [ast.Expr(_call("note", ast.Constant("except"), ast.Constant(node.lineno))), *node.body]
        return node

    def visit_Return(self, node: ast.Return) -> Any:
        return [ast.Expr(_call("note", ast.Constant("return"), ast.Constant(node.lineno))), node]


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name("log_of_test", ast.Load()), name, ast.Load()), list(arguments), [])


def _bool(test: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("bool", ast.Load()), [test], [])


def run(code: str, rank: int) -> Log:
    """Run a program as one rank."""
    log = Log()

    class Dist:
        def __getattr__(self, op: str) -> Any:
            import sys

            def call(_: int) -> None:
                frame = sys._getframe(1)
                log.events.append(frame.f_lineno)

            return call

    tree = ast.fix_missing_locations(Instrument().visit(ast.parse(code)))
    exec(compile(tree, "<program>", "exec"), {"rank": rank, "dist": Dist(), "log_of_test": log})
    return log
