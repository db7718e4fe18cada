"""Sessions that start and end many times, in parallel, and in large numbers."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.benchmarks.frontend import WAIT_UNTIL_WARM
from tests.conftest import marked_processes, wait_until
from tests.kernels import NotebookKernel
from tests.long.watching import SUM, WORLD_SIZE, expect_sums, pids_of_ranks, start_ranks

pytestmark = pytest.mark.long

MANY = 64
_CONTROLLER_PATIENCE_S = 40.0  # by default, engines of ipyparallel give up after 30 s without a controller
_CLIENT_IDS = "import ddp_notebook; print(ddp_notebook.current().client.ids)"
_PROCESSES = """
import ddp_notebook
print(*(pid for kind in ("controller", "host server") for pid in ddp_notebook.current().ranks.pids(kind)))
"""


def test_two_notebooks_start_at_the_same_moment(tally):
    for _ in tally(10, "two notebooks start at the same moment"):
        with closing(NotebookKernel()) as one, closing(NotebookKernel()) as other:
            for code in ("%load_ext ddp_notebook", "%ddp_start 2"):
                messages = [(kernel, kernel.start(code)) for kernel in (one, other)]
                for kernel, message in messages:
                    reply = kernel.finish(message)
                    assert reply.status == "ok", reply
            messages = [(kernel, kernel.start(SUM)) for kernel in (one, other)]
            for kernel, message in messages:
                expect_sums(kernel.finish(message), world_size=2)


def _held(**pids: int) -> dict[str, int]:
    """Return the resources of processes that can leak."""
    held = {}
    for name, pid in pids.items():
        process = psutil.Process(pid)
        held[f"{name}: fds"] = process.num_fds()
        held[f"{name}: threads"] = process.num_threads()
        held[f"{name}: descendants"] = len(process.children(recursive=True))
    return held


@pytest.mark.parametrize("with_client", [False, True], ids=["cells", "cells and session.client"])
def test_start_and_stop_without_a_leak(make_kernel, tally, with_client):
    """From the third time on the kernel and its host server hold no more resources than after the second."""
    kernel = make_kernel()
    bound: dict[str, int] = {}
    beside = " with `session.client`" if with_client else ""
    for n in tally(20, f"start and stop in one kernel{beside} leaves no process, thread, file descriptor or directory"):
        start_ranks(kernel)
        server = int(kernel.run(_PROCESSES).stdout.split()[-1])  # a controller exists after the first use of a client
        expect_sums(kernel.run(SUM))
        if with_client:
            asked = kernel.run("print(ddp_notebook.current().client[:].apply_sync(lambda: 7 * 6))")
            assert asked.stdout == f"{[42] * WORLD_SIZE}\n", asked
        assert kernel.run("%ddp_stop").stdout == f"stopped {WORLD_SIZE} ranks\n"
        assert not list(Path(os.environ["TMPDIR"]).glob("ddp_notebook-*/session-*"))
        if n < 2:
            bound = _held(kernel=kernel.pid, server=server)
        else:
            _wait_until_within(bound, kernel=kernel.pid, server=server)


def _wait_until_within(bound: dict[str, int], **pids: int) -> None:
    def excess() -> dict[str, int]:
        return {what: number - bound[what] for what, number in _held(**pids).items() if number > bound[what]}

    wait_until(lambda: not excess(), timeout_s=2.0, what=f"more than after the second stop: {excess()}")


def test_64_ranks(make_kernel, tally):
    kernel = make_kernel()
    kernel.run("%load_ext ddp_notebook")
    assert kernel.run(WAIT_UNTIL_WARM).status == "ok"  # the host server and its watchdog stay
    before = marked_processes()
    for _ in tally(1, f"`%ddp_start {MANY}` works, and `%ddp_stop` leaves no process"):
        reply = kernel.run(f"%ddp_start {MANY}", timeout_s=60)
        assert reply.status == "ok", reply
        assert reply.stdout.count("idle") == MANY, reply.stdout
        assert len(marked_processes() - before) > MANY
        expect_sums(kernel.run(SUM), world_size=MANY)
        assert kernel.run("%ddp_stop").stdout == f"stopped {MANY} ranks\n"
        wait_until(lambda: not (marked_processes() - before), what="processes are left")


def test_cells_long_after_the_controller_was_killed(make_kernel, tally):
    kernel = make_kernel()
    start_ranks(kernel)
    assert kernel.run(_CLIENT_IDS).stdout == "[0, 1, 2, 3]\n"  # the controller knows all engines
    pids = pids_of_ranks(kernel)
    for _ in tally(1, f"a cell runs on all ranks {_CONTROLLER_PATIENCE_S:g} s after the controller was killed"):
        controller = psutil.Process(int(kernel.run(_PROCESSES).stdout.split()[0]))
        killed = [*controller.children(recursive=True), controller]
        assert len(killed) > 1
        for process in killed:
            process.kill()
        psutil.wait_procs(killed, timeout=5)
        time.sleep(_CONTROLLER_PATIENCE_S)  # this wait is tested
        assert pids_of_ranks(kernel) == pids
        expect_sums(kernel.run(SUM))
        assert kernel.run(_CLIENT_IDS).stdout == "[0, 1, 2, 3]\n"


def test_sigkill_of_the_kernel(tally):
    before = marked_processes()
    for _ in tally(5, "all processes end within 5 s after a SIGKILL of the kernel"):
        with closing(NotebookKernel()) as kernel:
            start_ranks(kernel)
            expect_sums(kernel.run(SUM))
            started = marked_processes() - before
            assert len(started) > WORLD_SIZE + 1  # ranks, their host server and its watchdog
            os.kill(kernel.pid, signal.SIGKILL)
            wait_until(lambda: not (marked_processes() - before), what="processes outlive the kernel")
