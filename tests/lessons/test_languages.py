"""Lessons in other languages: code stays the same, no text is older than its English one, and the markup agrees."""

from __future__ import annotations

import json
import re

import nbformat
import pytest

from ddp_notebook.lessons.language import FILE, translated, without_numbers
from ddp_notebook.lessons.questions import results
from ddp_notebook.lessons.questions.answers_file import Answered
from ddp_notebook.lessons.questions.catalogue import QUESTIONS
from ddp_notebook.lessons.questions.questions import check
from tools.course import languages
from tools.course.declaration import FOLDER, read

FILES = [pytest.param(file, english, id=f"{language}-{name}") for language, name, file, english in languages.sources()]
LESSON_FILES = [
    pytest.param(language, number, id=f"{language}-{number}")
    for language in languages.LANGUAGES
    for number in languages.LESSONS
]
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(?<!`)`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ ", re.MULTILINE)
# Characters of Simplified Chinese that are common in such texts and differ in Traditional Chinese.
_SIMPLIFIED = set("个们这来时发会过还进动问间东车长门开见现观学习数据传输设备网络运训练类线组织结构参")


@pytest.mark.parametrize(("file", "english"), FILES)
def test_no_text_is_older_than_its_english_one(file, english):
    assert languages.open_ids(file, english()) == {}, "see python -m tools.course.languages --todo LANGUAGE LESSON"


@pytest.mark.parametrize(("file", "english"), FILES)
def test_a_translation_has_the_markup_of_its_english_text(file, english):
    """Code, links and headings are those of the English text, and the text is in the other language."""
    found = languages.texts(file.read_text(encoding="utf-8"))
    for name, text in english().items():
        words = found[name].words
        for kind in (_FENCE, _LINK, _HEADING):
            assert sorted(kind.findall(words)) == sorted(kind.findall(text)), (name, kind.pattern)
        plain, plain_english = _FENCE.sub("", words), _FENCE.sub("", text)
        assert sorted(set(_CODE.findall(plain))) == sorted(set(_CODE.findall(plain_english))), name
        letters = r"[\uac00-\ud7a3]" if ".ko." in file.name or file.parent.name == "ko" else r"[\u4e00-\u9fff]"
        assert re.search(letters, words), name
        if letters != r"[\uac00-\ud7a3]":
            assert not set(words) & _SIMPLIFIED, name


@pytest.mark.parametrize(("language", "number"), LESSON_FILES)
def test_code_cells_are_identical(language, number, tmp_path, monkeypatch):
    monkeypatch.setattr(languages, "FOLDER", tmp_path)
    built = {path.name: path for path in languages.build(language)}
    original = read().lessons[number].file
    ours = nbformat.read(built[original.name], as_version=4).cells
    theirs = nbformat.read(original, as_version=4).cells
    assert [cell.id for cell in ours] == [cell.id for cell in theirs]
    assert [cell.source for cell in ours if cell.cell_type == "code"] == [
        cell.source for cell in theirs if cell.cell_type == "code"
    ]
    for cell in ours:
        if languages.is_text(cell):
            for link in _LINK.findall(cell.source):
                if not re.match(r"\w+:|#", link):
                    page = link.partition("#")[0]
                    assert (FOLDER / language / page).resolve().exists() or (FOLDER / page).exists(), link


@pytest.mark.parametrize("language", languages.LANGUAGES)
def test_every_sentence_of_the_questions_is_translated(language):
    """In the words of the reader, with the same numbers in them."""
    found, wanted = languages.sentences(language), languages.wanted_sentences()
    assert set(wanted) - set(found) == set()
    assert set(found) - set(wanted) == set(), "these sentences are no longer used"
    for english, words in found.items():
        assert sorted(set(re.findall(r"\{\d+\}", english))) == sorted(set(re.findall(r"\{\d+\}", words))), english


def test_a_text_is_old_once_its_english_cell_changes(tmp_path):
    file = tmp_path / "01.md"
    file.write_text(f"<!-- cell a {languages.hash_of('one')} -->\n하나\n\n<!-- cell b -->\n둘\n", encoding="utf-8")
    english = {"a": "one", "b": "two", "c": "three"}
    assert languages.open_ids(file, english) == {"b": "without a hash: run --stamp", "c": "missing"}
    languages.stamp(file, english)
    assert languages.open_ids(file, english) == {"c": "missing"}
    assert languages.open_ids(file, {**english, "a": "One"})["a"] == "older than the English text"

    cells = [nbformat.v4.new_markdown_cell(text, id=name) for name, text in (("a", "One"), ("b", "two"))]
    notebook = languages.translate(nbformat.v4.new_notebook(cells=cells), file)
    assert [cell.source for cell in notebook.cells] == ["One", "둘"]


def test_a_notebook_that_a_learner_has_changed_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(languages, "FOLDER", tmp_path)
    first, *others = languages.build("ko")
    assert languages.build("ko") == [first, *others], "built again"
    notebook = nbformat.read(first, as_version=4)
    notebook.cells[-1].source += "\n# my own line"
    nbformat.write(notebook, first)
    assert languages.build("ko") == others
    assert nbformat.read(first, as_version=4).cells[-1].source.endswith("# my own line")


def test_a_sentence_is_translated_next_to_its_file(tmp_path, monkeypatch):
    sentences = {"Rank {0} sends {1} MB.": "랭크 {0} 이 {1} MB 를 보낸다.", "right": "정답"}
    (tmp_path / FILE).write_text(json.dumps(sentences), encoding="utf-8")
    assert translated("right") == "right" and without_numbers("1 of 2") == "{0} of {1}"
    monkeypatch.chdir(tmp_path)
    shown = [translated(text) for text in ("right", "Rank 3 sends 0.5 MB.", "left")]
    assert shown == ["정답", "랭크 3 이 0.5 MB 를 보낸다.", "left"]


def test_verdicts_are_in_the_language_of_the_notebook(tmp_path, monkeypatch):
    """The kept answer stays English, so that files of a class can be compared."""
    question = QUESTIONS["04/world-size"]
    reason = "이유"
    (tmp_path / FILE).write_text(json.dumps({question.why: reason, "right": "정답", "The answer is": "답은"}))
    monkeypatch.chdir(tmp_path)
    assert repr(check("04/world-size", question.answer)) == f"정답: {reason}"
    shown = results.said(question, Answered(is_shown=True))
    assert shown["text/plain"] == f"답은 {question.answer}: {reason}"
