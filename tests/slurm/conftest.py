"""A Slurm cluster of the tests, which the commands of this process use."""

from __future__ import annotations

import os

import pytest

from tests.conftest import wait_until
from tests.slurm import cluster


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Start a cluster with two nodes of four cores each."""
    directory = tmp_path_factory.mktemp("slurm")
    with cluster.running(directory) as made, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            patch.delenv(name)  # the tests may run in a job of another cluster
        patch.setenv("SLURM_CONF", str(made.config))
        patch.setenv("XDG_CACHE_HOME", str(directory / "shared"))
        yield made


@pytest.fixture(autouse=True)
def queue_is_empty(slurm):
    """Check after every test that no new job, invitation or output of a job is left."""
    before, shared = set(slurm.jobs()), slurm.shared_folder
    files = {file.name for file in shared.glob("*")}
    yield
    wait_until(lambda: set(slurm.jobs()) <= before, what="an empty queue")
    assert {file.name for file in shared.glob("*")} <= files
