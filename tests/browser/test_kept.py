"""The notebook of a kept session when its kernel is killed: its widgets become their last picture."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import open_notebook
from tests.browser.test_jupyterlab import write_notebook
from tests.keep.conftest import runtime  # noqa: F401  # a fixture

START, TRAIN, MONITOR, LESSON, PID, ATTACH = range(6)
CELLS = [
    "%load_ext ddp_notebook\n%ddp_start 2 --keep 1",
    "%%on_all_ranks\nfor step in range(9):\n    dist.all_reduce(torch.ones(1)); log(loss=1 / (step + 1), step=step)",
    "%ddp_monitor",
    "from ddp_notebook import lessons\nlessons.algorithm('ring all_reduce')",
    "import os\nprint('this is process', os.getpid())",
    "%load_ext ddp_notebook\n%ddp_attach",
]


@pytest.mark.browser
@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "restarted"])
def test_widgets_of_a_kernel_that_is_gone_are_their_last_picture(tmp_path, how, runtime: Path):  # noqa: F811
    notebook = tmp_path / "kept.ipynb"
    write_notebook(notebook, CELLS)
    with open_notebook(notebook, env={"XDG_RUNTIME_DIR": str(runtime)}) as lab:
        for cell in range(START, ATTACH):
            lab.run_cell(cell)
            lab.wait_until_done(cell)
        lab.wait_for_text(MONITOR, "last step 8")
        lab.wait_for_text(LESSON, "bytes into and out of each rank")
        found = re.search(r"this is process (\d+)", lab.text(PID))
        assert found is not None
        if how == "killed":
            os.kill(int(found[1]), signal.SIGKILL)
        else:
            lab.page.locator(".jp-NotebookPanel-toolbar [data-command='notebook:restart-kernel']").click()
        # the kernel has died and is restarted, or can be restarted
        lab.page.locator(".jp-Dialog .jp-mod-accept").click()
        lab._cell(MONITOR).scroll_into_view_if_needed()  # it draws only if it is visible
        if how == "restarted":  # ipywidgets notifies views of a restart, and not of a dead kernel
            lab.wait_for_text(MONITOR, "The kernel of this view has ended; this is the last picture of it.")
        expect(lab._cell(MONITOR).get_by_role("button", name="Interrupt ranks")).to_be_disabled()
        lab.run_cell(ATTACH)
        lab.wait_for_text(ATTACH, "kept-1: <Session: 2 ranks")
        assert "last step 8" in lab.text(MONITOR) and "bytes into and out of each rank" in lab.text(LESSON)
