"""One session whose kernels are killed one after the other, at random moments of a training cell."""

from __future__ import annotations

import random
import signal
import time

import psutil
import pytest

from tests.keep.conftest import kill, notebook, runtime  # noqa: F401  # fixtures
from tests.kernels import NotebookKernel

pytestmark = pytest.mark.long
ROUNDS = 50
STEPS = 60
CELL = f"""%%on_all_ranks --fold off
for step in range({STEPS}):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    done += 1
    ddp_notebook.log(done=done)
    print(f"round ROUND step {{step}} rank {{rank}}")
    time.sleep(0.01)
"""
MODEL = """%%on_all_ranks
import time, ddp_notebook
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
done = 0
"""
KEPT = """
import ddp_notebook
recording = ddp_notebook.current().recording
[len(recording.metrics["done"].values), recording.dropped]
"""


def signal_descendants(kernel: NotebookKernel) -> None:
    """Send signals like VS Code when it stops and closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        for process in psutil.Process(kernel.pid).children(recursive=True):
            process.send_signal(number)


def test_killed_kernels_lose_no_line_row_or_variable(notebook):  # noqa: F811
    chance, slowest_s = random.Random(19), 0.0
    kernel = notebook("%ddp_start 2 --keep 1")
    assert kernel.run(MODEL).status == "ok"
    for number in range(ROUNDS):
        kernel.start(CELL.replace("ROUND", str(number)))
        kernel.wait_for_text(f"round {number} step 0 rank 1")
        time.sleep(chance.uniform(0.0, 0.55))  # random moment
        if number % 2:
            signal_descendants(kernel)
        kill(kernel)

        kernel = notebook()
        began = time.monotonic()
        first = kernel.run("%ddp_attach")
        slowest_s = max(slowest_s, time.monotonic() - began)
        rest = kernel.run("%ddp_attach --wait")
        assert first.status == rest.status == "ok", f"round {number}: {first.traceback}{rest.traceback}"
        lines = [line for line in (first.stdout + rest.stdout).splitlines() if " step " in line]
        for rank in (0, 1):
            shown = [line for line in lines if line.endswith(f"rank {rank}")]
            expected = [f"[{rank}] round {number} step {step} rank {rank}" for step in range(STEPS)]
            assert shown == expected, f"round {number}"
        total = (number + 1) * STEPS
        assert kernel.run("%on_all_ranks done").stdout == f"[0-1] {total}\n", f"round {number}"
        kept = kernel.run(KEPT).displays[0]["text/plain"]
        assert kept == f"[{2 * total}, {{0: 0, 1: 0}}]" or kept == f"[{2 * total}, {{}}]", f"round {number}"
    print(f"{ROUNDS} of {ROUNDS}; attached after {slowest_s:.2f} s at most")
    assert slowest_s < 1.0
