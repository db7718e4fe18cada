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
    assert on_slide(text) == f"# Title\n\n{table}\n\n**Who waits?**\n\n{code}"
    assert on_slide("Only **bold** words.") == ""
