"""A slider that a cell has created on every rank: the user moves one, and that rank receives the value."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect

from tests.browser.jupyterlab import SCREENSHOTS, open_notebook

LOAD, SLIDERS, VALUES, BARS, STOP = range(5)
JOB = 2  # index in RELOADED

CELLS = [
    "%load_ext ddp_notebook\n%ddp_start 2 --backend gloo",
    "%%on_all_ranks\n"
    "import ipywidgets as widgets\n"
    "slider = widgets.IntSlider(value=10 * rank, description=f'rank {rank}')\n"
    "slider.observe(lambda change: setattr(slider, 'description', f'now {change[\"new\"]}'), 'value')\n"
    "slider",
    "%%on_all_ranks\nslider.value",
    "%%on_all_ranks\nfrom tqdm.notebook import tqdm\nfor _ in tqdm(range(10 * (rank + 1)), desc=f'rank {rank}'): pass",
    "%ddp_stop",
]

RELOADED = [
    *CELLS[: SLIDERS + 1],
    "%%on_all_ranks --background\nimport time\nfor _ in range(1200): time.sleep(0.1)",
    "import os, signal, ddp_notebook\nos.kill(ddp_notebook.current().ranks.pids()[1], signal.SIGKILL)",
    "%ddp_stop",
]


def _notebook(folder: Path, sources: list[str]) -> Path:
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    cells = [new_code_cell(source) for source in sources]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), folder / "widgets.ipynb")
    return folder / "widgets.ipynb"


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.timeout(600)  # chromium may have to be installed first
def test_a_slider_on_a_rank_is_moved_by_its_user(tmp_path):
    with open_notebook(_notebook(tmp_path, CELLS)) as lab:
        for cell in (LOAD, SLIDERS):
            lab.run_cell(cell)
            lab.wait_until_done(cell)
        sliders = lab.page.locator(".widget-slider")
        expect(sliders).to_have_count(2)
        expect(sliders.filter(has_text="rank 0")).to_have_count(1)
        handle = sliders.filter(has_text=re.compile("rank 1|now")).locator(".noUi-handle")
        for value in range(11, 16):
            handle.press("ArrowRight")  # focuses the handle first
            expect(sliders.filter(has_text=f"now {value}")).to_have_count(1)  # set by the callback on the rank
        lab.run_cell(VALUES)
        lab.wait_for_text(VALUES, "[0] 0")
        lab.wait_for_text(VALUES, "[1] 15")

        lab.run_cell(BARS)
        lab.wait_for_text(BARS, "10/10")
        lab.wait_for_text(BARS, "20/20")
        lab.screenshot(SCREENSHOTS / "widgets.png")

        lab.page.keyboard.press("Control+s")
        expect(lab.page.locator(".lm-DockPanel-tabBar .jp-mod-dirty")).to_have_count(0)
        lab.page.reload()
        expect(sliders.filter(has_text="now 15")).to_have_count(1, timeout=30_000)
        lab.run_cell(STOP)
        lab.wait_until_done(STOP)


@pytest.mark.browser
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_page_reloads_while_ranks_are_busy_dead_or_ended(tmp_path):
    with open_notebook(_notebook(tmp_path, RELOADED)) as lab:
        sliders = lab.page.locator(".widget-slider")
        for cell, what in enumerate(("", "sliders", "busy ranks", "a dead rank", "ended ranks")):
            lab.run_cell(cell)
            if cell != JOB:
                lab.wait_until_done(cell)
            if not what:
                continue
            if cell >= JOB:
                lab.page.keyboard.press("Control+s")
                expect(lab.page.locator(".lm-DockPanel-tabBar .jp-mod-dirty")).to_have_count(0)
                lab.page.reload()
            for rank in range(2):
                expect(sliders.filter(has_text=f"rank {rank}"), what).to_have_count(1, timeout=30_000)
