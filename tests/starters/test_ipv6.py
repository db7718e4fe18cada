"""Tasks and notebook without IPv4 between them."""

from __future__ import annotations

import os
import subprocess

import pytest

import ddp_notebook
from ddp_notebook.errors import CellTimeoutError, ClientError
from ddp_notebook.launch.options import Mpi
from ddp_notebook.launch.starters import choice
from ddp_notebook.launch.starters.starter import Starter, address_for, address_towards
from tests.ssh import namespaces
from tests.starters.conftest import said, sum_of


class _Commands(Starter):
    """Starts a task with each of some commands, and makes them connect to an address."""

    words, tasks, address = "commands", 2, ""

    def __init__(self, address: str, before: list[list[str]]) -> None:
        self.address, self._before = address, before
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, command, env) -> None:
        for words in self._before:
            self._processes.append(subprocess.Popen([*words, *command], env={**os.environ, **env}))

    def trouble(self, *, now: bool = False) -> str:
        return ""

    def end(self) -> None:
        for one in self._processes:
            one.wait(30)


def _use(patch: pytest.MonkeyPatch, starter: Starter, ports: str | None = None) -> Mpi:
    """Return options for `start` that use this starter, since no launcher can be given an address."""
    patch.setattr(choice, "choose", lambda _: starter)
    return Mpi("-np 2", ports=ports)


@pytest.mark.long
def test_all_of_a_session_but_its_client_works_by_ipv6(monkeypatch):
    assert address_towards("::1") == "::1"
    with ddp_notebook.start(2, mpi=_use(monkeypatch, _Commands("::1", [[], []]))) as session:
        assert said(session, "import os; print(os.environ['MASTER_ADDR'])") == ["::1", "::1"]
        assert sum_of(session) == ["2", "2"]
        with pytest.raises(CellTimeoutError):
            session.run("dist.recv(torch.ones(1), 1 - rank)", timeout_s=0.3)
        assert sum_of(session) == ["2", "2"], "formed anew"
        session.push({"large": bytes(3_000_000)})
        assert said(session, "print(len(large))") == ["3000000"] * 2
        with pytest.raises(
            ClientError, match=r"ipyparallel's controller needs IPv4, but ranks reach this machine at ::1.*go on"
        ):
            _ = session.client
        assert sum_of(session) == ["2", "2"]


@pytest.mark.alone
@pytest.mark.long
def test_hosts_that_have_ipv6_alone(tmp_path, monkeypatch):
    with namespaces.hosts(tmp_path, "a", "b") as made:
        made.become_ipv6("fd79:0:0:7")
        address = address_for(made.addresses.values())
        assert address == made.address == "fd79:0:0:7::1"
        before = [["ip", "netns", "exec", link] for link in made.links.values()]
        mpi = _use(monkeypatch, _Commands(address, before), "40000-40100")
        with ddp_notebook.start(2, mpi=mpi) as session:
            place = "import os; print(os.environ['MASTER_ADDR'], os.environ['GLOO_SOCKET_IFNAME'])"
            [told] = set(said(session, place))
            assert told in {f"{host} eth0" for host in made.addresses.values()}, "the first one's that called"
            assert sum_of(session) == ["2", "2"]
