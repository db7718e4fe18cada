"""The notebooks of the lessons: they run from the top with nobody there, their links lead somewhere, all are listed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(p for p in FOLDER.glob("[0-9][0-9]_*.ipynb") if not p.name.endswith(".executed.ipynb"))
LESSONS = [path for path in NOTEBOOKS if path.name >= "04"]
LONGEST = ("18", "19")  # they start up to a dozen processes; `make test-long` runs them, at their full length too
OF_FOUR = ("07", "15")  # about trees and meshes, of which two ranks make none
MOST_S = {"10": 60.0, "11": 60.0, "12": 60.0, "17": 60.0, "18": 90.0, "19": 90.0}  # else 30
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def execute(notebook: Path, executed: Path, world_size: int, is_short: bool = False) -> list[nbformat.NotebookNode]:
    """Run a notebook and return its cells with their outputs.

    Args:
        is_short: shorten the durations of the two long lessons, and nothing else.
    """
    env = {**os.environ, "DDP_NOTEBOOK_RANKS": str(world_size), "DDP_NOTEBOOK_SHORT": "1" if is_short else ""}
    command = [sys.executable, str(ROOT / "tools/demo.py"), str(notebook), "--output", str(executed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return nbformat.read(executed, as_version=4).cells


def check_shown(cells: list[nbformat.NotebookNode]) -> None:
    """Pictures where there are to be some, errors where they are the lesson, and nothing left unanswered at the end."""
    for cell in cells:
        tags = cell.metadata.get("tags", [])
        outputs = cell.get("outputs", [])
        if "picture" in tags:
            assert any("image/png" in output.get("data", {}) for output in outputs), cell.source
        if "raises-exception" in tags:
            errors = [output.ename for output in outputs if output.output_type == "error"]
            assert errors and set(errors) <= {"RankError", "RankDiedError", "CellTimeoutError"}, (cell.source, errors)
    said = [o.text for c in cells if "summary" in c.metadata.get("tags", []) for o in c.outputs if "text" in o]
    assert said and "not yet" not in "".join(said)


@pytest.mark.processes
@pytest.mark.timeout(300)  # a dozen processes of one of them import torch
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.long] * (path.name[:2] in LONGEST)) for path in LESSONS],
    ids=lambda path: path.stem,
)
def test_a_lesson_runs(path, tmp_path):
    """On two ranks where they suffice; `make test-long` runs all on four, at their full length."""
    check_shown(execute(path, tmp_path / "executed.ipynb", 4 if path.name[:2] in OF_FOUR else 2, is_short=True))


@pytest.mark.long
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_takes_half_a_minute(path, tmp_path):
    """One that trains for long, or starts a dozen processes, each of which imports torch, a minute and a half."""
    began = time.monotonic()
    check_shown(execute(path, tmp_path / "executed.ipynb", 4))
    assert time.monotonic() - began < MOST_S.get(path.name[:2], 30.0)


# ---- links


def texts() -> Iterator[tuple[str, str]]:
    """Name and Markdown of every page and every cell of text."""
    for page in sorted(FOLDER.glob("*.md")):
        yield page.name, page.read_text()
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        yield path.name, "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def anchors(page: str) -> list[str]:
    return re.findall(r'^<a id="([^"]+)"></a>$', page, re.MULTILINE)


@pytest.mark.parametrize(("name", "text"), list(texts()), ids=[name for name, _ in texts()])
def test_links_lead_somewhere(name, text):
    for link in _LINK.findall(text):
        if link.startswith(("http://", "https://")):
            continue
        page, _, anchor = link.partition("#")
        target = FOLDER / page if page else FOLDER / name
        assert target.exists(), f"{name}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{name}: {link}"


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_has_what_every_lesson_has(path):
    cells = nbformat.read(path, as_version=4).cells
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")

    assert "glossary.md#" in prose
    assert "## Your turn" in prose and "## Where it is used" in prose
    assert "lessons.check(" in code and "assert " in code
    assert any(cell.metadata.get("jupyter", {}).get("source_hidden") for cell in cells), "a folded solution"
    assert any("picture" in cell.metadata.get("tags", []) for cell in cells)


# ---- the glossary and the table of contents


def test_the_glossary_has_every_term_in_three_languages():
    page = (FOLDER / "glossary.md").read_text()
    entries = re.findall(r'^<a id="([^"]+)"></a>\n\n### (.+)\n\n((?:- .+\n)+)', page + "\n", re.MULTILINE)

    assert [anchor for anchor, _, _ in entries] == anchors(page)
    assert len(entries) >= 40
    titles = [title for _, title, _ in entries]
    assert titles == sorted(titles, key=str.lower)
    for anchor, title, lines in entries:
        assert anchor == title.lower().replace(" ", "-")
        english, korean, chinese = lines.strip().splitlines()
        assert english.isascii() and english.endswith(".") and english.count(". ") == 0, english
        assert re.match(r"- \*\*.+\*\*: .*[\uac00-\ud7a3].*\.$", korean), korean
        assert re.match(r"- \*\*.+\*\*\uff1a.*[\u4e00-\u9fff].*\u3002$", chinese), chinese
        assert not re.search(r"[\uac00-\ud7a3]", chinese) and not re.search(r"[\u4e00-\u9fff]", korean)
        assert "[" + title + "](#" + anchor + ")" in page, "in the list at the top"


def test_no_character_of_the_glossary_is_simplified_chinese():
    """Characters that are written otherwise in Traditional Chinese, of those that such a text would have."""
    page = (FOLDER / "glossary.md").read_text()
    assert not set(page) & set("个们这来时发会过还进动问间东车长门开见现观学习数据传输设备网络运训练类线组织结构参")


def test_every_notebook_is_in_the_table_of_contents():
    page = (FOLDER / "README.md").read_text()
    listed = [link for link in _LINK.findall(page) if link.endswith(".ipynb")]
    assert listed == [path.name for path in NOTEBOOKS]
    assert "(glossary.md)" in page
