"""The lessons in other languages: text cells keyed by cell id, one file per lesson and language.

A file such as notebooks/languages/ko/01.md has the cells of lesson 01. Each begins with a comment that has the id of
the cell and a hash of its English text. If the English cell changes, its translation is out of date. Then the built
notebook has the English text, until the translation is updated. README.ko.md has the sections of README.md in this
form.

    python -m tools.course.languages                       build the notebooks into notebooks/ko and notebooks/zh-TW
    python -m tools.course.languages --todo ko 01          print the cells that have no text or an old one
    python -m tools.course.languages --stamp               add the hash to all comments that have none

After a change of a text remove the hash from its comment and run --stamp.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from ddp_notebook.lessons.language import FILE, without_numbers
from ddp_notebook.lessons.questions.catalogue import QUESTIONS
from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.results import GUESS_FIRST
from tools.course.declaration import FOLDER, read

LANGUAGES = {"ko": "한국어", "zh-TW": "繁體中文"}
LESSONS: tuple[str, ...] = ("01", "04", "06", "08", "09")
TEXTS = FOLDER / "languages"
ROOT = FOLDER.parent
_BUILT = "ddp_notebook_built"  # entry of the metadata: hash of the cells as they were written
_MARK = re.compile(r"^<!-- (?P<kind>cell|section) (?P<id>[\w-]+)(?: (?P<hash>[0-9a-f]{8}))? -->\n", re.MULTILINE)
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s]+)")


@dataclass(frozen=True, slots=True)
class Text:
    """The translation of one cell, or of one section of a page.

    Args:
        english: Hash of the English text from which it was made; empty if it is not yet known.
        words: The translation.
    """

    english: str
    words: str


def hash_of(text: str) -> str:
    """Return a short hash of an English text. White space at its ends does not count."""
    return hashlib.sha256(text.strip().encode()).hexdigest()[:8]


def texts(page: str) -> dict[str, Text]:
    """Return the translations in a page by id.

    Example:
        >>> texts("<!-- cell cell-00 0123abcd -->\\n# Title\\n")
        {'cell-00': Text(english='0123abcd', words='# Title')}
    """
    marks = list(_MARK.finditer(page))
    ends = [*(mark.start() for mark in marks[1:]), len(page)]
    return {
        mark["id"]: Text(mark["hash"] or "", page[mark.end() : end].strip())
        for mark, end in zip(marks, ends, strict=True)
    }


def english_cells(number: str) -> dict[str, str]:
    """Return the text cells of a lesson by id, without its badges."""
    cells = nbformat.read(read().lessons[number].file, as_version=4).cells
    return {cell.id: cell.source for cell in cells if is_text(cell)}


def is_text(cell: NotebookNode) -> bool:
    """Return whether a cell has a text to translate."""
    return bool(cell.cell_type == "markdown" and "badges" not in cell.metadata.get("tags", []))


def english_sections() -> dict[str, str]:
    """Return the sections of README.md by a name from their heading; the first is called "top"."""
    parts = _SECTION.split((ROOT / "README.md").read_text(encoding="utf-8"))
    names = [re.sub(r"\W+", "-", heading.lower()).strip("-") for heading in parts[1::2]]
    bodies = [f"## {heading}{body}" for heading, body in zip(parts[1::2], parts[2::2], strict=True)]
    return {"top": parts[0].strip(), **dict(zip(names, (body.strip() for body in bodies), strict=True))}


def sources() -> Iterator[tuple[str, str, Path, Callable[[], dict[str, str]]]]:
    """Yield language, name, file of the translation and a function that returns the English texts, for each file."""
    for language in LANGUAGES:
        yield language, "README", ROOT / f"README.{language}.md", english_sections
    for language, number, file in lesson_files():
        yield language, number, file, functools.partial(english_cells, number)


def lesson_files() -> Iterator[tuple[str, str, Path]]:
    """Yield language, number and file of each translated lesson."""
    for language in LANGUAGES:
        for number in LESSONS:
            yield language, number, TEXTS / language / f"{number}.md"


def title(file: Path) -> str:
    """Return the title of a translated lesson."""
    first = next(iter(texts(file.read_text(encoding="utf-8")).values()))
    return first.words.splitlines()[0].removeprefix("# ")


def open_ids(file: Path, english: dict[str, str]) -> dict[str, str]:
    """Return the ids of the English texts without an up-to-date translation, each with the reason."""
    found = texts(file.read_text(encoding="utf-8")) if file.is_file() else {}
    reasons = {}
    for name, text in english.items():
        if name not in found:
            reasons[name] = "missing"
        elif found[name].english != hash_of(text):
            reasons[name] = "older than the English text" if found[name].english else "without a hash: run --stamp"
    return reasons | {name: "not in the English text" for name in found if name not in english}


def translate(notebook: NotebookNode, file: Path) -> NotebookNode:
    """Return a notebook with the translated texts of a file. Code cells and old texts stay as they are.

    Args:
        notebook: The English notebook, executed or not; it is changed.
        file: The translation.
    """
    found = texts(file.read_text(encoding="utf-8"))
    for cell in notebook.cells:
        if is_text(cell):
            text = found.get(cell.id)
            is_current = text is not None and text.english == hash_of(cell.source)
            cell.source = _relinked(text.words if text is not None and is_current else cell.source)
    return notebook


def _relinked(text: str) -> str:
    """Return a text of notebooks/ for a notebook one folder below, where the translated lessons are."""

    def moved(found: re.Match[str]) -> str:
        return found[1] if found[1][:2] in LESSONS else f"../{found[1]}"

    return _LINK.sub(moved, text)


def sentences(language: str) -> dict[str, str]:
    """Return the translated sentences of questions and verdicts by their English ones."""
    found: dict[str, str] = json.loads((TEXTS / language / FILE).read_text(encoding="utf-8"))
    return found


def wanted_sentences() -> set[str]:
    """Return the sentences of the questions of the translated lessons. If one depends on the number of ranks, its
    numbers are replaced."""
    found = fixed_sentences()
    for name, question in QUESTIONS.items():
        if name[:2] in LESSONS:
            few, many = set(_sentences_of(question, 2)), set(_sentences_of(question, 4))
            found |= (few & many) | {without_numbers(text) for text in few ^ many}
    return found


def fixed_sentences() -> set[str]:
    """Return the texts that the code of the questions translates: the arguments of `translated`."""
    found = set()
    for file in (ROOT / "ddp_notebook" / "lessons" / "questions").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "translated":
                found |= {str(one.value) for one in node.args if isinstance(one, ast.Constant)}
    return {GUESS_FIRST, *found}


def _sentences_of(question: Question, size: int) -> Iterator[str]:
    """Yield the sentences of a question for a number of ranks: explanations, and answers of several words."""
    yield question.why
    yield question.hint
    traps = question.traps(size) if callable(question.traps) else question.traps
    yield from traps.values()
    choices = question.choices(size) if callable(question.choices) else question.choices
    right = question.answer(size) if callable(question.answer) else question.answer
    labels = [*choices, *(right if isinstance(right, Mapping) else ())]
    yield from (label for label in labels if isinstance(label, str) and " " in label)


def build(language: str) -> list[Path]:
    """Write the translated lessons of a language, and the sentences of their questions. Return the written notebooks.

    A notebook that a learner has changed stays as it is.
    """
    folder = FOLDER / language
    folder.mkdir(exist_ok=True)
    written = []
    for number in LESSONS:
        lesson = read().lessons[number].file
        path = folder / lesson.name
        if not _is_changed(path):
            notebook = translate(nbformat.read(lesson, as_version=4), TEXTS / language / f"{number}.md")
            notebook.metadata[_BUILT] = _hash_of_sources(notebook)
            nbformat.write(notebook, path)
            written.append(path)
    (folder / FILE).write_text(json.dumps(sentences(language), ensure_ascii=False, indent=1), encoding="utf-8")
    return written


def _is_changed(path: Path) -> bool:
    """Return whether the cells of a built notebook have been edited."""
    if not path.is_file():
        return False
    notebook = nbformat.read(path, as_version=4)
    return bool(notebook.metadata.get(_BUILT) != _hash_of_sources(notebook))


def _hash_of_sources(notebook: NotebookNode) -> str:
    return hash_of("\n".join(cell.source for cell in notebook.cells))


def stamp(file: Path, english: dict[str, str]) -> None:
    """Add the hash of the present English text to all comments of a file that have none."""

    def with_hash(mark: re.Match[str]) -> str:
        if mark["hash"] or mark["id"] not in english:
            return mark[0]
        return f"<!-- {mark['kind']} {mark['id']} {hash_of(english[mark['id']])} -->\n"

    file.write_text(_MARK.sub(with_hash, file.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Build the translated lessons, and list what is to be translated.")
    parser.add_argument("--todo", nargs=2, metavar=("LANGUAGE", "LESSON"), help="print the open texts in English")
    parser.add_argument("--stamp", action="store_true", help="add missing hashes")
    options = parser.parse_args()
    for language, name, file, get_english in sources():
        if options.stamp and file.is_file():
            stamp(file, get_english())
        if options.todo == [language, name]:
            english = get_english()
            for cell, reason in open_ids(file, english).items():
                print(f"<!-- cell {cell} --> {reason}\n{english.get(cell, '')}\n")
    if not options.todo and not options.stamp:
        for language in LANGUAGES:
            written = build(language)
            for number in LESSONS:
                path = FOLDER / language / read().lessons[number].file.name
                print(path.relative_to(ROOT), "" if path in written else "stays, because its cells were changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
