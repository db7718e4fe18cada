"""Background cells in JupyterLab and in Notebook 7: later output appears under their own cell."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import open_notebook
from tests.browser.test_jupyterlab import write_notebook

LOAD, START, JOB, FAILS, LOCAL, SLEEP, WAIT, STOP = range(8)

CELLS = [
    "%load_ext ddp_notebook",
    "%ddp_start 2 --backend gloo",
    "%%on_all_ranks --background\n%matplotlib inline\nimport time, matplotlib.pyplot as plt\n"
    "for step in range(60):\n    log(loss=1 / (step + 1)); print(f'\\r{step} of 59', end='', flush=True)\n"
    "    time.sleep(0.1)\n"
    "print()\nif rank == 0:\n    plt.plot([1, 2]); plt.show()\nprint('the end of the job')",
    "%%on_all_ranks --background\nif rank: raise ValueError('no')",
    "print('of the notebook')",
    "import time; print('asleep', flush=True); time.sleep(60)",
    "%ddp_wait",
    "%ddp_stop",
]


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.timeout(600)  # chromium may have to be installed first
@pytest.mark.parametrize("app", ["jupyterlab", pytest.param("notebook", marks=pytest.mark.long)])
def test_a_job_goes_on_under_its_cell_beside_the_notebooks_own(tmp_path, app):
    path = tmp_path / "jobs.ipynb"
    write_notebook(path, CELLS)

    with open_notebook(path, app=app) as lab:
        lab.run_all()
        lab.wait_for_text(LOCAL, "of the notebook")
        lab.wait_for_text(SLEEP, "asleep")
        lab.wait_until_done(JOB)
        assert "the end of the job" not in lab.text(JOB)
        lab.wait_for_text(FAILS, "job 2 waits for job 1")
        lab.press_stop()
        lab.wait_until_done(SLEEP)
        lab.wait_for_text(SLEEP, "KeyboardInterrupt")

        lab.wait_for_text(JOB, "job 1 runs on ranks 0,1")
        page = lab.page.locator(".jp-Notebook .jp-Cell").nth(JOB)
        expect(page.locator(".ddp-html")).to_have_count(1)
        lab.wait_for_text(JOB, "the end of the job")
        lab.wait_for_text(JOB, "job 1 is done after")
        assert "] 59 of 59" in lab.text(JOB) and "58 of 59" not in lab.text(JOB)
        expect(page.locator("img[src^='data:image/png']")).to_have_count(1)

        lab.wait_for_text(FAILS, "ValueError: no")
        lab.wait_for_text(FAILS, "job 2 failed after")
        lab.run_cell(WAIT)
        lab.wait_for_text(WAIT, "RankError: ValueError: no (rank 1)")
        lab.run_cell(STOP)
        lab.wait_for_text(STOP, "stopped 2 ranks")
