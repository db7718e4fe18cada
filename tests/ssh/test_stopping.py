"""Stopped processes on hosts reached by ssh, and stopped ssh connections."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from tests.conftest import wait_until
from tests.faults.stopping import HOST_SERVER, NAMED_S, RANK, SLEEP, SUM, Stopping

pytestmark = [pytest.mark.alone, pytest.mark.long]


@pytest.fixture
def notebook(ssh, python) -> Iterator[Stopping]:
    with closing(Stopping(f"%ddp_start --hosts one:1,two:1 --python {python}")) as made:
        yield made


@pytest.mark.parametrize("where", [where for where in RANK if where not in ("resize", "restart")])
def test_a_stopped_rank_is_named_with_its_host(notebook, where):
    notebook.play("rank", where)


@pytest.mark.parametrize("where", [where for where in HOST_SERVER if where != "client"])  # its engines register
def test_a_stopped_host_server_is_named_with_its_host(notebook, where):
    notebook.play("host server", where, r" on two\b")


@pytest.mark.parametrize("line", [SLEEP, SUM, "%ddp_status", "%ddp_heal", "%ddp_resize 3"])
def test_a_stopped_ssh_is_named(notebook, line):
    """`%ddp_heal` does not declare the host lost, because the user can end its silence."""
    [pid] = [one.pid for one in below(notebook) if one.name() == "ssh" and "two" in one.cmdline()]
    with notebook.stopped(pid):
        message = notebook.kernel.start(line)
        remedy = rf"its ssh \(process {pid}\) is stopped, and kill -CONT {pid} resumes it"
        notebook.expect(
            rf"two has sent nothing for \d s: {remedy}. Nothing is lost if it sends again within \d+ s", NAMED_S
        )
    notebook.end(message)
    notebook.check_comes_back()


def test_ddp_stop_does_not_wait_for_a_stopped_host_server(notebook):
    server = psutil.Process(notebook.pid("host server"))
    rank = psutil.Process(notebook.pid("rank"))
    server.suspend()
    began = time.monotonic()
    assert notebook.kernel.run("%ddp_stop").status == "ok"
    wait_until(lambda: not server.is_running() and not rank.is_running(), what="they have ended")
    assert time.monotonic() - began < 8.0


def test_a_stopped_parent_of_a_host_server_is_resumed_by_it(notebook):
    parent = psutil.Process(notebook.pid("host server")).parent()
    parent.suspend()
    message = notebook.kernel.start(SLEEP)
    notebook.expect(rf"\(process {parent.pid}\).*was stopped and has been resumed; nothing is lost", NAMED_S)
    assert parent.status() != psutil.STATUS_STOPPED
    notebook.end(message)
    notebook.check_comes_back()


def below(notebook: Stopping) -> list[psutil.Process]:
    """Return all processes that descend from the notebook."""
    return psutil.Process(notebook.kernel.pid).children(recursive=True)
