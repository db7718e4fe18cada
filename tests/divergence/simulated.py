"""Runs a program once for each rank in this process, with collectives that only note their lines."""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

import torch

from ddp_notebook.run.divergence.control_flow import ControlFlow, mark_elifs
from ddp_notebook.run.divergence.paths import END, Event
from tests.divergence.programs import Program

_SOURCES = {"<cell>": "", "<earlier>": "In[1]", "<file>": "paths_helper.py"}


def text(code: str) -> str:
    """Return the code without its common indentation."""
    return textwrap.dedent(code).lstrip("\n")


def flow_of(program: Program) -> ControlFlow:
    """Return the control flow of a program."""
    texts = {"In[1]": program.earlier, "paths_helper.py": program.file, "": program.code}
    trees = {name: mark_elifs(ast.parse(text(code)), text(code)) for name, code in texts.items() if code}
    return ControlFlow(trees)


def events_of(program: Program, rank: int, names: dict[str, Any] | None = None) -> list[Event]:
    """Run a program as one rank. Return its collectives in the default group, and the end.

    Args:
        names: more variables of the program.
    """
    events: list[Event] = []

    def collective(op: str) -> Callable[..., None]:
        def call(*_: Any, group: object = None, **__: Any) -> None:
            frame = sys._getframe(1)
            while frame.f_code.co_filename not in _SOURCES:
                assert frame.f_back is not None
                frame = frame.f_back
            function = frame.f_code.co_name
            name = "" if function.startswith("<") else function
            if group is None:
                events.append(Event(_SOURCES[frame.f_code.co_filename], frame.f_lineno, name, op, op))

        return call

    ops = {name: collective(name) for name in ("all_reduce", "broadcast", "barrier")}
    dist = types.SimpleNamespace(**ops, new_group=lambda _: "subgroup")
    variables: dict[str, Any] = {"rank": rank, "torch": torch, "dist": dist, **(names or {})}
    if program.file:
        module = types.ModuleType("paths_helper")
        code = text(program.file).replace("import torch.distributed as dist", "")
        module.__dict__["dist"] = dist
        exec(compile(code, "<file>", "exec"), module.__dict__)
        sys.modules["paths_helper"] = module
    if program.earlier:
        exec(compile(text(program.earlier), "<earlier>", "exec"), variables)
    cell = compile(text(program.code), "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    try:
        if cell.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(cell, variables))
        else:
            exec(cell, variables)
    finally:
        sys.modules.pop("paths_helper", None)
    return [*events, END]
