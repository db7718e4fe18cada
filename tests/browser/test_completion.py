"""Tab in a cell of ranks while another cell runs: the menu appears, and the status bar stays busy."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect

from tests.browser.jupyterlab import SCREENSHOTS, open_notebook

LOAD, SETUP, TRAIN, TAB = range(4)
CELLS = [
    "%load_ext ddp_notebook\n%ddp_start 2 --backend gloo",
    "%%on_all_ranks\nlosses = [0.5]\nlr = torch.tensor(0.1)",
    "%%on_all_ranks\nimport time\nfor step in range(100):\n    dist.all_reduce(lr); time.sleep(0.1)",
    "%%on_all_ranks\nlosses.ap",
]


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.timeout(900)  # chromium may have to be installed first
@pytest.mark.parametrize("app", ["jupyterlab", "notebook"])
def test_tab_shows_names_while_a_cell_runs(tmp_path, app):
    with open_notebook(write(tmp_path), app=app) as lab:
        for cell in (LOAD, SETUP):
            lab.run_cell(cell)
            lab.wait_until_done(cell, 120)
        lab.run_cell(TRAIN)
        lab.page.wait_for_timeout(1500)
        menu = lab.page.locator(".jp-Completer:visible")
        for _ in range(3):
            lab._cell(TAB).locator(".cm-line").nth(1).click()
            lab.page.keyboard.press("End")
            lab.page.keyboard.press("Tab")
            expect(menu).to_contain_text("append", timeout=3000)
            expect(menu).to_contain_text("function")
            assert "*" in lab._cell(TRAIN).locator(".jp-InputPrompt").inner_text(), "the cell still runs"
            if app == "jupyterlab":
                expect(lab.page.locator("#jp-main-statusbar")).to_contain_text("| Busy")
            lab.screenshot(SCREENSHOTS / f"completion_{app}.png")
            lab.page.keyboard.press("Escape")
        lab.page.keyboard.type("pend")
        lab.page.keyboard.press("Shift+Tab")
        expect(lab.page.locator(".jp-Tooltip:visible")).to_contain_text("Append object", timeout=3000)
        lab.screenshot(SCREENSHOTS / f"help_{app}.png")
        lab.press_stop()
        expect(lab._cell(TRAIN).locator(".jp-InputPrompt")).not_to_contain_text("*", timeout=10_000)
        if app == "jupyterlab":
            expect(lab.page.locator("#jp-main-statusbar")).to_contain_text("| Idle", timeout=10_000)


def write(folder: Path) -> Path:
    """Write a notebook with these cells."""
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    cells = [new_code_cell(source) for source in CELLS]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), folder / "completion.ipynb")
    return folder / "completion.ipynb"
