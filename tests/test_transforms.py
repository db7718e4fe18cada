"""Cells that IPython does not change skip its transformers."""

from __future__ import annotations

import atexit
import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.macro import Macro
from IPython.core.prefilter import PrefilterChecker, PrefilterTransformer
from traitlets.config import Config

from ddp_notebook.rank.cell.transforms import Plain, install, may_have_commands

PLAIN = (
    "pass",
    "x = 1\n",
    "for x in range(3):\n    print(x % 2, x != 1)\n\nx",
    "x = [\n    1,\n    2,\n]",
    'print(f"{x!r:>3} {y:.2%}")',
    "def f(a, /, b):\n    return a / b",
    "@torch.no_grad()\ndef f(): ...",
    "await step()",
)
COMMANDS = (
    *("%time x", "%%time\nx", "!ls", "x?", "?x", "x??", "/f x", ",f x", ";f x", "x = %time y", "x = !ls"),
    *("x = \\\n!ls", "if x:\n    !ls", "if x:\n\t%time y", "\n\nx", "  x\n  y", ">>> x", "... x", "In [1]: x"),
    *("x\n   ...: y", "x\n  \ny", "x\r!ls", "x\x0c!ls", "x\u2028!ls", "x\n\xa0!ls", ""),
)
PARTS = (
    *"%!?/,;=#()[]{}'\"@*:$é1x\n\n\n \t\\\r\x0c\x0b\u2028\xa0",
    *("==", "!=", "ls", "exit", "pass", "time", "x = ", '"""', "\n  ", ">>> ", "... ", "...:", "In [1]: "),
)


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    made = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}), user_module=ModuleType("cells"))
    yield made
    # Otherwise all these shells live until the exit of the process, where each collects all garbage.
    atexit.unregister(made.atexit_operations)


@pytest.mark.parametrize("code", PLAIN)
def test_python_is_left_as_it_is(shell, code):
    assert Plain(shell).is_left(code)
    assert shell.transform_cell(code) == code.rstrip("\n") + "\n"


@pytest.mark.parametrize("code", COMMANDS)
def test_what_is_ipythons_is_not(shell, code):
    assert may_have_commands(code)
    assert not Plain(shell).is_left(code)


@pytest.mark.slow
def test_ipython_would_leave_all_that_is_left(shell):
    plain, left = Plain(shell), 0
    some = random.Random(7)
    for _ in range(30_000):
        code = "".join(some.choices(PARTS, k=some.randint(1, 7)))
        if plain.is_left(code):
            left += 1
            try:
                changed = shell.transform_cell(code)
            except IndentationError:  # Python reports the error when it compiles the cell
                continue
            assert changed == (code if code[-1] == "\n" else f"{code}\n")
    assert left > 3_000


def _double(lines: list[str]) -> list[str]:
    return lines * 2


class _Named(PrefilterTransformer):
    def transform(self, line: str, continue_prompt: bool) -> str:
        return "y"


class _Asks(PrefilterChecker):
    pass


ADDED: dict[str, Callable[[Any], object]] = {
    "a transformer of cells": lambda shell: shell.input_transformers_cleanup.append(_double),
    "one behind IPython's": lambda shell: shell.input_transformers_post.append(_double),
    "one of lines": lambda shell: shell.input_transformer_manager.line_transforms.append(_double),
    "one of tokens": lambda shell: shell.input_transformer_manager.token_transformers.append(_double),
    "one of single lines": lambda shell: _Named(shell=shell, prefilter_manager=shell.prefilter_manager),
    "a checker of single lines": lambda shell: _Asks(shell=shell, prefilter_manager=shell.prefilter_manager),
    "a macro": lambda shell: shell.push({"x": Macro("y")}),
    "a magic": lambda shell: shell.register_magic_function(print, "line", "x"),
    "calls without parentheses": lambda shell: setattr(shell, "autocall", 1),
}


@pytest.mark.parametrize("what", ADDED)
def test_what_a_user_adds_is_noticed(shell, what):
    plain = Plain(shell)
    assert plain.is_left("x") and plain.is_left("x 1")

    ADDED[what](shell)

    assert not plain.is_left("x") and not plain.is_left("x 1")


def test_a_shell_that_somebody_has_changed_before_is_asked(shell):
    shell.input_transformers_cleanup.append(_double)

    assert not Plain(shell).is_left("pass")


def test_a_shell_asks_ipython_for_the_rest(shell):
    install(shell)

    assert shell.transform_cell("pass") == "pass\n"
    assert shell.transform_cell("time x") == "get_ipython().run_line_magic('time', 'x')\n"
    assert shell.transform_cell("\n\nx") == "\n\nx\n"
    shell.input_transformers_cleanup.append(_double)
    assert shell.transform_cell("pass") == "pass\npass\n"
