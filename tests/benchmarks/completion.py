"""Tab in cells of ranks, and the table of all variables: `python -m tests.benchmarks.completion`, from the root.

Each result is the median of the requests of a front end, from the request to its reply. The kernel is idle, waits for a
training cell, or has a training job; a rank runs code in C that holds the GIL; `%ddp_whos` lists 200 tensors of 1 GB.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from statistics import median

from tests.benchmarks.results import Figure, moment, table
from tests.kernels import NotebookKernel

TABS = 20
_TAB = "%%on_all_ranks\nmodel.forw"
_SETUP = """%%on_all_ranks --quiet
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train(seconds):
    import time
    end = torch.tensor(float(seconds))
    began = time.time()
    while True:
        optimizer.zero_grad(); model(torch.ones(64, 256)).sum().backward(); optimizer.step()
        done = torch.tensor(time.time() - began); dist.all_reduce(done, dist.ReduceOp.MAX)
        if done > end: break
"""


def measure() -> list[Figure]:
    """Measure on two ranks."""
    with closing(NotebookKernel()) as kernel:
        kernel.run("%load_ext ddp_notebook\n%ddp_start 2 --hang-after off")
        first = _tab(kernel, "%%on_all_ranks\nworld_si")
        kernel.run(_SETUP)
        found = [_figure("the first Tab after a start", [first], 50)]
        found.append(_figure("Tab, idle", [_tab(kernel) for _ in range(TABS)], 50))
        for what, options in (
            ("while the kernel waits for a training cell", ""),
            ("during a training job", " --background"),
        ):
            cell = kernel.start(f"%%on_all_ranks --quiet{options}\ntrain(8)")
            began_s = time.monotonic()
            time.sleep(1)
            found.append(_figure(f"Tab {what}", [_tab(kernel) for _ in range(TABS)], 150))
            _end(kernel, cell)
            kernel.run("%ddp_wait")
            assert time.monotonic() - began_s > 7.5, "the cell trained during these requests"
        cell = kernel.start("%%on_all_ranks --quiet\nsum(range(150_000_000))")
        time.sleep(0.5)
        found.append(_figure("Tab while code in C holds the GIL", [_tab(kernel) for _ in range(5)], 300))
        _end(kernel, cell)
        return [*found, *_whos(kernel)]


def _end(kernel: NotebookKernel, cell: str) -> None:
    """Wait until a cell has ended. A request in between may have read its reply, so its status is read."""
    while True:
        message = kernel.client.get_iopub_msg(timeout=60)
        is_of_cell = message["parent_header"].get("msg_id") == cell
        if is_of_cell and message["content"].get("execution_state") == "idle":
            return


def _whos(kernel: NotebookKernel) -> list[Figure]:
    """Measure the table of 200 tensors in the kernel, without its output."""
    kernel.run("%%on_all_ranks --quiet\nfor i in range(200): globals()[f'v{i}'] = torch.ones(1_250_000)")
    kernel.run("import time, ddp_notebook\nsession, took = ddp_notebook.current(), []")
    kernel.run(
        "for _ in range(10):\n    began = time.perf_counter()\n    session.whos()\n"
        "    took.append(1e3 * (time.perf_counter() - began))"
    )
    took = [float(text) for text in kernel.run("print(*took)").stdout.split()]
    return [
        _figure("%ddp_whos of 200 tensors, 1 GB, the first time", took[:1], 300),
        _figure("%ddp_whos of 200 tensors, 1 GB", took[1:], 50),
    ]


def _figure(what: str, took_ms: Sequence[float], bar_ms: float) -> Figure:
    blocks = (min(took_ms), max(took_ms)) if len(took_ms) > 1 else ()
    return Figure(what=what, value=median(took_ms), unit="ms", bar=bar_ms, blocks=blocks)


def _tab(kernel: NotebookKernel, code: str = _TAB) -> float:
    """Return the milliseconds from a request to its reply."""
    began_s = time.perf_counter()
    asked = kernel.client.complete(code, len(code))
    while True:
        message = kernel.client.get_shell_msg(timeout=20)
        if message["parent_header"].get("msg_id") == asked:
            assert message["content"]["matches"], code
            return 1e3 * (time.perf_counter() - began_s)


if __name__ == "__main__":
    print(moment())
    print("\n".join(table(measure())))
