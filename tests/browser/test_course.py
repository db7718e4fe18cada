"""The lessons after DDP in Chromium: Run All to the last cell, with the expected pictures and errors."""

from __future__ import annotations

import shutil
import time

import nbformat
import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import open_notebook
from tests.lessons.test_notebooks import LESSONS

_TRACEBACK = "Traceback (most recent call last)"

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    "path", [path for path in LESSONS if path.name >= "10" and path.name[:2] != "19"], ids=lambda path: path.stem
)
def test_a_lesson_runs_in_the_browser(path, world_size, tmp_path, capsys):
    opened = tmp_path / path.name
    shutil.copy(path, opened)
    cells = nbformat.read(path, as_version=4).cells

    with open_notebook(opened, env={"DDP_NOTEBOOK_RANKS": str(world_size), "DDP_NOTEBOOK_ANSWERS": "shown"}) as lab:
        began_s = time.monotonic()
        lab.run_all()
        for at, cell in enumerate(cells):
            if cell.cell_type != "code":
                continue
            if cell.metadata.get("jupyter", {}).get("source_hidden"):
                continue  # it has no prompt
            lab.wait_until_done(at, timeout_s=300)
            tags = cell.metadata.get("tags", [])
            if "raises-exception" in tags:
                lab.wait_for_text(at, "Error")
            elif not cell.source.startswith("%ddp_torchrun"):  # kills a rank: another message may come first
                assert _TRACEBACK not in (shown := lab.text(at)), f"{cell.source}\n\n{shown}"
            if "picture" in tags:
                expect(lab._cell(at).locator(".jp-Cell-outputArea").locator("img, canvas, svg").first).to_be_visible()
        lab.wait_for_text(at, "stopped")  # the page would not continue after any other error
        took_s = time.monotonic() - began_s
    with capsys.disabled():
        print(f"\n{path.stem} on {world_size} ranks: {took_s:.0f} s")
