"""Two Slurm nodes with two ranks each: `python -m tests.benchmarks.jobs`, as root.

The nodes are network namespaces of this machine, so both share its cores. Two tasks import torch at the same time, and
so do the two processes that a start is compared with. Measured from the call to the end of the first all_reduce, in an
idle queue:

slurm     a job that is requested with sbatch arguments
template  a job by the batch template of an ipyparallel profile, as used at many sites
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import pytest

import ddp_notebook
from tests.benchmarks.hosts import two_imports_s
from tests.benchmarks.results import Figure, moment, table
from tests.slurm import cluster
from tests.ssh import namespaces

BAR_S = 3.0  # in addition to two imports
_WORLD_SIZE = 4
_PROFILE = "site"
_CONFIG = """
c = get_config()
c.Cluster.engine_launcher_class = "slurm"
c.SlurmEngineSetLauncher.batch_template = '''#!/bin/sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=10
#SBATCH --output=/dev/null
srun {program_and_args}
'''
"""


def measure(rounds: int = 3) -> list[Figure]:
    """Start ranks in jobs. Return nothing if Slurm is not available."""
    with ExitStack() as ends, pytest.MonkeyPatch.context() as patch:
        directory = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        try:
            cluster.need()
            network = ends.enter_context(namespaces.hosts(directory, *cluster.NODES))
        except pytest.skip.Exception as why:
            print(why)
            return []
        for node in cluster.NODES:  # a template's process connects to the address of the notebook's default route
            network.inside(node, "ip", "route", "add", "default", "via", network.address)
        patch.setenv("SLURM_CONF", str(ends.enter_context(cluster.Cluster(directory, network)).config))
        patch.setenv("XDG_CACHE_HOME", str(directory / "shared"))
        patch.setenv("IPYTHONDIR", str(directory / "ipython"))
        profile = directory / "ipython" / f"profile_{_PROFILE}"
        profile.mkdir(parents=True)
        (profile / "ipcluster_config.py").write_text(_CONFIG)
        times: dict[str, list[float]] = {"import": [], "slurm": [], "template": []}
        for _ in range(rounds):
            times["import"].append(two_imports_s())
            times["slurm"].append(_start_s(slurm="-N2 --exclusive -t 10"))
            times["template"].append(_start_s(profile=_PROFILE))
    imported_s = median(times["import"])
    return [
        Figure(
            what=f"start of 4 ranks on two Slurm nodes ({words}), until the first all_reduce is done, "
            f"minus two imports of torch at the same time ({imported_s:.2f} s)",
            value=median(times[how]) - imported_s,
            unit="s",
            bar=BAR_S,
            blocks=tuple(took_s - imported_s for took_s in times[how]),
        )
        for how, words in (("slurm", "sbatch arguments"), ("template", "batch template of a site"))
    ]


def _start_s(**where: str) -> float:
    began = time.perf_counter()
    with ddp_notebook.start(_WORLD_SIZE, **where) as session:  # type: ignore[arg-type]
        session.run("x = torch.ones(1); dist.all_reduce(x)", quiet=True)
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.jobs")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    os.environ.pop("SLURM_JOB_ID", None)
    print(moment(), "", *table(measure(given.rounds)), sep="\n")


if __name__ == "__main__":
    main()
