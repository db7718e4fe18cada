"""Compare the pictures that a notebook keeps with those of an execution of it.

`python -m tools.pictures` stores the texts of a figure in its PNG. The kernel of the execution has run
`tools.picture_texts.RECORD`.
"""

from __future__ import annotations

import base64
import re
from io import BytesIO
from pathlib import Path

import nbformat
from PIL import Image

from tools.picture_texts import Texts, read, without_numbers

LEAST_PX = 9.0  # at 800 pixels
TALLEST_PX = 900  # at 800 pixels, about one screen
_SAME_WORDS = 0.4  # least share of common words of two titles, which may name what was the fastest


def pngs(cells: list[nbformat.NotebookNode]) -> dict[str, bytes]:
    """Return the last picture of each cell with one, by cell id."""
    found = {}
    for cell in cells:
        for output in cell.get("outputs", []):
            if png := output.get("data", {}).get("image/png"):
                found[cell.id] = base64.b64decode(png)
    return found


def compare(path: Path, executed: list[nbformat.NotebookNode]) -> None:
    """Check that the stored pictures of a notebook have the axes and titles of an execution of it.

    Pictures that were stored without their texts are skipped. All drawn pictures must be readable, also those that are
    not stored because they answer a question.
    """
    fresh = pngs(executed)
    check_readable(fresh)
    for cell_id, png in pngs(nbformat.read(path, as_version=4).cells).items():
        stored, now = read(png), read(fresh[cell_id]) if cell_id in fresh else None
        if stored is None or now is None:
            continue
        where = f"{path.name}, cell {cell_id}: store its pictures again with python -m tools.pictures {path}"
        assert words_of(stored) == words_of(now), where
        assert in_common(stored.title, now.title) >= _SAME_WORDS, (where, stored.title, now.title)


def check_readable(pictures: dict[str, bytes]) -> None:
    """Check that letters have 9 pixels on a page of 800, that no text or line covers another text, and the height."""
    for cell_id, png in pictures.items():
        if (texts := read(png)) is not None:
            width, height = Image.open(BytesIO(png)).size
            assert height * min(1.0, 800 / width) <= TALLEST_PX, cell_id
            assert texts.smallest_px >= LEAST_PX, (cell_id, texts)
            assert not texts.overlaps and not texts.cut and not texts.crossed, (cell_id, texts)
            assert not re.search(r"\bcell \d", " ".join([texts.title, *texts.labels])), (cell_id, "our own counter")


def words_of(texts: Texts) -> set[str]:
    """Return the labels of the axes without numbers. Their count depends on the number of ranks."""
    return {without_numbers(label) for label in texts.labels}


def in_common(one: str, other: str) -> float:
    """Return the share of common words of two titles, 1.0 for equal ones."""
    first, second = (set(re.findall(r"[A-Za-z_]+", words)) for words in (one, other))
    return len(first & second) / len(first | second) if first | second else 1.0
