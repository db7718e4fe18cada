"""The monitor without a widget in JupyterLab, and the message about when the kernel answers the widget."""

from __future__ import annotations

import re
import time

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.browser import jupyterlab
from tests.browser.jupyterlab import SCREENSHOTS, open_notebook
from tests.browser.test_jupyterlab import write_notebook
from tests.browser.test_monitor import View, is_running, use_theme

START, SET_UP, TRAIN, STOP = range(4)
STEPS = 60
CELLS = [
    "%load_ext ddp_notebook\n%ddp_start 2 --backend gloo --live html",
    "%%on_all_ranks\n"
    "import time\n"
    "from torch.nn.parallel import DistributedDataParallel\n"
    "model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]))\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.5)",
    "%%on_all_ranks\n"
    f"for step in range({STEPS}):\n"
    "    optimizer.zero_grad()\n"
    "    x = torch.randn(64, 256)\n"
    "    loss = (model(x) - x.roll(1)).square().mean()\n"
    "    loss.backward()\n"
    "    if rank == 1: time.sleep(0.02)\n"
    "    optimizer.step()\n"
    "    log(loss=loss, examples=64 * step)\n"
    "    time.sleep(0.02)",
    "%ddp_stop",
]


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.timeout(600)  # chromium may have to be installed first
def test_html_is_redrawn_during_a_cell_and_saved_in_the_notebook(tmp_path):
    path = tmp_path / "html_monitor.ipynb"
    write_notebook(path, CELLS)
    with open_notebook(path) as lab:
        for cell in (START, SET_UP):
            lab.run_cell(cell)
            lab.wait_until_done(cell)
        lab.run_cell(TRAIN)
        view = lab.page.locator(".ddp-html")
        expect(view).to_be_visible(timeout=20_000)
        seen: list[int] = []
        while is_running(lab, TRAIN):
            ended = [int(step) for step in re.findall(r"\t(\d+)\t[\d.]+ ms", view.inner_text())]
            if ended and max(ended) not in seen:
                seen.append(max(ended))
                if len(seen) == 3:
                    # screenshot of the page, because the view is redrawn
                    lab.screenshot(SCREENSHOTS / "html_monitor_running.png")
            time.sleep(0.05)
        assert len(seen) >= 3 and seen == sorted(seen), "it goes on while the cell runs"

        expect(view.locator(".chip")).to_have_text("recorded")
        expect(view).to_have_count(1)
        assert lab.page.locator(".ddpm").count() == 0, "no widget"
        ranks = view.locator("tbody tr").all_inner_texts()
        assert [row.split("\t")[0] for row in ranks] == ["0", "1"]
        assert f"\t{STEPS - 1}\t" in ranks[0]
        for theme in ("light", "dark"):
            use_theme(lab, theme)
            view.scroll_into_view_if_needed()
            view.screenshot(path=SCREENSHOTS / f"html_monitor_{theme}.png")
            found = Axe().run(lab.page, context=".ddp-html")
            assert found.violations_count == 0, found.generate_report()

        lab.page.keyboard.press("Control+s")
        expect(lab.page.locator(".jp-mod-dirty")).to_have_count(0)
        lab.run_cell(STOP)
        lab.wait_until_done(STOP)
        lab.page.reload()
        expect(view.locator("svg")).to_have_count(2, timeout=30_000)
    [data] = [one["data"] for one in nbformat.read(path, nbformat.NO_CONVERT).cells[TRAIN].outputs]
    assert set(data) == {"text/html", "text/plain"} and len(data["text/html"]) < 20_000
    assert f": 2 ranks, {STEPS} steps, loss" in data["text/plain"]


@pytest.mark.browser
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_monitor_says_that_it_is_heard_after_the_cell(tmp_path, monkeypatch):
    """If a front end sends nothing to subshells, like VS Code, the kernel reads messages only after the cell.

    (test_monitor checks the other case.)
    """
    settings = {"commsOverSubshells": "disabled"}
    monkeypatch.setitem(jupyterlab.SETTINGS, "apputils-extension/kernels-settings", settings)
    path = tmp_path / "heard.ipynb"
    cells = ["%load_ext ddp_notebook\n%ddp_start 2 --backend gloo", "%ddp_monitor"]
    cells += ["%%on_all_ranks\nimport time\ntime.sleep(60 if rank else 0)", "%ddp_stop"]
    write_notebook(path, cells)
    with open_notebook(path) as lab:
        for cell in range(2):
            lab.run_cell(cell)
            lab.wait_until_done(cell)
        view = View(lab)
        view.wait_for("state.notes.includes('buttons here work only after the cell')")
        lab.run_cell(2)
        view.wait_for("state.status.includes('is running')")
        view.root.get_by_role("button", name="Interrupt ranks").click()
        view.wait_for('state.status.includes("press the notebook\'s stop button")')
        assert is_running(lab, 2)
        lab.press_stop()
        lab.wait_until_done(2)
        lab.run_cell(3)
        lab.wait_until_done(3)
