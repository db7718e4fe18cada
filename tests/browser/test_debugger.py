"""The prompt of a debugger in JupyterLab and in Notebook 7."""

from __future__ import annotations

import pytest

from tests.browser.jupyterlab import SCREENSHOTS, JupyterLab, open_notebook
from tests.browser.test_jupyterlab import write_notebook

LOAD, START, STEP, NEXT, FAILS, DEBUG = range(6)
STEP_CODE = """%%on_all_ranks
def step(batch):
    loss = (batch * 2).sum()
    breakpoint()
    dist.all_reduce(loss)
    return loss

step(torch.ones(3) * rank)"""
CELLS = [
    "%load_ext ddp_notebook",
    "%ddp_start 2 --backend gloo",
    STEP_CODE,
    "%%on_all_ranks\nx = torch.ones(1); dist.all_reduce(x); x",
    "%%on_all_ranks\nsizes = [3, 4]\nif rank == 1: raise ValueError('bad data')",
    "%ddp_debug",
]


def type_line(lab: JupyterLab, prompt: str, line: str) -> None:
    """Type a line at a prompt."""
    box = lab.page.locator(".jp-Stdin").filter(has_text=prompt).locator("input")
    box.last.wait_for(timeout=20_000)
    box.last.fill(line)
    box.last.press("Enter")


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.timeout(600)
@pytest.mark.parametrize("app", ["jupyterlab", "notebook"])
def test_ranks_stop_step_and_are_stopped(tmp_path, app):
    path = tmp_path / "debugger.ipynb"
    write_notebook(path, CELLS)
    with open_notebook(path, app=app) as lab:
        for cell in (LOAD, START):
            lab.run_cell(cell)
            lab.wait_until_done(cell, 120)
        lab.run_cell(STEP)
        type_line(lab, "(ranks 0-1)", "p loss")
        lab.wait_for_text(STEP, "tensor(0. | 6.)")
        type_line(lab, "(ranks 0-1)", "@1 p batch")
        lab.wait_for_text(STEP, "[1] tensor([1., 1., 1.])")
        type_line(lab, "(ranks 0-1)", "n")
        lab.wait_for_text(STEP, "-> dist.all_reduce(loss)")
        lab.page.locator(".jp-Stdin input").last.wait_for(timeout=20_000)
        lab.screenshot(SCREENSHOTS / f"debugger_{app}.png")
        lab.press_stop()
        lab.wait_for_text(STEP, "KeyboardInterrupt: the cell was stopped", timeout_s=5)
        lab.wait_until_done(STEP)
        lab.run_cell(NEXT)
        lab.wait_for_text(NEXT, "[0-1] tensor([2.])")
        lab.run_cell(FAILS)
        lab.wait_for_text(FAILS, "ValueError: bad data (rank 1)")
        lab.run_cell(DEBUG)
        type_line(lab, "(rank 1)", "p sizes")
        lab.wait_for_text(DEBUG, "[1] [3, 4]")
        type_line(lab, "(rank 1)", "q")
        lab.wait_until_done(DEBUG)
        lab.screenshot(SCREENSHOTS / f"debugger_{app}_failed.png")
