"""Shares of the cores of two hosts when ranks join, leave, and move to the other host."""

from __future__ import annotations

import os

import pytest

import ddp_notebook
from ddp_notebook.launch import devices
from ddp_notebook.launch.environment import threads_per_rank
from tests.conftest import wait_until
from tests.ssh import namespaces, sshd

pytestmark = [pytest.mark.alone, pytest.mark.long]


def _threads(session) -> list[tuple[str, str]]:
    """Return the host and the number of threads of each rank."""
    result = session.run("torch.get_num_threads()", quiet=True, timeout_s=30)
    return [(row.host, str(result[row.rank].result)) for row in session.status().rows]


@pytest.mark.skipif(devices.cores() < 2, reason="one core has one share")
def test_each_host_shares_its_own_cores_anew(tmp_path, monkeypatch):
    def share(ranks: int) -> str:
        return str(threads_per_rank(os.environ, devices.cores(), ranks))

    with namespaces.hosts(tmp_path, "a", "b") as made:
        monkeypatch.setenv("DDP_NOTEBOOK_SSH", made.command)
        with ddp_notebook.start(
            hosts=ddp_notebook.Ssh("a:1,b:1", python=sshd.python(tmp_path), lease_s=5), grace_s=0.3
        ) as session:
            assert _threads(session) == [("a", share(1)), ("b", share(1))]
            session.ranks.resize(4)
            assert sorted(_threads(session)) == [("a", share(2))] * 2 + [("b", share(2))] * 2
            session.run("torch.set_num_threads(7)", ranks=[0], quiet=True)
            session.ranks.resize(2)
            assert _threads(session) == [("a", "7"), ("b", share(1))], "what a cell has set stays"
            made.kill("b")
            wait_until(lambda: session.status().rows[1].state == "died", 10.0, "the session knows that b is lost")
            session.ranks.heal()
            assert _threads(session) == [("a", "7"), ("a", share(2))]
