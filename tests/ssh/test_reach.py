"""Hosts that the notebook can reach, but that cannot reach each other: namespaces on an isolating bridge."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

import psutil
import pytest

import ddp_notebook
from ddp_notebook.errors import StartError
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.preflight import fit
from ddp_notebook.launch.preflight.pairs import try_pairs
from ddp_notebook.launch.transports.ssh import SshTransport
from tests import rights
from tests.conftest import is_within, net_connections
from tests.ssh import namespaces, sshd

pytestmark = pytest.mark.alone  # changes links and addresses of the machine


_OTHER = "10.78.1"


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """Yield two hosts with another network between them, which is down."""
    directory = tmp_path_factory.mktemp("network")
    with namespaces.hosts(directory, "a", "b") as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_NOTEBOOK_SSH", made.command)
        made.join("ib0", _OTHER)
        yield made, sshd.python(directory)


@pytest.fixture(scope="module")
def hosts(network):
    _, python = network
    both = [Host(SshTransport(name, python=python)) for name in ("a", "b")]
    try:
        for host in both:
            host.facts()
        yield both
    finally:
        for host in both:
            host.close()


def _refused(work: Callable[[], object]) -> tuple[str, float]:
    """Return the error of a function, and the seconds until it was raised."""
    began = time.monotonic()
    with pytest.raises(StartError) as raised:
        work()
    return str(raised.value), time.monotonic() - began


@pytest.mark.long
def test_hosts_that_reach_each_other_lose_no_time(hosts):
    began = time.monotonic()
    fit.require(hosts)
    assert is_within(time.monotonic() - began, 0.3)
    for host in hosts:
        listening = [one for one in net_connections(psutil.Process(host.facts()["pid"])) if one.status == "LISTEN"]
        assert not listening, "nothing of it is left"


def test_a_network_that_does_not_lead_from_host_to_host_is_named(network, hosts):
    made, _ = network
    address = {host.name: host.address for host in hosts}
    with made.apart():
        said, took_s = _refused(lambda: fit.require(hosts))
    assert is_within(took_s, 3)
    assert f"a cannot connect to b at {address['b']} (eth0): no answer in 2 s" in said
    assert f"b cannot connect to a at {address['a']} (eth0): no answer in 2 s" in said
    assert "a firewall may be between them: open all ports" in said
    assert f"{address['b']} (eth0)*" in said.splitlines()[-1] and "the same" in said.splitlines()[-1]
    fit.require(hosts)


def test_another_network_that_does_is_named_too(network, hosts):
    made, _ = network
    for name in ("a", "b"):
        made.inside(name, "ip", "link", "set", "ib0", "up")
    try:
        with made.apart():
            said, took_s = _refused(lambda: fit.require(hosts))
    finally:
        made.inside("b", "ip", "link", "set", "ib0", "down")
    assert is_within(took_s, 3)
    assert (
        f"; b is reached at {_OTHER}.2 (ib0), a is reached at {_OTHER}.1 (ib0): set the addresses of that network"
        in said
    )


def test_a_way_that_leads_in_one_direction_only(network, hosts):
    made, _ = network
    if not rights.may(*rights.FIREWALL):
        pytest.skip("no iptables to drop what comes from one side")
    rule = ("INPUT", "-p", "tcp", "--syn", "--dport", "1024:65535", "-j", "REJECT")
    made.inside("b", "iptables", "-A", *rule)
    try:
        failed = try_pairs(hosts)
    finally:
        made.inside("b", "iptables", "-D", *rule)
    assert [(one.source, one.target, one.why) for one in failed] == [("a", "b", "Connection refused")]


@pytest.mark.long
def test_a_start_says_so_instead_of_a_hang(network):
    made, python = network
    with made.apart():
        said, _ = _refused(lambda: ddp_notebook.start(hosts=ddp_notebook.Ssh("a:1,b:1", python=python)))
    assert "a cannot connect to b at" in said and ddp_notebook.current() is None


_PORTS = range(40000, 40008)


def _store_port(session) -> int:
    return int(session.run("import os; print(os.environ['MASTER_PORT'])", ranks=0)[0].stdout)


@pytest.mark.long
def test_a_firewall_that_lets_some_ports_through(network, hosts):
    """The store uses only these ports, and gloo does so if the hosts use the same ephemeral range."""
    made, python = network
    if not rights.may(*rights.FIREWALL):
        pytest.skip("no iptables for a firewall")
    rule = ("INPUT", "-i", "eth0", "-p", "tcp", "--syn", "!", "--dport", "40000:40007", "-j", "REJECT")
    ours = ("INPUT", "-s", f"{made.address}/32", "-j", "ACCEPT")  # ssh of the notebook
    setting = "net.ipv4.ip_local_port_range"
    for name in "ab":
        made.inside(name, "iptables", "-A", *ours)
        made.inside(name, "iptables", "-A", *rule)
    try:
        said, took_s = _refused(lambda: fit.require(hosts, ports=_PORTS))
        assert "Connection refused; the ports of --ports (40000-40007) are open, but gloo and NCCL use ports" in said
        assert f"{setting}='40000 40007'" in said and is_within(took_s, 3)
        for name in "ab":
            made.inside(name, "sysctl", "-qw", f"{setting}=40000 40007")
        with ddp_notebook.start(hosts=ddp_notebook.Ssh("a:1,b:1", python=python, ports="40000-40007")) as session:
            assert _store_port(session) in _PORTS
            assert session.run("x = torch.ones(1); dist.all_reduce(x); print(int(x))")[1].stdout == "2\n"
    finally:
        for name in "ab":
            made.inside(name, "sysctl", "-qw", f"{setting}=32768 60999")
            made.inside(name, "iptables", "-D", *rule)
            made.inside(name, "iptables", "-D", *ours)


def test_ports_of_a_host_that_are_taken_are_told(network, hosts):
    made, _ = network
    code = "import socket, time; kept = [socket.create_server(('', 41000 + n)) for n in range(8)]; print(flush=True); "
    command = ["ip", "netns", "exec", made.links["b"], "python3", "-c", code + "time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout is not None and busy.stdout.readline()
            said, _ = _refused(lambda: fit.require(hosts, ports=range(41000, 41008)))
        finally:
            busy.kill()
    assert (
        "ports 41000-41007): b cannot listen there, or all of these are taken; pass other ports, or more ports" in said
    )
