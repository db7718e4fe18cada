"""Programs in the texts of tests use names that the package has. Many of these programs run in long tests only."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).parents[1]
_WITH_WRONG_NAMES = {Path(__file__).name, "test_layers.py"}  # on purpose


def programs(source: str) -> Iterator[tuple[int, str]]:
    """Yield texts of several lines that name the package, with their line; in place of values in braces they have 1."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(one.value) if isinstance(one, ast.Constant) else "1" for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if ("\n" in text and "import ddp_notebook" in text) or "from ddp_notebook" in text:
            yield node.lineno, text


def missing(program: str) -> Iterator[str]:
    """Yield the modules and names of the package that a program uses and that do not exist."""
    try:
        tree = ast.parse(textwrap.dedent(program))
    except SyntaxError:  # a part of a program, or no program
        return
    modules: dict[str, ModuleType] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] != "ddp_notebook":
            continue
        for alias in node.names:
            found = _find(f"{node.module}.{alias.name}")
            if found is None:
                yield f"{node.module}.{alias.name}"
            elif inspect.ismodule(found):
                modules[alias.asname or alias.name] = found
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name):
            name = node.value.id
            if name in modules and name not in assigned and not hasattr(modules[name], node.attr):
                yield f"{modules[name].__name__}.{node.attr}"


def _find(name: str) -> object:
    """Return an attribute of a module, or a module; None if there is none."""
    module, _, attribute = name.rpartition(".")
    try:
        owner = importlib.import_module(module)
        return getattr(owner, attribute) if hasattr(owner, attribute) else importlib.import_module(name)
    except ImportError:
        return None


def test_programs_in_texts_use_names_that_exist():
    found = [
        f"{file.relative_to(TESTS)}:{line}: {name}"
        for file in sorted(TESTS.rglob("*.py"))
        if file.name not in _WITH_WRONG_NAMES
        for line, program in programs(file.read_text())
        for name in missing(program)
    ]
    assert not found


def test_a_missing_name_is_found():
    program = (
        "from ddp_notebook.records import words, no_such\nfrom ddp_notebook.errors import UsageError\nwords.no_word()"
    )
    assert list(missing(program)) == ["ddp_notebook.records.no_such", "ddp_notebook.records.words.no_word"]
