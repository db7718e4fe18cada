"""Measures of the package's structure, from its syntax trees."""

import ast
import functools
import gc
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import ddp_notebook

PACKAGE = Path(ddp_notebook.__file__).parent
ROOT = PACKAGE.parent
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.With, ast.IfExp, ast.comprehension, ast.match_case)
KEYWORDS = re.compile(r"\b(?:if|elif|for|while|except|with|and|or|case)\b")  # each branch has one of these keywords
MOST_COMPLEX = 20
LONGEST_TEST_NAME = 60


@functools.cache
def parsed(source: str) -> list[ast.AST]:
    """Return all nodes of a source text. Several tests read those of all files."""
    gc.disable()  # the collector would look through all earlier trees again and again
    try:
        return list(ast.walk(ast.parse(source)))
    finally:
        gc.enable()


def complexity(function: ast.AST) -> int:
    """Return the cyclomatic complexity of a function, with its inner functions."""
    nodes = list(ast.walk(function))
    branches = sum(isinstance(node, BRANCHES) for node in nodes)
    return 1 + branches + sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))


def functions(source: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return all functions and methods, nested ones too."""
    return [node for node in parsed(source) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def too_complex(source: str) -> Iterator[tuple[str, int]]:
    """Yield the functions above the limit with their complexity. Sources with few keywords are skipped, to save
    time."""
    if len(KEYWORDS.findall(source)) < MOST_COMPLEX:
        return
    lines = source.splitlines()
    for function in functions(source):
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
        assert complexity(functions(source)[0]) == expected, source


# ---- names


def long_test_names(source: str) -> list[str]:
    """Return the names of test functions and methods above the limit."""
    names = re.findall(r"^ *(?:async )?def (test_\w*)", source, re.MULTILINE)
    return [name for name in names if len(name) > LONGEST_TEST_NAME]


def test_names_of_tests_are_short():
    longest = "test_".ljust(LONGEST_TEST_NAME, "a")
    example = f"def {longest}(): pass\ndef {longest}b(): pass\nclass A:\n  async def {longest}c(self): pass\n"
    assert long_test_names(f"{example}def {'helper'.ljust(99, 'a')}(): pass\n") == [f"{longest}b", f"{longest}c"]

    files = sorted((ROOT / "tests").rglob("test_*.py"))
    assert len(files) > 200
    found = {str(file.relative_to(ROOT)): long_test_names(file.read_text()) for file in files}
    assert {file: names for file, names in found.items() if names} == {}, "shorten these names"


# ---- classes


def _names(node: ast.expr) -> str:
    """Return the last part of a name: for `a.b.C[int]` this is "C"."""
    if isinstance(node, ast.Subscript):
        return _names(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def without_super_init(sources: Mapping[str, str]) -> set[str]:
    """Return classes whose `__init__` does not call the `__init__` of a base class that has one.

    Args:
        sources: The source text by module name.
    """
    classes: dict[tuple[str, str], ast.ClassDef] = {}
    imported: dict[tuple[str, str], tuple[str, str]] = {}
    for module, source in sources.items():
        for node in parsed(source):
            if isinstance(node, ast.ClassDef):
                classes[module, node.name] = node
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported |= {(module, one.asname or one.name): (node.module, one.name) for one in node.names}

    def bases(of: tuple[str, str]) -> list[tuple[str, str]]:
        found = [(of[0], _names(base)) for base in classes[of].bases]
        return [base for one in found if (base := imported.get(one, one)) in classes and base != of]

    def init(of: tuple[str, str]) -> ast.FunctionDef | None:
        found = [one for one in classes[of].body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        return found[0] if found else None

    def has_init(of: tuple[str, str]) -> bool:
        return init(of) is not None or any(map(has_init, bases(of)))

    def calls_init(function: ast.FunctionDef) -> bool:
        calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
        return any(isinstance(one, ast.Attribute) and one.attr == "__init__" for one in calls)

    own = [(of, found) for of in classes if (found := init(of)) is not None]
    return {".".join(of) for of, found in own if any(map(has_init, bases(of))) and not calls_init(found)}


@pytest.mark.slow
def test_no_class_inherits_from_another_without_calling_its_init():
    """Such an object lacks attributes that inherited methods read."""
    example = """
class A:
    def __init__(self): self.a = 1
class B(A): pass
class C(B):
    def __init__(self): self.c = 1
class D(B):
    def __init__(self): super().__init__()
"""
    other = "from m import B as X\nclass E(X):\n    def __init__(self): self.e = 1\n"
    assert without_super_init({"m": example, "n": other}) == {"m.C", "n.E"}
    sources = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): file.read_text() for file in PACKAGE.rglob("*.py")
    }
    assert without_super_init(sources) == set()


# ---- messages


def chosen_by_name(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that select a method of `self` by a name from an f-string."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _names(node.func) == "getattr"]
    for call in calls:
        if _names(call.args[0]) == "self" and isinstance(call.args[1], ast.JoinedStr):
            yield call.lineno


def test_messages_are_dispatched_by_tables_and_never_unpickled():
    assert list(chosen_by_name(ast.parse('getattr(self, f"_on_{op}")(request)'))) == [1]
    for folder in ("messages", "launch", "registry", "torchrun"):
        for file in (PACKAGE / folder).rglob("*.py"):
            tree = ast.parse(file.read_text())
            assert not list(chosen_by_name(tree)), file.relative_to(ROOT)
            imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
            assert "pickle" not in {alias.name for node in imports for alias in node.names}, file.relative_to(ROOT)


# ---- what texts name


def paths_of_package() -> set[str]:
    """Return the paths of all modules and folders of the package without suffix, each also by its last parts."""
    found = {file.relative_to(PACKAGE).with_suffix("") for file in PACKAGE.rglob("*") if file.suffix in (".py", ".js")}
    found |= {parent for path in found for parent in path.parents}
    return {"/".join(path.parts[first:]) for path in found for first in range(len(path.parts))}


DESIGN = sorted((ROOT / "docs" / "design").glob("*.md"))


def test_every_path_that_the_design_pages_name_exists():
    paths = paths_of_package()
    text = "\n".join(page.read_text() for page in (ROOT / "ARCHITECTURE.md", *DESIGN))
    named = set(re.findall(r"`(?:ddp_notebook/)?((?:[a-z_0-9]+/)+[a-z_0-9]+)(?:\.py|\.js)?[`:]", text))
    named = {path for path in named if path.split("/")[0] not in ("tests", "docs", "tools", "notebooks", "autograd")}
    assert len(named) > 250 and named - paths == set()
    assert "run/cells/no_such_file" not in paths


def test_a_design_page_is_short_and_listed():
    overview, contents = (ROOT / "ARCHITECTURE.md").read_text(), (ROOT / "docs" / "design" / "index.md").read_text()
    assert overview.count("\n") <= 200
    for page in DESIGN:
        assert page.read_text().count("\n") <= 150, f"{page.name}: split it"
        if page.stem != "index":
            assert f"(docs/design/{page.name})" in overview and f"({page.name})" in contents, page.name
            assert re.search(rf"^{page.stem}$", contents, re.MULTILINE), f"{page.name}: name it in the toctree"


def test_each_private_interface_has_a_test_and_existing_modules():
    page = (ROOT / "docs" / "design" / "private_interfaces.md").read_text()
    rows = [re.split(r" *\| *", row.strip("| ")) for row in re.findall(r"^\| .*\|$", page, re.MULTILINE)]
    rows = [row for row in rows if row[0] != "interface"]
    assert len(rows) > 40 and {len(row) for row in rows} == {5}
    source = (ROOT / "tests" / "test_private_interfaces.py").read_text()
    paths = paths_of_package()
    for interface, modules, why, tests, _ in rows:
        assert why and set(re.findall(r"`([\w/]+?)/?`", modules)) <= paths, interface
        found = re.findall(r"`(tests/[\w/]+\.py|test_\w+)`", tests)
        assert found, interface
        for test in found:
            assert (ROOT / test).is_file() if "/" in test else f"def {test}(" in source, (interface, test)
