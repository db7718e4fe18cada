"""The time limit of a Slurm job does not pause while a debugger waits for a command."""

from __future__ import annotations

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
        is_over = ["squeue", "-h", "-t", "all", "-j", job, "-o", "%T"]
        wait_until(lambda: slurm.ask(*is_over) == "TIMEOUT", ENDS_S, "the end of the job")
        reply = kernel.finish(message, TOLD_S)
        why = f"Slurm job {job} has reached its time limit of 1:00; ask for more with -t"
        assert "rank 0 has died: " in reply.stderr and "rank 1 has died: " in reply.stderr and why in reply.stderr
        lost = "its ranks, their variables and the session are lost; %ddp_restart starts new ranks"
        assert reply.ename == "SessionBrokenError" and f"{why}; {lost}" in reply.evalue, reply
        assert kernel.run("1 + 1").status == "ok", "the prompt is closed"


@pytest.mark.timeout(300)
def test_the_end_of_a_job_is_announced_at_the_prompt(slurm):
    with closing(NotebookKernel(env={"DDP_NOTEBOOK_PRELOAD": "0"})) as kernel:
        kernel.run("%load_ext ddp_notebook")
        user = Debugged(kernel)
        assert user.run('%ddp_start 2 --slurm "-N2 --exclusive --time 3"', timeout_s=120).status == "ok"
        message = user.start(CODE)
        assert user.prompt() == "(rank 0) "
        kernel.wait_for_text(" s, and all ranks with it: save your data now", 90)  # the line before it has minutes
        user.type("c")
        assert kernel.finish(message).status == "ok"
        kernel.run("%ddp_stop")
