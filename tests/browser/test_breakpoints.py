"""Breakpoints in the margin of cells in JupyterLab and in Notebook 7."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import SCREENSHOTS, JupyterLab, open_notebook
from tests.browser.test_jupyterlab import write_notebook

LOAD, START, STEP, NEXT, LOOP = range(5)
CELLS = [
    "%load_ext ddp_notebook",
    "%ddp_start 2 --backend gloo",
    """%%on_all_ranks
def step(batch):
    loss = (batch * 2).sum() + rank
    open(f"ran_{rank}", "w").close()
    return loss

total = step(torch.ones(3))
print("total", total)""",
    "%%on_all_ranks\nx = torch.ones(1); dist.all_reduce(x); x",
    "%%on_all_ranks\nimport time\nwhile True:\n    time.sleep(0.05)",
]
STACK = ".jp-DebuggerCallstack"
WAIT_MS = 30_000


def switch_on(lab: JupyterLab) -> None:
    """Press the bug button, and wait until the debugger runs."""
    button = lab.page.locator(".jp-DebuggerBugButton").first
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true", timeout=WAIT_MS)


def click_margin(lab: JupyterLab, cell: int, line: int) -> None:
    """Click in the margin of a line of a cell, from 1."""
    editor = lab.page.locator(".jp-Notebook .jp-Cell").nth(cell)
    margin = editor.locator(".cm-gutter.cm-breakpoint-gutter .cm-gutterElement")
    margin.nth(line).click()  # the first element is an invisible one
    expect(margin.nth(line).locator(".cm-breakpoint-icon")).to_be_visible(timeout=WAIT_MS)


def wait_for_stack(lab: JupyterLab, *frames: str) -> None:
    """Wait until the call stack shows these frames."""
    stack = lab.page.locator(f"{STACK} li")
    for at, frame in enumerate(frames):
        expect(stack.nth(at)).to_contain_text(frame, timeout=WAIT_MS)


def press(lab: JupyterLab, key: str) -> None:
    """Press F9, which continues or pauses, or F10, which makes a step. Notebook 7 hides the buttons in its side bar."""
    lab.page.keyboard.press(key)


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.timeout(900)
@pytest.mark.parametrize("app", ["jupyterlab", "notebook"])
def test_margin_steps_stop_and_pause(tmp_path, app):
    path = tmp_path / "breakpoints.ipynb"
    write_notebook(path, CELLS)
    with open_notebook(path, app=app) as lab:
        for cell in (LOAD, START):
            lab.run_cell(cell)
            lab.wait_until_done(cell, 120)
        switch_on(lab)
        click_margin(lab, STEP, 4)
        lab.run_cell(STEP)
        wait_for_stack(lab, "[0] step", "[0] <module>")
        expect(lab.page.locator(".jp-DebuggerVariables")).to_contain_text("loss", timeout=WAIT_MS)
        lab.screenshot(SCREENSHOTS / f"breakpoints_{app}.png")
        press(lab, "F9")
        wait_for_stack(lab, "[1] step", "[1] <module>")
        press(lab, "F10")
        expect(lab.page.locator(f"{STACK} .selected").first).to_contain_text(":5", timeout=WAIT_MS)
        press(lab, "F9")
        lab.wait_for_text(STEP, "total")
        lab.wait_until_done(STEP)
        expect(lab.page.locator(".jp-DebuggerPausedOverlay")).to_have_count(0, timeout=WAIT_MS)
        expect(lab.page.locator(".jp-DebuggerVariables jp-tree-item.nested").nth(1)).to_contain_text("rank 1")
        for name in ("ran_0", "ran_1"):
            (tmp_path / name).unlink()
        lab.run_cell(LOOP)
        lab.page.wait_for_timeout(2000)
        press(lab, "F9")
        wait_for_stack(lab, "[0] <module>")
        lab.screenshot(SCREENSHOTS / f"breakpoints_{app}_paused.png")
        lab.press_stop()
        lab.wait_for_text(LOOP, "KeyboardInterrupt: the cell was stopped", timeout_s=5)
        for _ in range(20):
            lab.run_cell(STEP)
            wait_for_stack(lab, "[0] step")
            lab.press_stop()
            lab.wait_for_text(STEP, "KeyboardInterrupt: the cell was stopped", timeout_s=5)
            lab.wait_until_done(STEP)
            expect(lab.page.locator(f"{STACK} li")).to_have_count(0, timeout=WAIT_MS)
            assert not list(tmp_path.glob("ran_*"))
        lab.run_cell(NEXT)
        lab.wait_for_text(NEXT, "[0-1] tensor([2.])")
