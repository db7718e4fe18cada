"""`breakpoint()` where no user can type: nbclient and papermill."""

from __future__ import annotations

from pathlib import Path

import nbformat
import papermill
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from tests.test_frontends import kernels  # noqa: F401  # fixture

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
NO_USER = "breakpoint() reads commands from the notebook, and this cell accepts no input: run it without"
OF_WORKER = "in a process that the rank has started: set num_workers=0 in the DataLoader"
LOADER = """%%on_all_ranks
from torch.utils.data import DataLoader
class Data:
    def __len__(self): return 4
    def __getitem__(self, i): breakpoint()
list(DataLoader(Data(), num_workers=1))"""
CELLS = [
    "%load_ext ddp_notebook\n%ddp_start 2",
    "%%on_all_ranks\nkept = rank\nif rank == 1: breakpoint()\ndist.barrier()",
    LOADER,
    "%%on_all_ranks\nx = torch.ones(1); dist.all_reduce(x); assert kept == rank and x.item() == 2",
]


def notebook():
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=[new_code_cell(source) for source in CELLS], metadata={"kernelspec": kernel})


def test_nbclient_shows_the_reason_and_continues(monkeypatch, kernels):  # noqa: F811
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = notebook()
    for cell in made.cells[1:3]:
        cell.metadata["tags"] = ["raises-exception"]
    cells = NotebookClient(made, timeout=120, config=kernels).execute().cells
    errors = [output.evalue for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert len(errors) == 2 and NO_USER in errors[0] and OF_WORKER in errors[1]
    assert cells[3].outputs == []


def test_papermill_ends_with_the_reason(monkeypatch, tmp_path, kernels):  # noqa: F811
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    nbformat.write(notebook(), tmp_path / "in.ipynb")
    with pytest.raises(papermill.exceptions.PapermillExecutionError) as error:
        papermill.execute_notebook(
            str(tmp_path / "in.ipynb"), str(tmp_path / "out.ipynb"), progress_bar=False, config=kernels
        )
    assert NO_USER in str(error.value)
