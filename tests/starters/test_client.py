"""Ranks on the hosts of a running cluster's engines. The cluster stays under the control of its user."""

from __future__ import annotations

import os

import ipyparallel
import psutil
import pytest

import ddp_notebook
from ddp_notebook.errors import StartError, UsageError
from ddp_notebook.launch.options import StartOptions
from ddp_notebook.launch.placement import place_on_hosts
from ddp_notebook.launch.starters import ipyparallel_cluster as starter
from tests.conftest import wait_until
from tests.starters.conftest import invitations, said, sum_of


@pytest.fixture(scope="module")
def engines(make_profile):
    """Return a client of two engines, which `--client profile=running` connects to."""
    make_profile("running")
    cluster = ipyparallel.Cluster(
        profile="running", n=2, log_level=40, delay=0, controller_args=["--HeartMonitor.period=500"]
    )
    with cluster as client:
        yield client


@pytest.mark.long
def test_engines_start_ranks_and_stay_their_users(engines, cache):
    engines[:]["mine"] = 7
    pids = engines[:].apply_sync(os.getpid)
    children = [len(psutil.Process(pid).children()) for pid in pids]
    with ddp_notebook.start(4, client="profile=running") as session:
        assert sum_of(session) == ["4"] * 4
        assert said(session, "import os; print(os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'])")[3] == "3 4"
        assert len(session.ranks.pids("host server")) == 1, "both engines have the same machine and cores"
        assert engines[:].apply_sync(os.getpid) == pids
        of_ranks = session.ranks.pids()
    assert not any(map(psutil.pid_exists, of_ranks)) and not invitations(cache)
    assert engines[:]["mine"] == [7, 7] and engines[:].apply_sync(os.getpid) == pids
    assert [len(psutil.Process(pid).children()) for pid in pids] == children


@pytest.mark.long
def test_a_channel_that_others_can_read_is_told(engines, make_profile):
    make_profile("in_the_open")
    cluster = ipyparallel.Cluster(profile="in_the_open", n=1, log_level=40, delay=0, controller_ip="*")
    with cluster, ddp_notebook.start(client="profile=in_the_open") as session:
        words = repr(session.status()).splitlines()[-1]
        assert words.startswith("the cluster profile=in_the_open: its own channel (at ")
        assert words.endswith("c.IPController.enable_curve = True in its ipcontroller_config.py encrypts the channel")
    with ddp_notebook.start(client="profile=running") as session:
        assert "channel" not in repr(session.status()), "it is on loopback"


def test_an_encrypted_channel_is_none_of_these():
    assert starter.unencrypted({"interface": "tcp://10.0.0.1", "curve_serverkey": "key"}) == ""
    assert "(at 10.0.0.1) is signed but not encrypted" in starter.unencrypted({"interface": "tcp://10.0.0.1"})


@pytest.mark.long
def test_engines_that_have_gpus_of_their_own_have_a_task_each(engines):
    """Like those of a template that binds a GPU to each engine. Without a number there is a rank for each engine."""
    for engine in engines.ids:
        engines[engine].apply_sync(eval, f"__import__('os').environ.update(CUDA_VISIBLE_DEVICES='{5 + engine}')")
    try:
        with ddp_notebook.start(client="profile=running") as session:
            assert said(session, "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])") == ["5", "6"]
    finally:
        engines[:].apply_sync(eval, "__import__('os').environ.update(CUDA_VISIBLE_DEVICES='')")


@pytest.mark.long
def test_a_python_that_will_not_do(engines):
    with pytest.raises(StartError, match=r"the cluster profile=running, engine 0 on .*: sh: .*/no/such: not found"):
        ddp_notebook.start(client=ddp_notebook.Client("profile=running", python="/no/such"))


@pytest.mark.long
def test_engines_that_are_busy(engines, monkeypatch, tmp_path):
    engines[:].apply_sync(os.getpid)  # the first request to an engine takes longer
    monkeypatch.setattr(starter, "_ANSWER_S", 1.5)
    busy = engines[1].apply_async(_wait_for, str(tmp_path / "end"))
    with pytest.raises(StartError, match=r"engine 1 has not answered in 1.5 s; it may still be running code"):
        ddp_notebook.start(client="profile=running")
    (tmp_path / "end").touch()
    busy.get(timeout=10)


def _wait_for(path: str) -> None:
    import os
    import time

    while not os.path.exists(path):
        time.sleep(0.05)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("running", UsageError, "--client takes profile=NAME or cluster_id=ID, not 'running'"),
        ("profile=", UsageError, "--client takes profile=NAME or cluster_id=ID"),
        ("profile=is_not", UsageError, "profile 'is_not' does not exist"),
        (
            "profile=idle",
            StartError,
            r"found no cluster profile=idle: .*; ipcluster start --profile=idle starts one",
        ),
        ("profile=running,cluster_id=x", StartError, r"ipcontroller-x-client.json does not exist; known are "),
    ],
)
def test_a_cluster_that_is_not_there(line, kind, words, engines, make_profile, request):
    if "idle" in line:
        make_profile("idle")
    with pytest.raises(kind, match=words):
        ddp_notebook.start(client=line)


@pytest.mark.slow
def test_a_controller_that_has_gone(make_profile, monkeypatch):
    """It has left its file."""
    folder = make_profile("gone")
    cluster = ipyparallel.Cluster(profile="gone", log_level=40)
    cluster.start_controller_sync()
    try:
        security = folder / "security"
        wait_until(lambda: any(one.read_text() for one in security.glob("ipcontroller-*client.json")), 20.0)
        (file,) = security.glob("ipcontroller-*client.json")
        text = file.read_text()
        with pytest.raises(StartError, match="the cluster profile=gone has no engines yet; wait until"):
            ddp_notebook.start(client="profile=gone")
    finally:
        cluster.stop_controller_sync()
    file.write_text(text)
    monkeypatch.setattr(starter, "_CONNECT_S", 0.3)
    with pytest.raises(StartError, match=r"the cluster profile=gone does not answer .*; it may have ended without"):
        ddp_notebook.start(client="profile=gone")


_FACTS = {
    "gpus": [],
    "cores": 8,
    "machine_cores": 8,
    "backends": ["gloo"],
    "torch": "2.13.0",
    "memory_mib": 64 << 10,
    "env": {},
}


@pytest.mark.parametrize(
    ("ranks", "hosts"),
    [(None, "aaab"), (4, "aaab"), (8, "aaaaaabb"), (2, "ab"), (6, "aaabbb")],
    ids=["one for each engine", "the same", "twice", "fewer", "that do not go by engines"],
)
def test_ranks_go_by_engines(ranks, hosts):
    options = StartOptions(client="profile=x", world_size=ranks)
    placed = place_on_hosts(options, dict.fromkeys("ab", _FACTS), {"a": "a", "b": "b"}, {"a": 3, "b": 1})
    assert "".join(placed.hosts) == hosts
