"""The pages of the lessons, without running them: their parts, their questions, and no answer before its question."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import nbformat
import pytest

from ddp_notebook.lessons.questions import judging
from ddp_notebook.lessons.questions.catalogue import PUZZLES, QUESTIONS
from ddp_notebook.lessons.questions.judging import judge
from tests.lessons.claims import FOLDER as CLAIMS
from tests.lessons.claims import claims_of, has_claims
from tests.lessons.test_notebooks import NOTEBOOKS

WITH_CLAIMS = [path for path in NOTEBOOKS if has_claims(path)]
_BOX = ("You need", "You will be able to", "Minutes", "You may stop")

each_page = pytest.mark.parametrize("path", WITH_CLAIMS, ids=lambda path: path.stem)


@functools.cache
def cells_of(path: Path) -> list[nbformat.NotebookNode]:
    return list(nbformat.read(path, as_version=4).cells)


def code_of(cells: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    return [cell for cell in cells if cell.cell_type == "code"]


def tags(cell: nbformat.NotebookNode) -> list[str]:
    return list(cell.metadata.get("tags", []))


def parsed(source: str) -> ast.Module:
    """Parse a cell without its magics."""
    lines = [line for line in source.splitlines() if not re.match(r"\s*[%!]", line)]
    return ast.parse("\n".join(lines))


def lesson_calls(cell: nbformat.NotebookNode, function: str) -> list[ast.Call]:
    """Return the calls `lessons.FUNCTION("NAME", ...)` of a cell."""
    found = [node for node in ast.walk(parsed(cell.source)) if isinstance(node, ast.Call) and node.args]
    return [
        node
        for node in found
        if ast.unparse(node.func) == f"lessons.{function}" and isinstance(node.args[0], ast.Constant)
    ]


def named(cell: nbformat.NotebookNode, function: str) -> list[str]:
    """Return the names of the questions that a cell passes to a function of `lessons`."""
    return [node.args[0].value for node in lesson_calls(cell, function)]  # type: ignore[attr-defined]


def given_away(cell: nbformat.NotebookNode) -> list[str]:
    """Return the questions whose right answer stands in a cell as a literal, next to their name."""
    found = []
    for function in ("check", "ask"):
        for node in lesson_calls(cell, function):
            name = node.args[0].value  # type: ignore[attr-defined]
            if name not in QUESTIONS or len(node.args) < 2:
                continue
            try:
                answer = ast.literal_eval(node.args[1])
            except ValueError:
                continue  # a variable, or something computed
            if judge(QUESTIONS[name], answer)[0]:
                found.append(name)
    return found


# ---- parts


@each_page
def test_a_page_has_the_parts_of_every_page(path):
    cells = cells_of(path)
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert cells[0].source.startswith("# ")
    box = [line for line in cells[0].source.splitlines() if line.startswith(">")]
    assert all(f"**{part}**" in "\n".join(box) for part in _BOX), "the box in the first cell"

    parts = re.split(r"^## ", prose, flags=re.MULTILINE)
    titles = [part.partition("\n")[0] for part in parts[1:]]
    assert titles.count("Exercises") == titles.count("Remember") == 1
    remember = parts[1 + titles.index("Remember")]
    assert 3 <= len(re.findall(r"^- ", remember, re.MULTILINE)) <= 6
    exercises = parts[1 + titles.index("Exercises")]
    assert 3 <= len(re.findall(r"^(?:\*\*|### )\d", exercises, re.MULTILINE)) <= 5, "numbered exercises"
    last = parts[-1]
    assert re.match(r"Read more|Where it is used", last.partition("\n")[0])
    assert last.count("](https://") >= 3, "links to what the lesson names"


@each_page
def test_solutions_are_folded_and_the_last_exercise_is_a_puzzle(path):
    code = code_of(cells_of(path))
    assert any(cell.metadata.get("jupyter", {}).get("source_hidden") for cell in code), "a folded solution"
    checked = [name for cell in code for name in named(cell, "check")]
    assert checked and checked[-1] in PUZZLES


def checks_of_the_notebook(path: Path) -> list[tuple[nbformat.NotebookNode, ast.Call]]:
    """Return the calls of `lessons.check` in solutions and demonstrations: Run All must not store their verdicts."""
    found, is_solution = [], False
    for cell in cells_of(path):
        if cell.cell_type == "markdown":
            is_solution = bool(re.search(r"next (two )?cells? (is|are) (a solution|solutions)", cell.source))
            continue
        is_hidden = cell.metadata.get("jupyter", {}).get("source_hidden")
        is_demonstration = bool(named(cell, "result"))
        if is_solution or is_hidden or "summary" in tags(cell) or is_demonstration:
            found += [(cell, call) for call in lesson_calls(cell, "check")]
    return found


@each_page
def test_a_page_does_not_keep_verdicts_on_its_own_solutions(path):
    checks = checks_of_the_notebook(path)
    if path.name >= "05":
        assert checks
    kept = [cell.id for cell, call in checks if "keep=False" not in ast.unparse(call)]
    assert kept == []


@each_page
def test_a_page_does_not_test_itself(path):
    """Assertions about the notebook are claims. A cell whose subject is an assert is tagged "asserts"."""
    wrong = [
        cell.id
        for cell in code_of(cells_of(path))
        if "asserts" not in tags(cell) and any(isinstance(node, ast.Assert) for node in ast.walk(parsed(cell.source)))
    ]
    assert wrong == []


def test_every_page_has_claims():
    """So the tests above look at all pages."""
    assert [path.name for path in NOTEBOOKS if not has_claims(path)] == []


@pytest.mark.parametrize("path", [path for path in WITH_CLAIMS if path.name >= "04"], ids=lambda path: path.stem)
def test_a_page_links_to_the_glossary(path):
    assert any("glossary.md#" in cell.source for cell in cells_of(path) if cell.cell_type == "markdown")


# ---- claims


@each_page
def test_claims_name_cells_of_the_page(path):
    claims, ids = claims_of(path), [cell.id for cell in code_of(cells_of(path))]
    assert claims and [claim.cell for claim in claims if claim.cell not in ids] == []
    for claim in claims:
        nodes = list(ast.walk(parsed(claim.code)))
        assert any(isinstance(node, ast.Assert) for node in nodes), f"after {claim.cell}: it claims nothing"


def test_each_file_of_claims_has_a_page():
    stems = {path.stem for path in NOTEBOOKS}
    files = list(CLAIMS.glob("[0-9]*.py"))
    assert files and {file.stem for file in files} <= stems


def test_a_wrong_header_of_a_claim_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.lessons.claims.FOLDER", tmp_path)
    (tmp_path / "a.py").write_text('"""Claims."""\n\n# %% one\nassert 1\n\n# %% one time\nassert 2\n')
    first, second = claims_of(Path("a.ipynb"))
    assert (first.cell, first.code, first.is_about_time) == ("one", "assert 1\n", False)
    assert (second.code, second.is_about_time) == ("assert 2\n", True)
    (tmp_path / "a.py").write_text('"""Claims."""\n\n# %% one two\nassert 1\n')
    with pytest.raises(ValueError, match=r"a\.py: a header is"):
        claims_of(Path("a.ipynb"))


# ---- questions


@each_page
def test_results_follow_their_questions(path):
    asked: list[str] = []
    shown: list[str] = []
    for cell in code_of(cells_of(path)):
        results = named(cell, "result")
        assert set(results) <= set(asked), f"{cell.id}: ask first"
        assert not (results and cell.get("outputs")), f"{cell.id}: a stored output shows the result before the question"
        shown += results
        asked += named(cell, "ask")
    assert len(asked) == len(set(asked))
    assert set(asked) == set(shown), "each question has a result"


@each_page
def test_a_question_has_its_text_before_it(path):
    """Since the question before, a text asks something, or the cells show a program with a mistake."""
    missing, since = [], ""
    for cell in cells_of(path):
        asked = named(cell, "ask") if cell.cell_type == "code" else []
        if asked and "?" not in since and "lessons.bug(" not in since:
            missing += asked
        since = "" if asked else since + cell.source
    assert missing == []


@each_page
def test_every_question_of_a_lesson_is_on_its_page(path):
    code, lesson = code_of(cells_of(path)), f"{path.name[:2]}/"
    asked = {name for cell in code for name in named(cell, "ask")}
    checked = {name for cell in code for name in named(cell, "check")}
    questions = {name: question for name, question in QUESTIONS.items() if name.startswith(lesson)}
    assert asked == {name for name, question in questions.items() if question.is_asked}
    puzzles = {name for name in PUZZLES if name.startswith(lesson)}
    assert checked == {name for name, question in questions.items() if not question.is_asked} | puzzles


@each_page
def test_no_answer_stands_next_to_its_question(path, monkeypatch):
    for size in (2, 3, 4):
        monkeypatch.setattr(judging, "_world_size", lambda size=size: size)
        assert [name for cell in code_of(cells_of(path)) for name in given_away(cell)] == []


def test_an_answer_next_to_its_question_is_found():
    def cell(source: str) -> nbformat.NotebookNode:
        return nbformat.v4.new_code_cell(source)

    assert given_away(cell('assert lessons.check("04/world-size", 24), 1')) == ["04/world-size"]
    assert given_away(cell('%time\nlessons.check("04/where-is-13", (1, 5))')) == ["04/where-is-13"]
    assert given_away(cell('lessons.check("04/world-size", 3)\nlessons.check("04/world-size", mine)')) == []
