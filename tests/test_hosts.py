"""A group on more than one host: two host servers of this machine, which the cluster treats as two hosts."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import defaultdict

import psutil
import pytest

from ddp_notebook.errors import HostError, StartError
from ddp_notebook.launch import warm
from ddp_notebook.launch.direct import DirectCluster
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.membership.lost_hosts import LostRanks
from ddp_notebook.launch.placement import Placement
from ddp_notebook.launch.process import Processes
from ddp_notebook.launch.transports.local import LocalTransport
from ddp_notebook.messages.ranks import RunCell
from tests.conftest import wait_until


class Heard:
    """Messages of ranks."""

    def __init__(self) -> None:
        self.text: dict[int, bytes] = defaultdict(bytes)
        self.ended: dict[int, str] = {}
        self.gone = 0

    def on_message(self, rank, message) -> None: ...
    def on_controller_ended(self) -> None: ...

    def on_text(self, rank, fd, data) -> None:
        self.text[rank] += data

    def on_ended(self, rank, how) -> None:
        self.ended[rank] = how

    def on_gone(self) -> None:
        self.gone += 1


@pytest.fixture
def heard():
    return Heard()


@pytest.fixture
def hosts():
    made = [Host(LocalTransport(os.environ, name)) for name in ("a", "b")]
    yield made
    for host in made:
        host.close()


@pytest.fixture
def cluster(hosts, heard):
    for host in hosts:
        host.facts()
    placement = Placement(
        backend="gloo",
        hosts=("a", "b", "b"),
        machines=("a", "b", "b"),
        devices=("cpu",) * 3,
        names=("CPU",) * 3,
        cuda_visible_devices=None,
        threads=1,
    )
    made = DirectCluster(hosts, placement, os.environ, heard, here=lambda: hosts[0])
    made.start(time.monotonic() + 60)
    yield made
    made.stop()


CELL = """
import os
x = torch.ones(1); dist.all_reduce(x)
print(f"{rank} sum {x.item():g}, local {os.environ['LOCAL_RANK']} of {os.environ['LOCAL_WORLD_SIZE']}", flush=True)
if rank != 1: sum(range(10**12))
"""


@pytest.mark.slow
def test_a_group_on_two_hosts(cluster, hosts, heard):
    assert [cluster.process(rank).name.partition("/")[0] for rank in cluster.ranks] == ["a", "b", "b"]
    parents = [psutil.Process(cluster.process(rank).pid).ppid() for rank in cluster.ranks]
    assert parents == [hosts[0].pid, hosts[1].pid, hosts[1].pid]

    cluster.put_in_inboxes(RunCell(cell=1, code=CELL, execution_count=1), cluster.ranks)
    for rank, words in enumerate(("sum 3, local 0 of 1", "sum 3, local 0 of 2", "sum 3, local 1 of 2")):
        wait_until(lambda rank=rank, words=words: f"{rank} {words}".encode() in heard.text[rank], 10.0, words)

    os.kill(cluster.process(1).pid, signal.SIGSTOP)
    wait_until(lambda: cluster.inspect([1])[1].is_stopped)
    seen = cluster.inspect([0, 1, 2])  # the host of each rank answers
    assert [seen[rank].is_stopped for rank in range(3)] == [False, True, False]
    assert "ipykernel" in seen[0].stack and "ipykernel" in seen[2].stack
    os.kill(hosts[1].pid, signal.SIGSTOP)
    wait_until(lambda: cluster.is_stopped)
    assert f"pid {hosts[1].pid}), which passes cells to the ranks, is stopped" in cluster.trouble()
    assert cluster.inspect([0, 1, 2])[1].is_stopped, "the way looks where the host server cannot"
    assert cluster.inspect([2])[2].stack
    assert not cluster.signal([0, 1], signal.SIGCONT), "and signals"
    assert not cluster.inspect([1])[1].is_stopped
    os.kill(hosts[1].pid, signal.SIGCONT)
    wait_until(lambda: not cluster.trouble())

    assert cluster.signal([0, 2], signal.SIGKILL)
    wait_until(lambda: heard.ended == dict.fromkeys((0, 2), "killed by SIGKILL"))
    assert (cluster.alive, cluster.gone) == ([1], [0, 2])
    assert cluster.is_running
    os.kill(hosts[1].pid, signal.SIGKILL)
    wait_until(lambda: 1 in heard.ended)
    assert heard.ended[1] == f"b was lost: the host server (pid {hosts[1].pid}) ended with status -9"
    with pytest.raises(HostError, match=r"the host server \(pid \d+\) ended with status -9"):
        cluster.signal([1], signal.SIGINT)
    with pytest.raises(StartError, match="rank 0 died while waiting for the group to form: killed by SIGKILL"):
        cluster.form(time.monotonic() + 5)

    assert cluster.is_running and not cluster.trouble() and not heard.gone
    assert cluster.replace([0, 1, 2], time.monotonic() + 30) == [f"ranks 1,2 are on {hosts[0].label} now"]
    os.kill(hosts[0].pid, signal.SIGKILL)
    wait_until(lambda: heard.gone == 1)
    assert not cluster.is_running
    assert cluster.trouble() == "the host server ended, and all ranks with it; %ddp_restart starts new ranks"
    with pytest.raises(StartError, match="the host server ended while waiting for"):
        cluster.form(time.monotonic() + 5)


@pytest.mark.long
def test_a_host_that_answers_again_is_attached_without_others(hosts, monkeypatch):
    """Otherwise its ranks would have no connection after the next healing."""
    monkeypatch.setattr("ddp_notebook.launch.membership.rank_placement.RANK_MIB", 1 << 40)  # no memory on other hosts
    by_name = {host.name: host for host in hosts}
    attached: list[Host] = []
    placement = Placement(
        backend="gloo", hosts=("a", "b"), machines=("a", "b"), devices=("cpu",) * 2, names=("CPU",) * 2,
        cuda_visible_devices=None, threads=1,
    )  # fmt: skip
    for host in hosts:
        host.close()
        wait_until(lambda host=host: not host.is_alive)

    def again(lost):
        return Host(LocalTransport(os.environ, "a")) if lost.name == "a" else None

    losses = LostRanks(by_name, Processes(), again, attached.append, lambda _: None, {})
    try:
        with pytest.raises(StartError, match="no other host has room for the ranks of b, which was lost"):
            losses.place(placement, [0, 1], time.monotonic() + 60, lambda: None)
        assert attached == [by_name["a"]] and by_name["a"].is_alive
    finally:
        by_name["a"].close()


@pytest.mark.long
def test_a_host_that_was_taken_again_has_its_whole_time_to_wait(hosts, monkeypatch):
    monkeypatch.setattr(warm, "_is_preparing", True)
    monkeypatch.setattr(warm, "_far", {})
    host, timers = hosts[0], lambda: [one for one in threading.enumerate() if isinstance(one, threading.Timer)]
    host.facts()
    before = len(timers())
    warm.give_back_far("key", host)
    assert len(timers()) == before + 1
    assert warm.take_far("another") is None and warm.take_far("key") is host
    wait_until(lambda: len(timers()) == before)
