"""Starters: the code of exercises that the reader has not changed. Nothing is judged or kept for it.

`starters.json` has a hash of each definition in the starter of an exercise. `python -m tools.course` writes it. At a
check, the newest definition in the history of the notebook is compared with it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).with_name("starters.json")
UNCHANGED = "change the code of this exercise, and run its cells again"
DOTS = "put your code in place of the dots"
_MAGIC = re.compile(r"^[ \t]*[%!].*$", re.MULTILINE)


def advice(question: str, cells: list[str] | None = None) -> str:
    """Return what the reader must do before an exercise can be judged; "" if its starter has been changed.

    Args:
        question: Name of the exercise.
        cells: Texts of the cells that have run, the newest one last. By default, the history of the notebook.
    """
    starter = _starters().get(question, {})
    ran = list(reversed(_history() if cells is None else cells))
    newest = [next(filter(None, (part(cell, key) for cell in ran)), "") for key in starter]
    if not starter or [hash_of(text) for text in newest] != list(starter.values()):
        return ""
    return DOTS if all(map(_has_only_dots, newest)) else UNCHANGED


def has_function(question: str, name: str) -> bool:
    """Return whether the starter of an exercise defines this function or class."""
    return name in _starters().get(question, {})


def definitions(cell: str) -> dict[str, str]:
    """Return the text of each function and class of a cell by name.

    Example:
        >>> definitions("%%on_all_ranks\\ndef mean(x):\\n    return ...\\n")
        {'mean': 'def mean(x):\\n    return ...'}
    """
    code = _MAGIC.sub("", cell)
    try:
        nodes = ast.parse(code).body
    except SyntaxError:  # it has not run either
        return {}
    defined = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: ast.get_source_segment(code, node) or "" for node in defined}


def part(cell: str, key: str) -> str:
    """Return the part of a cell that a key of `starters.json` names; "" if it has none.

    Args:
        cell: Text of a cell.
        key: Name of a function or a class, or a piece of code: then the part is the whole cell that has it.
    """
    if key.isidentifier():
        return definitions(cell).get(key, "")
    return cell if key in cell else ""


def hash_of(text: str) -> str:
    """Return a short hash of a text. White space at the ends of its lines does not count."""
    lines = [line.rstrip() for line in text.strip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


def _has_only_dots(code: str) -> bool:
    """Return whether all functions of a text have nothing but a docstring and dots."""
    functions = [node for node in ast.walk(ast.parse(_MAGIC.sub("", code))) if isinstance(node, ast.FunctionDef)]
    return bool(functions) and all(_is_dots(node) for function in functions for node in function.body)


def _is_dots(node: ast.stmt) -> bool:
    value = node.value if isinstance(node, ast.Expr | ast.Return) else None
    return isinstance(value, ast.Constant) and (value.value is ... or isinstance(value.value, str))


def _history() -> list[str]:
    """Return the texts of the cells that have run in this kernel; [] outside of IPython."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()  # type: ignore[no-untyped-call,unused-ignore]
    return list(shell.history_manager.input_hist_raw) if shell is not None and shell.history_manager else []


@functools.cache
def _starters() -> Mapping[str, Mapping[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found
