"""With the versions of Colab and Kaggle: the first notebook installs our wheel and changes no other package.

The notebooks run, code locations are correct, and the cell tests of the suite pass.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest

from tests.conftest import is_within
from tests.installing.environments import Environment, checkout_files, of_list
from tests.installing.test_installing import EXECUTE, FIRST, group, looking, printed
from tests.kernels import NotebookKernel

ROOT = Path(__file__).parents[2]
THIRD = ROOT / "notebooks" / "03_watch_it_train.ipynb"
KEPT = ("torch", "ipykernel", "ipywidgets", "ipython", "ipyparallel", "numpy")
SUITE = ("private_interfaces", "cells", "notebook", "output", "values", "client", "healing", "widgets")
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


class Service(NamedTuple):
    """Versions of a service, with our wheel installed."""

    environment: Environment
    before: dict[str, str]  # previously installed versions, by name


@pytest.fixture(scope="module", params=["colab", "kaggle"])
def service(request, tmp_path_factory, wheel) -> Service:
    """Install our wheel like the cell of the notebook."""
    made = of_list(tmp_path_factory.mktemp(request.param) / "env", request.param)
    before = made.versions()
    [install] = [cell.source for cell in nbformat.read(FIRST, as_version=4).cells if "%pip install" in cell.source]
    source, count = re.subn(r"ddp_notebook @ git\+https://[^\"]+", f"ddp_notebook @ {wheel.as_uri()}", install)
    assert count == 1
    with closing(kernel_of(made)) as kernel:
        reply = kernel.run(source, timeout_s=300)
        assert reply.status == "ok" and "ERROR" not in reply.stdout + reply.stderr, reply
        place = kernel.run("import ddp_notebook; print(ddp_notebook.__file__)")
        assert place.stdout.startswith(str(made.packages)), place
        again = kernel.run(source)
        assert (again.status, again.stdout, again.displays) == ("ok", "", []) and is_within(again.duration_s, 2)
    return Service(made, before)


@pytest.fixture
def there(service) -> Environment:
    return service.environment


def kernel_of(environment: Environment, **env: str) -> NotebookKernel:
    return NotebookKernel(env | {"PYTHONPATH": ""}, python=str(environment.python), cwd=str(environment.folder))


def test_installing_it_changes_nothing_that_was_there(service):
    before, after = service.before, service.environment.versions()
    assert {name: (version, after.get(name)) for name, version in before.items() if after.get(name) != version} == {}
    assert set(KEPT) <= set(before)
    assert set(after) - set(before) <= {"ddp-notebook", "jedi", "overrides"}, "what IPython itself lacks there"


@pytest.mark.parametrize("notebook", [FIRST, THIRD], ids=["01", "03"])
def test_the_notebook_runs(there, notebook, tmp_path):
    executed = there.folder / f"{notebook.stem}.executed.ipynb"
    looked = looking(notebook, tmp_path / "looked.ipynb")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"DDP_NOTEBOOK_RANKS": "2", "DDP_NOTEBOOK_ANSWERS": "shown"}
    command = [sys.executable, str(EXECUTE), str(looked), str(executed), str(there.python)]
    done = subprocess.run(command, env=env, cwd=there.folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    said = printed(nbformat.read(executed, as_version=4))
    assert checkout_files(said) == [] and said.count("/ddp_notebook/__init__.py") == 3
    if notebook == FIRST:
        assert float(group(r"test accuracy ([\d.]+)%", said)) > 95
    else:
        assert re.search(r"It was rank (\d)\. The report says: rank \1 came last in \d+ of \d+ steps", said)


@pytest.fixture
def kernel(there) -> Iterator[NotebookKernel]:
    with closing(kernel_of(there)) as running:
        assert running.run("%load_ext ddp_notebook\n%ddp_start 2").status == "ok"
        yield running


def test_places_read_right(kernel):
    """In IPython 7 the code of a cell is `<cell line: 0>` and in no function."""
    reply = kernel.run("%%on_all_ranks\n\nif rank == 1: dist.barrier()\nelse: raise ValueError('no')")
    assert "rank 1 waited in barrier #1 of group default (cell line 2)" in reply.traceback
    reply = kernel.run("%%on_all_ranks --timeout 1\nimport time\ndef wait():\n    time.sleep(60)\n\nwait()")
    assert "at cell line 3 in wait" in reply.evalue
    reply = kernel.run("%%on_all_ranks --timeout 1\nimport time\n\ntime.sleep(60)")
    assert "at cell line 3\n" in reply.evalue + "\n"
    kernel.run("%%on_all_ranks\nx = torch.ones(1)\ndist.all_reduce(x)")
    reply = kernel.run("import ddp_notebook; print(ddp_notebook.current().recording.collectives()[-1].site)")
    assert reply.stdout == "cell line 2\n"


def test_a_live_monitor_comes_gives_way_to_html_which_stays(kernel):
    """All views use one display. No front end answers the widget, as in Colab while a cell runs."""
    (_, shown), (_, picture) = kernel.run("%ddp_monitor").shown
    assert picture["data"]["text/plain"] == "The picture of this monitor appears when a cell has ended."
    assert "application/vnd.jupyter.widget-view+json" in shown["data"]
    place = shown["transient"]["display_id"]
    code = "import time\nfor step in range(30):\n    log(loss=1 / (step + 1))\n    time.sleep(0.1)"
    assert "text/html" in kernel.run(f"%%on_all_ranks\n{code}").updates[place]
    stays = kernel.run("%ddp_stop").updates[place]
    assert set(stays) == {"text/plain", "text/html"}
    assert re.match(r"In \[\d+\]: 2 ranks, loss 1.00 -> 0.0", stays["text/plain"])


def test_the_suite_of_cells_passes(there):
    there.lend("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "pandas", "tqdm")
    files = [str(ROOT / "tests" / f"test_{name}.py") for name in SUITE]
    # matplotlib 3.10 with the installed pyparsing warns during its import.
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning", "--rootdir", str(ROOT)]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "DDP_NOTEBOOK_TEST"))}
    command = [str(there.python), "-m", "pytest", *options, *files]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
