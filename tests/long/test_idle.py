"""A kept session that nobody looks at takes next to nothing of its machine."""

from __future__ import annotations

import time

import psutil
import pytest

from ddp_notebook.registry import entries
from tests.keep.conftest import kill, notebook, runtime  # noqa: F401  # fixtures

pytestmark = pytest.mark.long
_RANKS, _FOR_S, _MOST_PERCENT = 4, 60.0, 0.3  # of a core, for each rank


def test_a_kept_session_that_nobody_looks_at_is_idle(notebook):  # noqa: F811
    kernel = notebook(f"%ddp_start {_RANKS} --keep 1")
    kernel.run("%%on_all_ranks\nx = torch.ones(1); dist.all_reduce(x)")
    kill(kernel)
    [entry] = entries.entries()
    keeper = psutil.Process(entry.pid)
    processes = [keeper, *keeper.children(recursive=True)]
    time.sleep(5)  # until the end of what the kernel's death has set going
    began_s, used_s = time.monotonic(), _cpu_s(processes)
    time.sleep(_FOR_S)
    used_s, took_s = _cpu_s(processes) - used_s, time.monotonic() - began_s
    percent = 100 * used_s / took_s / _RANKS
    print(f"{len(processes)} processes: {percent:.2f} % of a core for each of {_RANKS} ranks")
    assert percent <= _MOST_PERCENT


def _cpu_s(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)
