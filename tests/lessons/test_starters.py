"""Unchanged starters of exercises: one line, and no kept guess. `test_notebooks` runs those of all lessons."""

from __future__ import annotations

import nbformat
import pytest

from ddp_notebook.lessons.questions import questions, starters
from ddp_notebook.lessons.questions.answers_file import AnswersFile
from ddp_notebook.lessons.questions.catalogue import PUZZLES, QUESTIONS
from tools.course.declaration import notebooks
from tools.course.starters import PROGRAMS, starters_of

CELLS = {path: nbformat.read(path, as_version=4).cells for path in notebooks()}
STARTERS = {name: (path, keys) for path, cells in CELLS.items() for name, keys in starters_of(cells)}
UNEVEN = "%%on_all_ranks\ndef my_average(model, count):\n{}"


def is_starter(cell: str, keys: dict[str, str]) -> bool:
    return {key: starters.hash_of(starters.part(cell, key)) for key in keys} == keys


def test_every_puzzle_has_a_starter():
    assert set(PUZZLES) <= set(STARTERS) <= {*PUZZLES, *QUESTIONS}
    assert set(PROGRAMS) <= set(STARTERS)


@pytest.mark.parametrize("name", STARTERS)
def test_an_unchanged_starter_is_found(name):
    path, keys = STARTERS[name]
    cells = [cell.source for cell in CELLS[path] if cell.cell_type == "code"]
    [at] = [at for at, cell in enumerate(cells) if is_starter(cell, keys)]
    assert starters.advice(name, cells[: at + 1]) in (starters.DOTS, starters.UNCHANGED)
    parts = [starters.part(cells[at], key) for key in keys]
    changed = [
        text.replace("...", "None") if "..." in text else f"{text}\n{' ' * 4 * (name not in PROGRAMS)}x = 1"
        for text in parts
    ]
    assert starters.advice(name, [*cells[: at + 1], "\n\n".join(changed)]) == ""
    assert starters.advice(name, cells[:at]) == "", "the reader has not run it"


def test_the_newest_definition_counts():
    cells = [cell.source for cell in CELLS[STARTERS["08/uneven"][0]] if "def my_average" in cell.source]
    with_a_mean = UNEVEN.format("    pass")
    assert len(cells) == 1 and starters.advice("08/uneven", cells) == starters.DOTS
    assert starters.advice("08/uneven", [*cells, with_a_mean, "print(1)"]) == ""
    assert starters.advice("08/uneven", [with_a_mean, *cells]) == starters.DOTS
    assert starters.advice("08/uneven", [*cells, "def my_average(:"]) == starters.DOTS, "it has not run"
    assert starters.advice("08/uneven", []) == "" == starters.advice("08/other", cells)


def test_a_wrong_answer_of_an_unchanged_starter_is_not_kept(tmp_path, monkeypatch):
    file = AnswersFile(tmp_path / "answers.json")
    ran: list[str] = []
    monkeypatch.setattr(questions, "answers_file", lambda: file)
    monkeypatch.setattr(starters, "_history", lambda: ran)
    for name, answer in (("08/uneven", False), ("09/accumulate", 4), ("20/repaired", {"findings": ["one"]})):
        path, keys = STARTERS[name]
        ran[:] = [cell.source for cell in CELLS[path] if is_starter(cell.source, keys)]
        advice = repr(questions.check(name, answer))
        assert advice in (f"not yet: {starters.DOTS}", f"not yet: {starters.UNCHANGED}")
        assert file.of(name).guesses == ()
        ran += [ran[0].replace("model", "network")]
        assert not questions.check(name, answer) and file.of(name).guesses[0].is_right is False
    assert questions.check("08/uneven", True), "a right answer does not depend on the name of the function"
