"""The examples in the package's docstrings: without ranks if possible, otherwise with two ranks.

In these examples ranks have variables that a user has defined before: `x`, `model`, `losses`, as in `_ON_THE_RANKS`.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import matplotlib
import pytest

import ddp_notebook
from ddp_notebook import lessons
from ddp_notebook.launch.transports.local import LocalTransport
from ddp_notebook.lessons.questions.answers_file import answers_file
from tests.conftest import wait_until

pytestmark = pytest.mark.slow

_PACKAGE = Path(ddp_notebook.__file__).parent
_OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS

# Examples that contain one of these start processes themselves.
_STARTS = ("ddp_notebook.start(", "ddp_notebook.check(", "Host(")
_NEEDS_RANKS = ("session.", "lessons.")
_ON_THE_RANKS = """
import os, tempfile, time
x = torch.arange(6.0).reshape(2, 3)
model = torch.nn.Linear(3, 1)
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for _ in range(20):
    optimizer.zero_grad()
    loss = wrapped(x).square().mean()
    loss.backward()
    optimizer.step()
del loss, optimizer, wrapped
losses = [1.0 / (step + 1) for step in range(5)]
os.chdir(tempfile.mkdtemp())
os.mkdir("checkpoints")
torch.save(model, "checkpoints/1.pt")
"""

# Examples that no test runs, with the reasons.
_SKIPPED = {
    "SessionFiles.sync": "there are no hosts that do not share the folder",
    "Recording.calls": "it needs a program of remote calls; tests.rpc.test_recorded has some",
    "overlap": "it needs the programs of lesson 25; tests.lessons.test_capstones draws them",
    "play": "it is for ranks; tests.lessons.test_puzzles runs it with the puzzle of lesson 12",
    "start": "ddp_notebook.record.start records the process that it is called in, to its end",
    "survive": "it is for ranks, with a model and an optimizer there; tests.test_survive runs it",
}


@pytest.fixture(autouse=True)
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep answers to questions of lessons in a file of the test."""
    monkeypatch.setenv("DDP_NOTEBOOK_ANSWERS", str(tmp_path / "answers.json"))
    answers_file.cache_clear()
    yield
    answers_file.cache_clear()


def _examples() -> Iterator[doctest.DocTest]:
    """Yield one test for each docstring with examples, without importing modules."""
    parser = doctest.DocTestParser()
    for path in sorted(_PACKAGE.rglob("*.py")):
        parts = path.relative_to(_PACKAGE.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        for name, docstring, line in _docstrings(ast.parse(text)) if ">>> " in text else ():
            found = parser.get_doctest(docstring, {}, name, str(path), line)
            if found.examples:
                found.globs["__name__"] = module
                yield found


def _docstrings(node: ast.AST, name: str = "") -> Iterator[tuple[str, str, int]]:
    """Yield name, text and line of the docstrings in a module or class, including nested ones."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if isinstance(node, documented) and (text := ast.get_docstring(node)):
        yield name, text, node.body[0].lineno - 1
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt):
            continue
        inner = child.name if isinstance(child, ast.ClassDef | ast.FunctionDef) else ""
        yield from _docstrings(child, ".".join(filter(None, [name, inner])))


def _code(test: doctest.DocTest) -> str:
    return "".join(example.source for example in test.examples)


def _identity(test: doctest.DocTest) -> str:
    return f"{test.globs['__name__']}:{test.name}"


_ALL = list(_examples())
_STARTING = [test for test in _ALL if any(name in _code(test) for name in _STARTS)]
_WITH_RANKS = [test for test in _ALL if test not in _STARTING and any(name in _code(test) for name in _NEEDS_RANKS)]
# it trains, and a report is about the last training run
_WITH_RANKS.sort(key=lambda test: "lessons.mesh" in _code(test))
_PURE = [test for test in _ALL if test not in _STARTING + _WITH_RANKS]


def _run(test: doctest.DocTest, **names: Any) -> None:
    """Run the examples of a docstring with the names of its module, two names that users import, and the given
    names."""
    module = importlib.import_module(test.globs["__name__"])
    test.globs = {**vars(module), "ddp_notebook": ddp_notebook, "lessons": lessons, **names}
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=_OPTIONS).run(test, out=report.append)
    assert not result.failed, "".join(report)


@pytest.fixture(autouse=True)
def where_files_may_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with matplotlib.rc_context({"backend": "agg"}):
        yield


@pytest.mark.processes
@pytest.mark.parametrize("test", _PURE, ids=_identity)
def test_an_example_is_right(test):
    _run(test)


def test_every_example_is_run():
    text = "".join(path.read_text() for path in sorted(_PACKAGE.rglob("*.py")))
    assert text.count(">>> ") == sum(len(test.examples) for test in _ALL)
    skipped = {test.name for test in _ALL for example in test.examples if example.options.get(doctest.SKIP)}
    assert skipped == set(_SKIPPED)


@pytest.mark.long
@pytest.mark.parametrize("test", _STARTING, ids=_identity)
def test_an_example_that_starts_processes_is_right(test):
    _run(
        test, LocalTransport=LocalTransport
    )  # ways are known only to the idle server, so the module does not have this name


@pytest.fixture(scope="module")
def prepared(session):
    session.run(_ON_THE_RANKS)
    return session


@contextmanager
def _a_cell_that_waits(session) -> Iterator[None]:
    """Run a cell on rank 1 until it is ended from outside."""

    def run() -> None:
        with pytest.raises(KeyboardInterrupt):
            session.run("if rank == 1: print('here'); time.sleep(60)", quiet=True)

    cell = threading.Thread(target=run)
    cell.start()
    wait_until(lambda: session.log(1).endswith("here\n") and session._cells.busy == [1])
    yield
    cell.join()


@contextmanager
def _a_rank_that_died(session) -> Iterator[None]:
    os.kill(session.ranks.pids()[1], signal.SIGKILL)
    wait_until(lambda: len(session.ranks.pids()) == 1)
    yield


# Context of the examples of a docstring.
_SCENES: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    "Session.interrupt": _a_cell_that_waits,
    "SessionRanks.heal": _a_rank_that_died,
}


@pytest.mark.parametrize("test", _WITH_RANKS, ids=_identity)
def test_an_example_is_right_on_ranks(prepared, test):
    with _SCENES.get(test.name, lambda _: nullcontext())(prepared):
        _run(test, session=prepared)


def test_the_files_that_contributing_names_are_there():
    page = (_PACKAGE.parent / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([\w./]+(?:\.py|\.js|\.md|/))`", page)
    assert len(named) > 20
    missing = [name for name in named if not any((root / name).exists() for root in (_PACKAGE, _PACKAGE.parent))]
    assert not missing


def test_every_scene_is_used():
    assert set(_SCENES) <= {test.name for test in _WITH_RANKS}
