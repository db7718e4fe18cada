"""One training run has bit-identical losses under torchrun and in all kinds of notebooks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import nbformat
import papermill
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from tests.browser.jupyterlab import open_notebook
from tests.browser.marimo_app import open_marimo
from tests.browser.test_marimo import write_notebook as write_marimo_notebook
from tests.installing.environments import of_list
from tests.kernels import NotebookKernel

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
_TRAINING = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if not dist.is_initialized():
    dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
torch.manual_seed(rank)
x = torch.randn(64, 8)
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item().hex())
print(f"losses of rank {rank}: {' '.join(losses)} end")
"""
_CELLS = ["%load_ext ddp_notebook", "%ddp_start 2", f"%%on_all_ranks\n{_TRAINING.strip()}", "%ddp_stop"]
_MARIMO = [
    "import ddp_notebook\n\nsession = ddp_notebook.start(2, reuse=True)",
    f"_ = session.run({_TRAINING!r})",
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[str, str]:
    program = tmp_path_factory.mktemp("torchrun") / "training.py"
    program.write_text(_TRAINING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = losses(done.stdout)
    assert set(found) == {"0", "1"} and found["0"] != found["1"] and found["0"].count("0x") == 20
    return found


def losses(text: str) -> dict[str, str]:
    """Return the losses by rank. A page may break lines."""
    return {
        rank: " ".join(of_rank.split()) for rank, of_rank in re.findall(r"rank (\d): ([0-9a-fxp.+\-\s]+) end", text)
    }


def notebook() -> nbformat.NotebookNode:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=[new_code_cell(source) for source in _CELLS], metadata={"kernelspec": kernel})


def streams(executed: nbformat.NotebookNode) -> str:
    outputs = [output for cell in executed.cells for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def in_nbclient(_: Path) -> str:
    return streams(NotebookClient(notebook(), timeout=120).execute())


def in_papermill(folder: Path) -> str:
    nbformat.write(notebook(), folder / "in.ipynb")
    return streams(papermill.execute_notebook(folder / "in.ipynb", folder / "out.ipynb", progress_bar=False))


def in_browser(app: str) -> Callable[[Path], str]:
    def run(folder: Path) -> str:
        nbformat.write(notebook(), folder / "training.ipynb")
        with open_notebook(folder / "training.ipynb", app=app) as page:
            page.run_all()
            page.wait_until_done(len(_CELLS) - 1)
            return page.text(2)

    return run


def in_marimo(folder: Path) -> str:
    with open_marimo(write_marimo_notebook(folder / "training.py", _MARIMO)) as page:
        page.run_all()
        page.wait_for_text("losses of rank 0: 0x")
        page.wait_for_text("losses of rank 1: 0x")
        return page.text()


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(in_nbclient, id="nbclient"),
        pytest.param(in_papermill, id="papermill"),
        pytest.param(in_browser("jupyterlab"), id="JupyterLab"),
        pytest.param(in_browser("notebook"), id="Notebook 7"),
        pytest.param(in_marimo, id="marimo"),
    ],
)
def test_the_losses_are_those_of_torchrun(run, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert losses(run(tmp_path)) == expected


@pytest.mark.parametrize("service", ["colab", "kaggle"])
def test_they_are_with_the_versions_of_a_service(service, expected, tmp_path, wheel):
    made = of_list(tmp_path / "env", service)
    made.pip("install", "-q", str(wheel))
    with closing(NotebookKernel({"PYTHONPATH": ""}, python=str(made.python), cwd=str(made.folder))) as kernel:
        replies = [kernel.run(source, timeout_s=120) for source in _CELLS]
    assert losses("".join(reply.stdout for reply in replies)) == expected
