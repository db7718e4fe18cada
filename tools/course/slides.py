"""Slides from a lesson: the same notebook, with slide types set by rule.

    python -m tools.course.slides 04 06              into build/slides/
    python -m tools.course.slides 06 --execute       with the outputs of all cells and the results of all questions

A slide begins at each heading, and another one below it at each question and each picture. A slide shows headings,
questions, tables, lists and code; running text becomes the notes of the speaker (key S). Choices are on the slide of
their question, and the result is on the next one. Solutions are left out. The pages need reveal.js: from the network,
or from a folder of packages:

    npm install --prefix build reveal.js@4.0.2 requirejs@2.3.6
    python -m tools.course.slides 06 --packages ../node_modules
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import SlidesExporter
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell
from traitlets.config import Config

from tools.course.declaration import FOLDER, read

OUTPUT = FOLDER.parent / "build" / "slides"
NO_INPUT = "no-input-on-slides"
_LEFT_OUT = {"badges", "install"}
_STOP = ("%ddp_stop", "%load_ext")
_SHOWN = re.compile(r"^(#|\||[-*] |\d+\. |```|>|    |!\[)")
_QUESTION = re.compile(r"\*\*[^*]+\?\*\*", re.DOTALL)
_OF_A_QUESTION = "lessons.ask("
_HOW_TO_ANSWER = re.compile(r"^.*lessons\.ask\(.*\n?", re.MULTILINE)
_LONG = 12  # code with more lines gets its own slide


def as_slides(notebook: NotebookNode) -> NotebookNode:
    """Return a notebook with a slide type for each cell. Running text is in cells of notes.

    Args:
        notebook: A lesson; it stays as it is.
    """
    cells: list[NotebookNode] = []
    is_asked = False  # the last text ends with a question
    for cell in nbformat.from_dict(notebook).cells:
        tags = set(cell.metadata.get("tags", []))
        if tags & _LEFT_OUT or cell.metadata.get("jupyter", {}).get("source_hidden") or cell.source.startswith(_STOP):
            continue
        if cell.cell_type == "markdown":
            cells += _of_text(cell)
            is_asked = bool(_QUESTION.search(cell.source))
        elif cell.source.startswith(_OF_A_QUESTION) or "lessons.result(" in cell.source:
            cells += _of_question(cell)
        else:
            cells.append(_of_code(cell, tags, is_asked))
            is_asked = False
    return nbformat.v4.new_notebook(cells=cells, metadata=notebook.metadata)


def _of_text(cell: NotebookNode) -> list[NotebookNode]:
    """Return a slide for each heading of a text cell, each followed by its notes."""
    made = []
    for part in re.split(r"(?=^#+ )", cell.source.strip(), flags=re.MULTILINE):
        shown = on_slide(part)
        if shown:
            kind = "slide" if part.startswith(("# ", "## ")) else "subslide"
            made.append(new_markdown_cell(shown, metadata={"slideshow": {"slide_type": kind}}))
        if part.strip():
            made.append(new_markdown_cell(part, metadata={"slideshow": {"slide_type": "notes"}}))
    return made


def _of_question(cell: NotebookNode) -> list[NotebookNode]:
    """Return the choices of a question for its slide, or its result for the next one; [] if the cell has not run."""
    if not cell.outputs:
        return []
    is_asked = cell.source.startswith(_OF_A_QUESTION)
    for output in cell.outputs:
        if is_asked and "text" in output:
            output.text = _HOW_TO_ANSWER.sub("", output.text)
    cell.metadata["tags"] = [*cell.metadata.get("tags", []), NO_INPUT]
    cell.metadata["slideshow"] = {"slide_type": "-" if is_asked else "subslide"}
    return [cell]


def _of_code(cell: NotebookNode, tags: set[str], is_asked: bool) -> NotebookNode:
    if "picture" in tags:
        cell.metadata["tags"] = [*tags, NO_INPUT]
    is_long = "picture" in tags or len(cell.source.splitlines()) > _LONG
    cell.metadata["slideshow"] = {"slide_type": "subslide" if is_long else "fragment" if is_asked else "-"}
    return cell


def on_slide(text: str) -> str:
    """Return what a slide shows of a text: headings, tables, lists, code, and questions in bold.

    Example:
        >>> on_slide("## Groups\\n\\nAll ranks form a group.\\n\\n**What does each rank get?** Write a number.")
        '## Groups\\n\\n**What does each rank get?**'
    """
    shown = []
    for block in re.split(r"\n\n(?!    )", text.strip()):
        if _SHOWN.match(block):
            shown.append(block)
        elif (questions := _QUESTION.findall(block)) and not block.startswith("|"):
            shown += questions
    return "\n\n".join(shown)


def export(path: Path, output: Path, *, is_executed: bool = False, packages: str = "") -> Path:
    """Write the slides of a lesson as a page. Return its path.

    Args:
        path: The notebook.
        output: Folder of the page.
        is_executed: Whether to run the notebook first.
        packages: Address of a folder with reveal.js and requirejs, absolute or from the page; empty for the network.
    """
    notebook = nbformat.read(path, as_version=4)
    if is_executed:
        resources = {"metadata": {"path": str(path.parent)}}
        client = NotebookClient(notebook, timeout=300, resources=resources, store_widget_state=False)
        client.execute(transport_encryption="auto", env={**os.environ, "DDP_NOTEBOOK_ANSWERS": "shown"})
    config = Config()
    config.TagRemovePreprocessor.enabled = True
    config.TagRemovePreprocessor.remove_input_tags = {NO_INPUT}
    exporter = SlidesExporter(config=config, reveal_scroll=True)
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    if packages:
        exporter.reveal_url_prefix = f"{packages}/reveal.js"
        exporter.require_js_url = f"{packages}/requirejs/require.js"
    page, _ = exporter.from_notebook_node(as_slides(notebook))
    output.mkdir(parents=True, exist_ok=True)
    written = output / f"{path.stem}.slides.html"
    written.write_text(page, encoding="utf-8")
    return written


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Write slides of lessons.")
    parser.add_argument("lessons", nargs="+", help="numbers of lessons, such as 04")
    parser.add_argument("--execute", action="store_true", help="run the lessons first, for all outputs")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: build/slides")
    parser.add_argument("--packages", default="", metavar="ADDRESS", help="folder with reveal.js and requirejs")
    options = parser.parse_args()
    for number in options.lessons:
        if number not in read().lessons:
            parser.error(f"there is no lesson {number}; the lessons are {', '.join(sorted(read().lessons))}")
        path = read().lessons[number].file
        print(export(path, options.output, is_executed=options.execute, packages=options.packages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
