"""The first hour of a new user in JupyterLab: lesson 01 with "Run All", twice, and help while a command is typed."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import open_notebook
from tests.browser.test_jupyterlab import write_notebook

FIRST = Path(__file__).parents[2] / "notebooks" / "01_first_process_group.ipynb"

pytestmark = [pytest.mark.long, pytest.mark.browser, pytest.mark.timeout(600)]


def test_lesson_01_runs_twice_and_ends_with_a_live_monitor(tmp_path):
    path = tmp_path / FIRST.name
    shutil.copy(FIRST, path)
    cells = nbformat.read(path, as_version=4).cells
    [start] = [at for at, cell in enumerate(cells) if "%ddp_start {ranks}" in cell.source]
    [train] = [at for at, cell in enumerate(cells) if "log(loss=loss)" in cell.source and cell.cell_type == "code"]
    status, monitor = len(cells) - 2, len(cells) - 1

    with open_notebook(path, env={"DDP_NOTEBOOK_RANKS": "2"}) as lab:
        for run in (1, 2):
            lab.run_all()
            lab.wait_until_done(monitor, timeout_s=180)
            assert lab.text(status).count("idle") == 2, "the ranks run"
            assert ("2 ranks are already running" in lab.text(start)) == (run == 2)
            assert "epoch 15 of 15" in lab.text(train)
            tabs = lab._cell(monitor).get_by_role("tab")
            expect(tabs.filter(has_text="Timeline")).to_be_visible(timeout=30_000)
            tabs.filter(has_text="Timeline").click()
            expect(tabs.filter(has_text="Timeline")).to_have_attribute("aria-selected", "true")


def test_options_complete_and_are_explained_where_they_are_typed(tmp_path):
    path = tmp_path / "help.ipynb"
    write_notebook(path, ["%load_ext ddp_notebook", "%ddp_start --hel", "%ddp_start 2 --ho", "%ddp_start?"])

    with open_notebook(path) as lab:
        lab.run_cell(0)
        lab.wait_until_done(0)
        for cell, option in ((1, "--help"), (2, "--hosts")):
            lab._cell(cell).locator(".cm-content").click()
            lab.page.keyboard.press("End")
            lab.page.keyboard.press("Tab")
            completer = lab.page.locator(".jp-Completer")
            expect(completer).to_contain_text(option, timeout=20_000)
            expect(completer.locator(".jp-Completer-item")).to_have_count(1)
            lab.page.keyboard.press("Enter")
            expect(lab._cell(cell).locator(".cm-content")).to_contain_text(option)
        lab.run_cell(1)
        lab.wait_for_text(1, "usage: %ddp_start [N] [option ...]")
        assert "--hang-after S|off" in lab.text(1) and "--keep-recording MB" in lab.text(1)
        lab.run_cell(3)
        expect(lab.page.locator("body")).to_contain_text("examples:", timeout=20_000)
