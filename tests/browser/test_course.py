"""Every notebook in JupyterLab in Chromium: Restart and Run All without answers, up to the last cell.

`DDP_NOTEBOOK_SCREENSHOTS` names a folder for pictures of the questions, the widgets and the figures of each notebook.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Locator, expect

from tests.browser.jupyterlab import JupyterLab, open_notebook
from tests.lessons.test_notebooks import FOLDER, NOTEBOOKS

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(1800)]

CELL_S = 600
DRAWN_MS = 60_000  # a widget is drawn after its cell has ended
_OUTPUT = ".jp-OutputArea-output"
_STDERR = f"{_OUTPUT}[data-mime-type='application/vnd.jupyter.stderr']"  # JupyterLab shows errors like stderr
_TRACEBACK = "Traceback (most recent call last)"
_QUESTION = f"{_OUTPUT} .ddp-ask"
# JupyterLab shows these in place of a widget.
_NO_WIDGET = ("Loading widget", "Error displaying widget", "Error creating widget", "model not found")


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_the_browser(path, world_size, tmp_path, capsys):
    shutil.copytree(FOLDER, tmp_path / "notebooks", ignore=shutil.ignore_patterns("my_answers.json", "*.executed.*"))
    opened = tmp_path / "notebooks" / path.name
    cells = nbformat.read(path, as_version=4).cells
    pictures = Path(os.environ.get("DDP_NOTEBOOK_SCREENSHOTS", tmp_path)) / f"{path.name[:2]}_on_{world_size}"

    with open_notebook(opened, env={"DDP_NOTEBOOK_RANKS": str(world_size), "DDP_NOTEBOOK_SHORT": "1"}) as lab:
        began_s = time.monotonic()
        lab.restart_and_run_all()
        for at, cell in enumerate(cells):
            if cell.cell_type == "code":
                wait_for(lab, at, cell)
        took_s = time.monotonic() - began_s
        check_widgets(lab, cells)
        take_pictures(lab, cells, pictures)
    with capsys.disabled():
        print(f"\n{path.stem} on {world_size} ranks: {took_s:.0f} s; pictures in {pictures}")


def wait_for(lab: JupyterLab, at: int, cell: nbformat.NotebookNode) -> None:
    """Wait until a cell has run, and check its outputs."""
    tags, of_cell = cell.metadata.get("tags", []), lab._cell(at)
    if not cell.metadata.get("jupyter", {}).get("source_hidden"):  # a folded cell has no prompt
        lab.wait_until_done(at, timeout_s=CELL_S)
    if "raises-exception" in tags:
        lab.wait_for_text(at, "Error")
    elif not cell.source.startswith("%ddp_torchrun"):  # a job may kill a rank, whose traceback torchrun prints
        errors = of_cell.locator(_STDERR).filter(has_text=_TRACEBACK)
        assert errors.count() == 0, f"{cell.source}\n\n{lab.text(at)}"
    if "picture" in tags:
        expect(of_cell.locator(".jp-Cell-outputArea").locator("img, canvas, svg").first).to_be_visible(timeout=DRAWN_MS)


def check_widgets(lab: JupyterLab, cells: list[nbformat.NotebookNode]) -> None:
    """Check that the widget of each question has been drawn, and that none is missing."""
    page = lab.page.locator(".jp-Notebook")
    for words in _NO_WIDGET:
        expect(page).not_to_contain_text(words, timeout=DRAWN_MS)
    for at, cell in enumerate(cells):
        if cell.cell_type == "code" and cell.source.startswith("lessons.ask("):
            expect(lab._cell(at).locator(_QUESTION).first).to_be_visible(timeout=DRAWN_MS)


def take_pictures(lab: JupyterLab, cells: list[nbformat.NotebookNode], folder: Path) -> None:
    """Keep a picture of each cell with a question, a widget or a figure."""
    folder.mkdir(parents=True, exist_ok=True)
    for at, cell in enumerate(cells):
        outputs = lab._cell(at).locator(".jp-Cell-outputArea")
        if cell.cell_type == "code" and _is_drawn(outputs):
            outputs.first.screenshot(path=folder / f"{at:02}_{cell.id}.png")


def _is_drawn(outputs: Locator) -> bool:
    return outputs.locator(".jupyter-widgets, img, canvas, svg, table").count() > 0
