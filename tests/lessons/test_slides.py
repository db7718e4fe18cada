"""Slides of lessons, made from the notebooks by rule."""

from __future__ import annotations

import re

import nbformat
import pytest

from ddp_notebook.lessons.questions.catalogue import QUESTIONS
from tools.course.declaration import notebooks, read
from tools.course.slides import as_slides, export, on_slide

_HEADING = re.compile(r"^#{1,2} ", re.MULTILINE)


def headings(text: str) -> int:
    return len(_HEADING.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)))


@pytest.mark.slow
@pytest.mark.parametrize("number", ["04", "06"])
def test_slides_of_a_lesson_are_built(number, tmp_path):
    path = read().lessons[number].file
    page = export(path, tmp_path, packages="../node_modules").read_text(encoding="utf-8")
    cells = nbformat.read(path, as_version=4).cells

    pictures = [output for cell in cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]
    assert pictures
    assert 'src="../node_modules/requirejs/require.js"' in page and '"../node_modules/reveal.js/dist/reveal.js"' in page
    slides = re.findall(r"<section><section>", re.sub(r">\s+<", "><", page))
    texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
    assert len(slides) == sum(headings(text) for text in texts)
    assert page.count("<aside") >= len(slides)
    assert page.count('src="data:image/png') == len(pictures)


@pytest.mark.long
@pytest.mark.processes
def test_executed_slides_have_the_results_of_questions(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_NOTEBOOK_RANKS", "2")
    page = export(read().lessons["04"].file, tmp_path, is_executed=True).read_text(encoding="utf-8")
    assert QUESTIONS["04/world-size"].why in page and "Guess first" not in page
    assert "another length on each rank" in page and "Or give up" not in page


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_slides_have_each_question_and_no_solution(path):
    cells = nbformat.read(path, as_version=4).cells
    made = as_slides(nbformat.v4.new_notebook(cells=cells)).cells
    shown = [cell.source for cell in made if cell.metadata["slideshow"]["slide_type"] != "notes"]
    notes = [cell.source for cell in made if cell.metadata["slideshow"]["slide_type"] == "notes"]
    folded = {cell.id for cell in cells if cell.metadata.get("jupyter", {}).get("source_hidden")}
    assert folded.isdisjoint(cell.id for cell in made)
    for cell in cells:
        if cell.cell_type == "markdown" and "badges" not in cell.metadata.get("tags", []):
            for question in re.findall(r"^\*\*[^*]+\?\*\*", cell.source, re.MULTILINE):
                assert any(question in text for text in shown), question
            assert cell.source.split("\n", 1)[0] in "\n".join(notes), "the whole text is in the notes"


def test_a_slide_shows_headings_questions_tables_and_code():
    table, code = "| a | b |\n|---|---|\n| 1 | 2 |", "```python\nx = 1\n```"
    text = f"# Title\n\nRunning text.\n\n{table}\n\nText. **Who waits?** More.\n\n{code}"
    assert on_slide(text) == f"# Title\n\n{table}\n\nText. **Who waits?** More.\n\n{code}"
    assert on_slide("Only **bold** words.") == ""
    assert on_slide("**A rule is short.** Its reason is long.") == "**A rule is short.**"
    assert on_slide("Old.\n\nRank 0 has 1.\n\n**What has rank 1?**") == "Rank 0 has 1.\n\n**What has rank 1?**"


def slides_of(notebook):
    """Return the shown texts of each slide."""
    slides: list[list[str]] = []
    for cell in as_slides(notebook).cells:
        kind = cell.metadata["slideshow"]["slide_type"]
        if kind in ("slide", "subslide"):
            slides.append([])
        if kind != "notes":
            slides[-1].append(cell.source)
    return ["\n".join(texts) for texts in slides]


def test_a_question_has_its_data_and_choices_and_no_answer():
    slides = slides_of(nbformat.read(read().lessons["06"].file, as_version=4))
    at = next(i for i, text in enumerate(slides) if "What happens when rank 0 has `float32`" in text)
    assert "The next cell starts two plain processes" in slides[at]
    assert "- **A**: an error on both ranks\n- **B**: the right sum, converted\n- **C**: wrong numbers" in slides[at]
    assert QUESTIONS["06/plain"].why not in slides[at] and "dist.all_reduce" not in slides[at]
    assert slides[at + 1] == f"The answer is **wrong numbers**: {QUESTIONS['06/plain'].why}"


def test_each_exercise_has_its_own_slide():
    slides = slides_of(nbformat.read(read().lessons["06"].file, as_version=4))
    exercises = [text for text in slides if re.search(r"^\*\*\d\.", text, re.MULTILINE)]
    assert len(exercises) == 4
    assert "Rank r has 2 r + 1 numbers" in exercises[1] and "mean = ..." in exercises[1]
    assert not any("keep=False" in text or "The next cell is a solution" in text for text in slides)


def test_progress_of_a_start_is_not_on_a_slide():
    started = nbformat.v4.new_code_cell("%ddp_start 2")
    texts = "starting:  importing torch ... 2 s\n", "starting:  importing torch ... 3 s\n", "rank  host\n0     vm\n"
    started.outputs = [nbformat.v4.new_output("display_data", {"text/plain": text}) for text in texts]
    [cell] = as_slides(nbformat.v4.new_notebook(cells=[started])).cells
    assert [output.data["text/plain"] for output in cell.outputs] == [texts[-1]]


def test_tables_below_the_title_are_on_the_second_slide():
    text = "# Title\n\nRunning text.\n\n> **You need** 04.\n\n| call | effect |\n|---|---|\n| a | b |"
    slides = slides_of(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)]))
    assert slides == ["# Title\n\n> **You need** 04.", "| call | effect |\n|---|---|\n| a | b |"]
