"""A session and its monitor in marimo: in the editor and in an app."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.marimo_app import open_marimo
from tests.browser.test_monitor import View
from tests.conftest import wait_until

STEPS = 40
START = """
import marimo as mo
import ddp_notebook
from ddp_notebook.widgets import Monitor

session = ddp_notebook.start(2, reuse=True)
print("started", session.ranks.pids())
"""
SUM = """
summed = session.run("x = torch.full((2,), float(rank))\\ndist.all_reduce(x)\\nx")
"""
WATCH = """
monitor = Monitor(session)
monitor
"""
TRAIN = f"""
_ = monitor
trained = session.run("import time\\nfor step in range({STEPS}): log(loss=(rank + 1) / (step + 1)); time.sleep(0.1)")
print("logged", session.recording.metrics["loss"].of_rank(1)[1].tolist()[-1])
"""
HANG = """
_ = session.run("if rank: dist.barrier()\\nelse: import time; print('hangs now'); time.sleep(60)")
"""
SHOW = """
with mo.redirect_stdout():
    session.run("x = torch.full((2,), float(rank))\\ndist.all_reduce(x)\\nprint('sum', x.tolist())")
"""
JOB = """
job = session.submit("import time\\nfor step in range(12): print('step', step); time.sleep(0.25)")
"""
MEANWHILE = """
print("meanwhile", job.state)
"""
PIDS = 'mo.md(f"ranks {session.ranks.pids()}")'

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(600)]


def write_notebook(path: Path, cells: list[str]) -> Path:
    """Write a marimo notebook, which detects the dependencies of its cells."""
    indented = ("\n".join(f"    {line}" for line in cell.strip().splitlines()) for cell in cells)
    bodies = "".join(f"@app.cell\ndef _():\n{body}\n    return\n\n\n" for body in indented)
    path.write_text(f'import marimo\n\napp = marimo.App()\n\n\n{bodies}if __name__ == "__main__":\n    app.run()\n')
    return path


def test_the_monitor_is_live_and_detects_the_end_of_a_cell(tmp_path):
    with open_marimo(write_notebook(tmp_path / "live.py", [START, SUM, WATCH, TRAIN])) as marimo:
        marimo.run_all()
        marimo.wait_for_text("[0-1] tensor([1., 1.])")
        view = View(marimo)
        view.wait_for("state.panels.loss?.x.length > 5")
        assert view.state()["status"].startswith("Cell 2"), "it comes while the cell runs"
        view.wait_for("state.status == 'No cell is running; the last one was cell 2.'")
        marimo.wait_for_text(f"logged {2 / STEPS}")
        lines = view.wait_for(f"state.panels.loss.x.length == {STEPS}")["panels"]["loss"]["lines"]
        assert lines["rank 1"]["values"][-1] == pytest.approx(2 / STEPS)
        [started] = set(re.findall(r"started \[\d+, \d+\]", marimo.text()))

        marimo.page.locator(".ddpm").evaluate("root => { root.dataset.before = 'yes'; }")
        marimo.run_cell(0)  # and the cells that depend on it
        expect(marimo.page.locator(".ddpm[data-before]")).to_have_count(0, timeout=20_000)
        expect(marimo.page.locator(".ddpm")).to_have_count(1, timeout=20_000)
        assert set(re.findall(r"started \[\d+, \d+\]", marimo.text())) == {started}, "the same ranks"
        assert "SessionExistsError" not in marimo.text()


def test_its_stop_button_ends_a_cell_and_the_ranks_stay(tmp_path):
    with open_marimo(write_notebook(tmp_path / "stop.py", [START, HANG, SUM])) as marimo:
        marimo.run_all()
        marimo.wait_for_text("[0] hangs now")
        marimo.stop()
        marimo.wait_for_text("This cell was interrupted", timeout_s=10)
        marimo.run_cell(2)
        marimo.wait_for_text("[0-1] tensor([1., 1.])")


def test_a_job_goes_on_while_other_cells_run(tmp_path):
    with open_marimo(write_notebook(tmp_path / "job.py", [START, JOB, MEANWHILE])) as marimo:
        marimo.run_all()
        marimo.wait_for_text("meanwhile running")
        assert "step 11" not in marimo.text()
        marimo.wait_for_text("[0-1] step 11")
        marimo.wait_for_text("job 1 is done after")


def test_viewers_of_an_app_share_the_ranks_and_their_output(tmp_path):
    with open_marimo(write_notebook(tmp_path / "app.py", [START, SHOW, WATCH, PIDS]), "run") as marimo:
        marimo.wait_for_text("[0-1] sum [1.0, 1.0]")
        expect(marimo.page.locator(".ddpm")).to_be_visible()
        [ranks] = re.findall(r"ranks \[\d+, \d+\]", marimo.text())
        second = marimo.page.context.new_page()
        second.goto(marimo.page.url)
        expect(second.get_by_text("[0-1] sum [1.0, 1.0]").first).to_be_visible(timeout=60_000)
        wait_until(lambda: ranks in second.locator("body").inner_text(), 10, "the same ranks in the second view")
