"""A session with the fewest ports that `--ports` takes: all tasks run on the notebook's machine."""

from __future__ import annotations

import psutil
import pytest

import ddp_notebook
from ddp_notebook.errors import DDPNotebookError
from ddp_notebook.launch.transports.ports import FEWEST, in_words
from tests.conftest import marked_processes, net_connections
from tests.starters.conftest import said, sum_of
from tests.starters.test_ipv6 import _Commands, _use
from tests.test_ports import _address, _free


def _listening(address: str, ports: range) -> set[int]:
    found = set()
    for process in [*marked_processes(), psutil.Process()]:
        listeners = [one for one in net_connections(process) if one.status == psutil.CONN_LISTEN]
        found |= {one.laddr.port for one in listeners if one.laddr.ip == address and one.laddr.port in ports}
    return found


@pytest.mark.long
def test_a_session_starts_with_the_fewest_ports_and_uses_each(monkeypatch):
    address, ports = _address(), _free(FEWEST)
    mpi = _use(monkeypatch, _Commands(address, [[], []]), in_words(ports))
    with ddp_notebook.start(2, mpi=mpi) as session:
        assert sum_of(session) == ["2", "2"]
        code = "store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)"
        assert said(session, f"import os; {code}; print(store.num_keys() >= 0)") == ["True"] * 2
        session.push({"large": bytes(3_000_000)})
        assert said(session, "print(len(large))") == ["3000000"] * 2
        assert _listening(address, ports) == {*ports}


@pytest.mark.long
def test_with_one_port_less_no_session_starts(monkeypatch):
    address, ports = _address(), _free(FEWEST)
    monkeypatch.setattr("ddp_notebook.launch.transports.ports.FEWEST", 1)
    mpi = _use(monkeypatch, _Commands(address, [[], []]), in_words(ports[:-1]))
    with pytest.raises(DDPNotebookError, match=rf"ports {in_words(ports[:-1])} .*taken.*--ports"):
        ddp_notebook.start(2, mpi=mpi)
