"""Writes the hashes of the exercises' starters, by which a check finds out that the reader has changed nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import nbformat
from nbformat import NotebookNode

from ddp_notebook.lessons.questions.starters import definitions, hash_of, part
from tools.course.declaration import notebooks

# Exercises whose starter is a program without a function: the id of its cell, and code that each version of it has.
PROGRAMS = {"20/repaired": ("cell-45", ".backward()")}
_CHECK = re.compile(r"""lessons\.check\(\s*["'](?P<name>[^"']+)["']""")


def starters_of(cells: list[NotebookNode]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the name of each exercise of a notebook, and the hashes of its starter by the name of the definition.

    The starter is the first code cell after the text of the exercise, and the exercise is the one that the reader's
    check of this section names.
    """
    by_id = {cell.id: cell.source for cell in cells}
    first: str | None = None
    for cell in cells:
        if cell.cell_type == "markdown":
            first = None
            continue
        first = cell.source if first is None else first
        if cell.metadata.get("jupyter", {}).get("source_hidden") or "keep=False" in cell.source:
            continue  # of a solution
        for call in _CHECK.finditer(cell.source):
            name = call["name"]
            if name in PROGRAMS:
                cell_id, key = PROGRAMS[name]
                yield name, {key: hash_of(part(by_id[cell_id], key))}
            elif found := definitions(first):
                yield name, {key: hash_of(text) for key, text in found.items()}


def content() -> str:
    """Return the content of the file."""
    found: dict[str, dict[str, str]] = {}
    for path in notebooks():
        found |= starters_of(nbformat.read(path, as_version=4).cells)
    return json.dumps(dict(sorted(found.items())), indent=1) + "\n"
