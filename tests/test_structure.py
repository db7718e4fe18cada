"""Measures of the package's structure, from its syntax trees."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddp_notebook

PACKAGE = Path(ddp_notebook.__file__).parent
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.With, ast.IfExp, ast.comprehension, ast.match_case)
KEYWORDS = re.compile(r"\b(?:if|elif|for|while|except|with|and|or|case)\b")  # each branch has one
MOST_COMPLEX = 20


def complexity(function: ast.AST) -> int:
    """The cyclomatic complexity of a function, with the functions inside it."""
    nodes = list(ast.walk(function))
    branches = sum(isinstance(node, BRANCHES) for node in nodes)
    return 1 + branches + sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method, nested ones too."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def too_complex(source: str) -> Iterator[tuple[str, int]]:
    """The functions above the limit, with their complexity. Those with few keywords are passed over, to save time."""
    if len(KEYWORDS.findall(source)) < MOST_COMPLEX:
        return
    lines = source.splitlines()
    for function in functions(ast.parse(source)):
        text = "\n".join(lines[function.lineno - 1 : function.end_lineno])
        if len(KEYWORDS.findall(text)) >= MOST_COMPLEX and (count := complexity(function)) > MOST_COMPLEX:
            yield f"{function.name}, line {function.lineno}", count


@pytest.mark.slow
def test_no_function_is_too_complex():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 300

    found = {str(file.relative_to(PACKAGE)): list(too_complex(file.read_text())) for file in files}
    assert {file: places for file, places in found.items() if places} == {}, "split these functions"


def test_a_function_above_the_limit_is_found():
    def with_tests(number: int) -> str:
        return "class A:\n  def f(self):\n" + "    if x: pass\n" * number

    assert list(too_complex(with_tests(MOST_COMPLEX - 1))) == []
    assert list(too_complex(with_tests(MOST_COMPLEX))) == [("f, line 2", MOST_COMPLEX + 1)]


def test_each_kind_of_branch_counts():
    for source, expected in {
        "def f(): return a": 1,
        "def f():\n if a: pass\n elif b: pass\n else: pass": 3,
        "def f():\n for x in a:\n  while b: pass": 3,
        "def f():\n with a: pass": 2,
        "def f():\n try: pass\n except A: pass\n except B: pass": 3,
        "def f(): return a if b else c": 2,
        "def f(): return a and b and c or d": 4,
        "def f(): return [x for x in a for y in x]": 3,
        "def f():\n match a:\n  case 1: pass\n  case _: pass": 3,
        "def f():\n async def g():\n  if a: pass": 2,
    }.items():
        assert complexity(functions(ast.parse(source))[0]) == expected, source
