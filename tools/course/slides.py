"""Slides from a lesson: the same notebook, with slide types set by rule.

    python -m tools.course.slides 04 06              into build/slides/
    python -m tools.course.slides 06 --execute       with the outputs of all cells

A slide begins at each heading, and another one below it at each question, picture and exercise, and before code that
does not fit. A slide shows headings, questions with their paragraph, exercises, tables, lists and code; running text
becomes the notes of the speaker (key S). Choices are on the slide of their question, and the answer is on the next
one. Solutions are left out.

The pages load reveal.js and MathJax from the network, or from a folder of packages next to them:

    npm install --prefix build/slides reveal.js@4.0.2 requirejs@2.3.6 mathjax@2.7.7
    python -m tools.course.slides 06 --packages node_modules
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from string import ascii_uppercase

import nbformat
from nbclient import NotebookClient
from nbconvert import SlidesExporter
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell
from traitlets.config import Config

from tools.course.catalogue import question, ranks_of
from tools.course.declaration import FOLDER, read

OUTPUT = FOLDER.parent / "build" / "slides"
NO_INPUT = "no-input-on-slides"
_LEFT_OUT = {"badges", "install"}
_STOP = ("%ddp_stop", "%load_ext")
_SHOWN = re.compile(r"^(#|\||[-*] |\d+\. |```|>|    |!\[)")
_QUESTION = re.compile(r"\*\*[^*]+\?\*\*", re.DOTALL)
_KEY_SENTENCE = re.compile(r"\*\*[^*]+\.\*\*", re.DOTALL)
_EXERCISE = re.compile(r"^\*\*\d+\.")
_SOLUTION_FOLLOWS = "The next cell is a solution."
_ASKED = re.compile(r"^lessons\.ask\(\"([^\"]+)\"", re.MULTILINE)
_RESULT = re.compile(r"lessons\.result\(\s*\"([^\"]+)\"")
_SAME = "same"
_ROOM = 24  # lines of code on a slide
_WIDTH = 72  # letters of a line
_STYLE = """\
<style>
/* A slide that is too long scrolls, and long lines are wrapped, not cut off. */
.reveal .slides > section > section { max-height: 690px; overflow-y: auto; }
.reveal pre, .reveal .highlight pre { white-space: pre-wrap; overflow-wrap: anywhere; word-break: normal; }
.reveal .jp-OutputArea-output pre { white-space: pre-wrap; overflow-wrap: anywhere; word-break: normal; }
.reveal .jp-RenderedHTMLCommon { font-size: 24px; line-height: 1.35; }
.reveal .jp-RenderedHTMLCommon h1 { font-size: 44px; }
.reveal .jp-RenderedHTMLCommon li { margin: 0.2em 0; }
.reveal .jp-RenderedHTMLCommon blockquote { font-size: 22px; width: 90%; margin: 0.5em auto; padding: 0 1em; }
.reveal .jp-InputArea-editor pre, .reveal .jp-OutputArea-output pre { font-size: 17px; line-height: 1.3; }
.reveal .jp-OutputArea { max-height: 420px; overflow-y: auto; }
</style>
"""


class _Slides:
    """The cells of the slides, and the room that is left on the last slide."""

    def __init__(self) -> None:
        self.cells: list[NotebookNode] = []
        self._left = 0

    def add(self, cell: NotebookNode, lines: int, kind: str = "-") -> None:
        """Append a cell to the last slide, or to a new one if it does not fit or `kind` requires one.

        Args:
            cell: The cell.
            lines: Its height in lines of code.
            kind: Slide type of nbconvert. `_SAME` is "-" for a cell that stays on its slide even if it does not fit.
        """
        if kind == "-" and lines > self._left:
            kind = "subslide"
        if kind not in ("-", _SAME):
            self._left = _ROOM
        self._left -= lines
        cell.metadata["slideshow"] = {"slide_type": "-" if kind == _SAME else kind}
        self.cells.append(cell)

    def add_text(self, text: str, kind: str = "-") -> None:
        self.add(new_markdown_cell(text), _text_lines(text), kind)

    def add_notes(self, text: str) -> None:
        self.cells.append(new_markdown_cell(text, metadata={"slideshow": {"slide_type": "notes"}}))

    def fill(self) -> None:
        """Let the next cell begin a new slide."""
        self._left = 0


def as_slides(notebook: NotebookNode) -> NotebookNode:
    """Return a notebook with a slide type for each cell. Running text is in cells of notes.

    Args:
        notebook: A lesson; it stays as it is.
    """
    slides, size = _Slides(), ranks_of(notebook)
    is_exercise = False
    for cell in nbformat.from_dict(notebook).cells:
        tags = set(cell.metadata.get("tags", []))
        if tags & _LEFT_OUT or cell.metadata.get("jupyter", {}).get("source_hidden") or cell.source.startswith(_STOP):
            continue
        if cell.cell_type == "markdown":
            is_exercise = _add_text(slides, cell.source, is_exercise)
        elif "lessons.ask(" in cell.source:
            _add_choices(slides, cell, size)
        elif "lessons.result(" in cell.source:
            _add_result(slides, cell, size)
        elif "keep=False" not in cell.source:  # such a cell checks a solution, which is left out
            _add_code(slides, cell, tags)
    return nbformat.v4.new_notebook(cells=slides.cells, metadata=notebook.metadata)


def _add_text(slides: _Slides, text: str, is_exercise: bool) -> bool:
    """Add a slide for each heading and each exercise of a text, with its notes. Return whether exercises follow."""
    for part in re.split(r"(?=^#+ |^\*\*\d+\.)", text.strip(), flags=re.MULTILINE):
        if part.startswith(("# ", "## ")):
            is_exercise = part.startswith("## Exercises")
        shown = part.strip() if is_exercise and _SOLUTION_FOLLOWS not in part else on_slide(part)
        if shown:
            kind = "slide" if part.startswith(("# ", "## ")) else "subslide"
            kind = "-" if _EXERCISE.match(part) and _is_heading(slides) else kind
            for number, piece in enumerate(_title_and_rest(shown)):
                slides.add_text(piece, "subslide" if number else kind)
        if part.strip():
            slides.add_notes(part)
    return is_exercise


def _title_and_rest(text: str) -> list[str]:
    """Cut the first text of a lesson in two: its title with the box, and the tables and code below it."""
    blocks = re.split(r"\n\n(?!    )", text)
    if not text.startswith("# "):
        return [text]
    rest = [block for block in blocks if not block.startswith(("# ", ">"))]
    first = [block for block in blocks if block not in rest]
    return ["\n\n".join(part) for part in (first, rest) if part]


def _is_heading(slides: _Slides) -> bool:
    """Return whether the last slide has nothing but a heading."""
    last = next((cell for cell in reversed(slides.cells) if cell.metadata["slideshow"]["slide_type"] != "notes"), None)
    return last is not None and last.source.startswith("#") and "\n" not in last.source


def _add_choices(slides: _Slides, cell: NotebookNode, size: int) -> None:
    """Add the choices of a question to its slide, with letters to vote for."""
    for name in _ASKED.findall(cell.source):
        asked = question(name, size)
        lines = [
            f"- **{letter}**: {label}" for letter, label in zip(ascii_uppercase, asked.labelled_choices(), strict=False)
        ]
        if isinstance(asked.answer, Mapping):
            lines.append(f"\nAn answer for each of: {', '.join(f'`{key}`' for key in asked.answer)}")
        if lines:
            slides.add_text("\n".join(lines), _SAME)
    slides.fill()


def _add_result(slides: _Slides, cell: NotebookNode, size: int) -> None:
    """Add the output of a result if the cell has run, and otherwise the answer of the question."""
    if cell.outputs:
        cell.metadata["tags"] = [*cell.metadata.get("tags", []), NO_INPUT]
        slides.add(cell, _output_lines(cell), "subslide")
    else:
        for name in _RESULT.findall(cell.source):
            asked = question(name, size)
            slides.add_text(f"The answer is **{asked.in_words(asked.answer)}**: {asked.why}", "subslide")
    slides.fill()


def _add_code(slides: _Slides, cell: NotebookNode, tags: set[str]) -> None:
    if "picture" in tags:
        cell.metadata["tags"] = [*tags, NO_INPUT]
        slides.add(cell, _ROOM, "subslide")
        return
    if "lessons.check(" in cell.source:
        cell.outputs = []  # "not yet: put your answer in place of the dots"
    cell.outputs = [output for output in cell.outputs if not _is_progress(output)]
    slides.add(cell, _code_lines(cell.source) + 1 + _output_lines(cell))


def _is_progress(output: NotebookNode) -> bool:
    """Return whether an output is the progress of %ddp_start, which is printed each second without a front end."""
    text = str(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return bool(text) and all(line.startswith("starting:") for line in text.strip().splitlines())


def _code_lines(text: str) -> int:
    return sum(1 + len(line) // 88 for line in text.splitlines())


def _text_lines(text: str) -> int:
    """Return the height of a text in lines of code."""
    heads = 3 * len(re.findall(r"^#", text, re.MULTILINE))
    return heads + sum(2 * (1 + len(line) // _WIDTH) for line in text.splitlines() if line and line[0] != "#")


def _output_lines(cell: NotebookNode) -> int:
    texts = [str(output.get("text") or output.get("data", {}).get("text/plain", "")) for output in cell.outputs]
    return min(_ROOM, sum(_code_lines(text) + 1 for text in texts))


def on_slide(text: str) -> str:
    """Return what a slide shows of a text: headings, tables, lists, code, key sentences in bold, and the paragraph of
    a question. A paragraph with nothing but the question follows the one before it.

    Example:
        >>> on_slide("## Groups\\n\\nAll ranks form a group.\\n\\n**What does each rank get?** Write a number.")
        '## Groups\\n\\nAll ranks form a group.\\n\\n**What does each rank get?** Write a number.'
    """
    shown: list[str] = []
    blocks = re.split(r"\n\n(?!    )", text.strip())
    for before, block in zip(["", *blocks], blocks, strict=False):
        if _SHOWN.match(block):
            shown.append(block)
        elif _QUESTION.search(block):
            needs_more = _QUESTION.match(block) and before and before not in shown
            shown += [before, block] if needs_more else [block]
        elif found := _KEY_SENTENCE.match(block):
            shown.append(found[0])
    return "\n\n".join(shown)


def export(path: Path, output: Path, *, is_executed: bool = False, packages: str = "") -> Path:
    """Write the slides of a lesson as a page. Return its path.

    Args:
        path: The notebook.
        output: Folder of the page.
        is_executed: Whether to run the notebook first.
        packages: Address of a folder with reveal.js, requirejs and mathjax, absolute or from the page; empty
            for the network.
    """
    notebook = nbformat.read(path, as_version=4)
    if is_executed:
        resources = {"metadata": {"path": str(path.parent)}}
        client = NotebookClient(notebook, timeout=300, resources=resources, store_widget_state=False)
        client.execute(transport_encryption="auto", env={**os.environ, "DDP_NOTEBOOK_ANSWERS": "shown"})
    config = Config()
    config.TagRemovePreprocessor.enabled = True
    config.TagRemovePreprocessor.remove_input_tags = {NO_INPUT}
    exporter = SlidesExporter(config=config)
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    exporter.jquery_url = ""  # the template uses it to scroll only, which _STYLE does
    if packages:
        exporter.reveal_url_prefix = f"{packages}/reveal.js"
        exporter.require_js_url = f"{packages}/requirejs/require.js"
        exporter.mathjax_url = f"{packages}/mathjax/MathJax.js?config=TeX-AMS_CHTML-full,Safe"
    page, _ = exporter.from_notebook_node(as_slides(notebook))
    output.mkdir(parents=True, exist_ok=True)
    written = output / f"{path.stem}.slides.html"
    written.write_text(page.replace("</head>", _STYLE + "</head>", 1), encoding="utf-8")
    return written


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Write slides of lessons.")
    parser.add_argument("lessons", nargs="+", help="numbers of lessons, such as 04")
    parser.add_argument("--execute", action="store_true", help="run the lessons first, for all outputs")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: build/slides")
    parser.add_argument(
        "--packages", default="", metavar="ADDRESS", help="folder with reveal.js, requirejs and mathjax"
    )
    options = parser.parse_args()
    for number in options.lessons:
        if number not in read().lessons:
            parser.error(f"there is no lesson {number}; the lessons are {', '.join(sorted(read().lessons))}")
        path = read().lessons[number].file
        print(export(path, options.output, is_executed=options.execute, packages=options.packages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
