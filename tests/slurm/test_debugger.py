"""The time limit of a Slurm job does not pause while a debugger waits for a command."""

from __future__ import annotations

import re
import time
from contextlib import closing

import pytest

from tests.conftest import wait_until
from tests.debug.driver import Debugged
from tests.kernels import NotebookKernel

pytestmark = [pytest.mark.alone, pytest.mark.long]  # changes links and addresses of the machine
CODE = "%%on_all_ranks\nkept = rank\nif rank == 0:\n    breakpoint()\ndist.barrier()"
ENDS_S = 150.0  # Slurm checks limits twice a minute
TOLD_S = 10.0


@pytest.mark.timeout(300)
def test_the_limit_of_a_job_ends_the_cell_at_the_prompt(slurm):
    with closing(NotebookKernel(env={"DDP_NOTEBOOK_PRELOAD": "0"})) as kernel:
        kernel.run("%load_ext ddp_notebook")
        user = Debugged(kernel)
        reply = user.run('%ddp_start 2 --slurm "-N2 --exclusive --time 1"', timeout_s=120)
        assert reply.status == "ok", reply.traceback
        [job] = slurm.jobs()
        message = user.start(CODE)
        assert user.prompt() == "(rank 0) "
        wait_until(lambda: slurm.ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%T") == "TIMEOUT", ENDS_S)
        began = time.monotonic()
        reply = kernel.finish(message, 60)
        took_s = time.monotonic() - began
        print(reply, f"{took_s:.1f} s")
        assert False


@pytest.mark.timeout(300)
def test_the_end_of_a_job_is_announced_at_the_prompt(slurm):
    with closing(NotebookKernel(env={"DDP_NOTEBOOK_PRELOAD": "0"})) as kernel:
        kernel.run("%load_ext ddp_notebook")
        user = Debugged(kernel)
        assert user.run('%ddp_start 2 --slurm "-N2 --exclusive --time 3"', timeout_s=120).status == "ok"
        [job] = slurm.jobs()
        message = user.start(CODE)
        assert user.prompt() == "(rank 0) "
        kernel.wait_for_text(f"Slurm job {job} ends in 2 min, and all ranks with it: save your data now", 90)
        user.type("c")
        assert kernel.finish(message).status == "ok"
        kernel.run("%ddp_stop")
