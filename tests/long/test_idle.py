"""A kept session without a notebook uses almost no resources of its machine."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from ddp_notebook.registry import entries
from tests.keep.conftest import kill, notebook, runtime  # noqa: F401  # fixtures

pytestmark = pytest.mark.long
_RANKS, _FOR_S, _MOST_PERCENT = 4, 60.0, 0.3  # percent of a core for each rank
_UNTIL_ALONE_S = 20.0  # until ranks know that no notebook is attached


def test_a_kept_session_that_nobody_looks_at_is_idle(notebook):  # noqa: F811
    kernel = notebook(f"%ddp_start {_RANKS} --keep 1")
    kernel.run("%%on_all_ranks\nx = torch.ones(1); dist.all_reduce(x)")
    ranks = kernel.run("%%on_all_ranks\nimport os; print(os.getpid())").stdout
    kill(kernel)
    [entry] = entries.entries()
    keeper = psutil.Process(entry.pid)
    processes = [keeper, *keeper.children(recursive=True)]
    kinds = {one.pid: "a rank" if str(one.pid) in ranks else "all others" for one in processes} | {keeper.pid: "keeper"}
    time.sleep(_UNTIL_ALONE_S)
    began_s, before = time.monotonic(), _used(kinds)
    time.sleep(_FOR_S)
    took_s = time.monotonic() - began_s
    used = {who: [now - then for now, then in zip(_used(kinds)[who], before[who], strict=True)] for who in before}
    percent: defaultdict[str, float] = defaultdict(float)
    print("of a core, turns a second, by process and thread:")
    for (kind, thread), (cpu_s, turns) in sorted(used.items()):
        by = _RANKS if kind == "a rank" else 1
        percent[kind] += 100 * cpu_s / took_s
        print(f"  {kind:10}  {thread:14}  {100 * cpu_s / took_s / by:.3f} %  {turns / took_s / by:6.2f}")
    each = sum(percent.values()) / _RANKS
    print(f"{each:.2f} % of a core for each of {_RANKS} ranks: {dict(percent)}")
    assert each <= _MOST_PERCENT


def _used(kinds: dict[int, str]) -> dict[tuple[str, str], list[float]]:
    """Return seconds of CPU time and number of time slices, by kind of process and name of thread."""
    used: dict[tuple[str, str], list[float]] = {}
    for pid, kind in kinds.items():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            # Source: https://docs.kernel.org/scheduler/sched-stats.html (/proc/<pid>/schedstat)
            ran_ns, _, turns = map(float, (thread / "schedstat").read_text().split())
            sums = used.setdefault((kind, (thread / "comm").read_text().strip()), [0.0, 0.0])
            sums[0] += ran_ns / 1e9
            sums[1] += turns
    return used
