"""Stopped processes on hosts reached by ssh, and stopped ssh connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from tests.faults.stopping import RANK, SLEEP, Stopping

pytestmark = [pytest.mark.alone, pytest.mark.long]


@pytest.fixture
def notebook(ssh, python) -> Iterator[Stopping]:
    with closing(Stopping(f"%ddp_start --hosts one:1,two:1 --python {python}")) as made:
        yield made


@pytest.mark.parametrize("where", [where for where in RANK if where not in ("resize", "restart")])
def test_a_stopped_rank_is_named_with_its_host(notebook, where):
    notebook.play("rank", where)


def test_a_stopped_host_server_is_named(notebook):
    pid = notebook.pid("host server")
    for line in (SLEEP, "%ddp_status", "%ddp_heal"):
        with notebook.stopped(pid):
            message = notebook.kernel.start(line)
            notebook.expect(rf"the host server \(pid {pid}\) did not answer 'ping'", 4.0)
            notebook.end(message)
        notebook.check_comes_back()


def test_a_stopped_ssh_is_named_by_its_host(notebook):
    below = psutil.Process(notebook.kernel.pid).children(recursive=True)
    [pid] = [one.pid for one in below if one.name() == "ssh" and "two" in one.cmdline()]
    with notebook.stopped(pid):
        message = notebook.kernel.start(SLEEP)
        remedy = rf"its ssh \(process {pid}\) is stopped, and kill -CONT {pid} resumes it"
        notebook.expect(
            rf"two has sent nothing for \d s: {remedy}. Nothing is lost if it sends again within \d+ s", 5.0
        )
    notebook.kernel.interrupt()
    notebook.end(message)
    notebook.check_comes_back()
