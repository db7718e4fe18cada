"""Read the output of a running cell, and wait for text of all ranks."""

from __future__ import annotations

import time

from tests.kernels import NotebookKernel, Reply
from tests.test_cell_table import by_rank

WORLD_SIZE = 4
SUM = "%%on_all_ranks\nx = torch.ones(1); dist.all_reduce(x); print(f'sum is {x.item():g}')"
_PIDS = "import ddp_notebook; print('pids', *ddp_notebook.current().ranks.pids())"


def start_ranks(kernel: NotebookKernel, world_size: int = WORLD_SIZE) -> None:
    """Load the extension and start ranks."""
    assert kernel.run("%load_ext ddp_notebook").status == "ok"
    reply = kernel.run(f"%ddp_start {world_size} --fold off", timeout_s=120)  # tests search for the line of each rank
    assert reply.status == "ok", reply.traceback


def pids_of_ranks(kernel: NotebookKernel) -> list[int]:
    """Return the process ids of the ranks, by rank."""
    (line,) = (line for line in kernel.run(_PIDS).stdout.splitlines() if line.startswith("pids "))
    return [int(pid) for pid in line.split()[1:]]


def send(kernel: NotebookKernel, code: str) -> str:
    """Send a cell whose failure does not abort the cells after it. Return its message id."""
    return kernel.client.execute(code, stop_on_error=False)


def wait_for_ranks(kernel: NotebookKernel, text: str, world_size: int = WORLD_SIZE, timeout_s: float = 30.0) -> None:
    """Wait until every rank has shown `text` with its number in it, such as "go {rank}."."""
    missing, reply, until = (
        {text.format(rank=rank) for rank in range(world_size)},
        Reply(),
        time.monotonic() + timeout_s,
    )
    while missing := {one for one in missing if one not in reply.stdout}:
        reply.read(kernel.client.get_iopub_msg(timeout=max(0.1, until - time.monotonic())))


def expect_sums(reply: Reply, world_size: int = WORLD_SIZE) -> None:
    """Check that the cell `SUM` ran once on every rank."""
    assert reply.status == "ok", reply
    lines = by_rank(reply.stdout)
    assert [lines.get(rank, []).count(f"sum is {world_size}") for rank in range(world_size)] == [1] * world_size, reply
