"""The display in JupyterLab and in Notebook 7: output by rank, the stop button, and the next cell after it."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tests.browser.jupyterlab import open_notebook

LOAD, START, ALL_REDUCE, SLEEP, NEXT, STOP = range(6)

CELLS = [
    "%load_ext ddp_notebook",
    "%ddp_start 2 --backend gloo",
    "%%on_all_ranks\nx = torch.full((2,), float(rank + 1))\ndist.all_reduce(x)\nx",
    '%%on_all_ranks\nimport time\nprint("the", ["first", "second"][rank], "sleeps")\ntime.sleep(60)',
    "%%on_all_ranks\nx += rank\nx",
    "%ddp_stop",
]


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.timeout(600)  # chromium may have to be installed first
@pytest.mark.parametrize("app", ["jupyterlab", pytest.param("notebook", marks=pytest.mark.long)])
def test_cells_run_on_all_ranks_and_the_stop_button_ends_them(tmp_path, app):
    path = tmp_path / "two_ranks.ipynb"
    write_notebook(path, CELLS)

    with open_notebook(path, app=app) as lab:
        lab.run_all()
        lab.wait_for_text(ALL_REDUCE, "tensor([3., 3.])")
        for name in ("first", "second"):
            lab.wait_for_text(SLEEP, f"the {name} sleeps")

        lab.press_stop()
        lab.wait_for_text(SLEEP, "KeyboardInterrupt", timeout_s=5)
        lab.wait_until_done(SLEEP)
        assert lab.text(NEXT) == "", "the interrupt ends Run All, so the cells after it do not run"

        lab.run_cell(NEXT)
        for text in ("[0] tensor([3., 3.])", "[1] tensor([4., 4.])"):
            lab.wait_for_text(NEXT, text)

        lab.run_cell(STOP)
        lab.wait_until_done(STOP)


def write_notebook(path: Path, cells: list[str]) -> None:
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    notebook = new_notebook(cells=[new_code_cell(source) for source in cells], metadata={"kernelspec": kernel})
    nbformat.write(notebook, path)
