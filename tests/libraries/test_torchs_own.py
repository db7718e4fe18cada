"""torch's tests of its distributed package have the same results in cells, with all defaults, as on bare ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.libraries import torchs_own
from tests.libraries.bare_ranks import LIMIT_S

pytest.importorskip("expecttest", reason="expecttest is missing; `make test-long` installs it")
pytestmark = pytest.mark.long

_WORLD_SIZE = 3
_LEAST = 90  # number of torch tests that run on CPUs in every version


@pytest.fixture(scope="module")
def bare() -> dict[str, list[str]]:
    """Return the results of each test on the bare ranks."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.libraries.torchs_own"],
        env={**os.environ, **torchs_own.environment(_WORLD_SIZE), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return dict(json.loads(ended.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def in_cells(bare, tmp_path_factory) -> dict[str, list[str]]:
    """Return the results in cells of one session, for the tests that pass on bare ranks."""
    from ddp_notebook import api

    ended = {}
    with api.start(_WORLD_SIZE) as session:
        session.run(
            f"import os, sys\nos.environ.update({torchs_own.environment(_WORLD_SIZE)!r})\n"
            f"sys.path.append({os.getcwd()!r})\nfrom tests.libraries import torchs_own",
            quiet=True,
        )
        for name in bare:
            if _passes(bare[name]):
                ended[name] = _in_a_cell(session, name, tmp_path_factory.mktemp("files"))
    return ended


def _in_a_cell(session, name: str, directory: Path) -> list[str]:
    from ddp_notebook.errors import DDPNotebookError

    try:
        session.run(f"ended = torchs_own.run({name!r}, rank, {str(directory)!r})", quiet=True, timeout_s=LIMIT_S)
    except DDPNotebookError as error:
        return [f"the cell: {error}"] * _WORLD_SIZE
    return list(session["ended"].values())


def _passes(ended: list[str]) -> bool:
    return ended == [torchs_own.PASSED] * _WORLD_SIZE


def test_enough_of_them_pass_on_bare_ranks(bare):
    assert sum(map(_passes, bare.values())) >= _LEAST, bare


def test_those_that_pass_on_bare_ranks_pass_in_cells(in_cells):
    print(f"{len(in_cells)} of torch's tests pass on bare ranks, {sum(map(_passes, in_cells.values()))} in cells")
    assert {name: ended for name, ended in in_cells.items() if not _passes(ended)} == {}
