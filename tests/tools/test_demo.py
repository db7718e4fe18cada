"""The notebooks of the repository, as `make demo` runs them and as they are committed."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tools.pictures import MOST_BYTES, TAG, store

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(path for path in (ROOT / "notebooks").glob("*.ipynb") if not path.name.endswith(".executed.ipynb"))


def run_demo(notebook: Path, executed: Path, world_size: int = 4) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/demo.py"), str(notebook), "--output", str(executed)]
    env = {**os.environ, "DDP_NOTEBOOK_RANKS": str(world_size)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.mark.long
def test_the_first_notebook_reaches_95_percent_accuracy(tmp_path):
    executed = tmp_path / "executed.ipynb"

    result = run_demo(ROOT / "notebooks" / "01_first_process_group.ipynb", executed)

    assert result.returncode == 0, result.stderr
    closing = result.stdout.splitlines()
    assert closing[-2].endswith(f"executed notebook: {executed}")
    assert "parameters equal to those of rank 0" in closing[-3]
    accuracy_percent = float(closing[-3].split("test accuracy ")[1].split("%")[0])
    assert accuracy_percent > 95
    page = executed.with_suffix(".html")
    assert closing[-1] == f"Open the monitor of this run in a browser: {page.as_uri()}"
    assert re.search(r"<title>(In \[\d+\]: )?4 ranks, \d+ steps, loss ", page.read_text())

    notebook = nbformat.read(executed, as_version=4)
    assert "widgets" not in notebook.metadata, "a saved widget is only an error message when it is reopened"
    last = notebook.cells[-1]
    assert last.source == "%ddp_monitor" and "image/png" in last.outputs[0].data
    kinds = {kind for cell in notebook.cells for out in cell.get("outputs", []) for kind in out.get("data", {})}
    assert "image/png" in kinds


@pytest.mark.long
def test_the_third_notebook_learns_and_reports_the_slow_rank(tmp_path):
    executed = tmp_path / "executed.ipynb"

    result = run_demo(ROOT / "notebooks" / "03_watch_it_train.ipynb", executed, world_size=2)

    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    [named] = {line.strip() for line in lines if "It was rank" in line}
    assert re.fullmatch(r"It was rank (\d). The report says: rank \1 came last in \d+ of \d+ steps, .*", named)
    learnt = lines[-3]
    begin, end = map(float, re.findall(r"\d+\.\d+", learnt))
    assert begin > 4.5 and end < 3
    (monitor,) = (cell for cell in nbformat.read(executed, as_version=4).cells if cell.source == "%ddp_monitor")
    (stays,) = (out.data for out in monitor.outputs if "data" in out)
    assert "image/png" in stays and "application/vnd.jupyter.widget-view+json" not in stays
    last = r"In \[\d+\]: 2 ranks, 30 steps, loss \d.\d\d -> \d.\d\d, .* ms/step, .* rank \d slowest"  # the last run
    assert re.match(last, stays["text/plain"])


@pytest.mark.long
def test_a_failing_cell_fails_the_demo_and_shows_its_traceback(tmp_path):
    notebook, executed = tmp_path / "failing.ipynb", tmp_path / "executed.ipynb"
    bar = "print('1 of 2', end='', flush=True); print('\\r2 of 2', end=''); 1 / 0"
    cells = [new_code_cell("print('before')"), new_code_cell(bar), new_code_cell("print('after')")]
    nbformat.write(new_notebook(cells=cells), notebook)

    result = run_demo(notebook, executed)

    assert result.returncode == 1
    assert "[1/3] print('before')\n    before\n" in result.stdout
    assert f"[2/3] {bar}\n    2 of 2\n" in result.stdout, "a file gets the last state of a line"
    assert "[3/3]" not in result.stdout and not executed.with_suffix(".html").exists()
    assert "ZeroDivisionError: division by zero" in result.stderr
    assert nbformat.read(executed, as_version=4).cells[1].outputs[-1].ename == "ZeroDivisionError"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_notebooks_contain_only_their_pictures(path):
    code_cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]

    assert code_cells
    for cell in code_cells:
        assert cell.execution_count is None
        assert bool(cell.outputs) == (TAG in cell.metadata.get("tags", [])), cell.source
        for output in cell.outputs:
            assert set(output.data) == {"image/png", "text/plain"}
            assert base64.b64decode(output.data["image/png"]).startswith(b"\x89PNG")
            assert len(output.data["image/png"]) * 3 / 4 <= MOST_BYTES, cell.source


@pytest.mark.long
def test_of_an_executed_notebook_only_its_pictures_are_kept(tmp_path):
    path = tmp_path / "pictures.ipynb"
    draw = "from ddp_notebook.lessons.nodes import places\nprint('a line')\nplaces(1, 2)"
    cells = [new_code_cell("1 + 1"), new_code_cell(draw, metadata={"tags": [TAG]}), new_code_cell(draw)]
    nbformat.write(new_notebook(cells=cells), path)

    assert store(path) == 1

    outputs = [cell.outputs for cell in nbformat.read(path, as_version=4).cells]
    assert [len(found) for found in outputs] == [0, 1, 0]
    assert set(outputs[1][0].data) == {"image/png", "text/plain"}
    cells[1].source = "1 + 1"
    nbformat.write(new_notebook(cells=cells), path)
    with pytest.raises(ValueError, match=r"cell 1 of pictures\.ipynb is tagged 'picture' and has shown no picture"):
        store(path)
