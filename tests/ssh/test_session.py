"""Ranks on machines reached by ssh: one machine under two names, each with a separate host server."""

from __future__ import annotations

import os
import threading

import psutil
import pytest

import ddp_notebook
from ddp_notebook.errors import DDPNotebookError, RankDiedError, RankError


@pytest.fixture(scope="module")
def session(python):
    with ddp_notebook.start(
        hosts=ddp_notebook.Ssh("one:1,two:1", python=python), env={"ASKED": "for"}, grace_s=0.3
    ) as session:
        yield session


def test_they_form_a_group(session):
    result = session.run(
        "import os\nx = torch.ones(1); dist.all_reduce(x)\n"
        "print(int(x), *(os.environ.get(name, '-') for name in ('LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK')))\n"
        "print(*(os.environ.get(name, '-') for name in ('ASKED', 'OF_THE_HOST', 'OF_THE_NOTEBOOK')))"
    )
    assert [result[rank].stdout for rank in (0, 1)] == ["2 0 1 0\nfor yes -\n", "2 0 1 1\nfor yes -\n"]
    assert repr(session).startswith("<Session: 2 ranks on ")


def test_values_travel(session):
    big = list(range(300_000))
    session.push({"numbers": big})
    session.run("numbers[rank] = -1")
    assert session.pull("numbers", 1)[1][:3] == [0, -1, 2] and len(session["numbers"][0]) == len(big)


def test_a_deadlock_is_freed_and_a_failure_ends_the_others(session):
    session.run("kept = rank + 40")
    with pytest.raises(DDPNotebookError, match=r"waiting in recv #1 from rank 1"):
        session.run("dist.recv(torch.ones(1), 1 - rank)", timeout_s=0.3)
    with pytest.raises(RankError, match="ZeroDivisionError"):
        session.run("1 / rank\ndist.barrier()")
    assert session.run("x = torch.tensor(kept); dist.all_reduce(x); print(int(x))")[0].stdout == "81\n"


@pytest.mark.long
def test_a_cell_that_another_host_has_ended(session):
    with pytest.raises(RankError, match=r"rank 1 waits in all_reduce #\d+, and rank 0 has ended the cell without it"):
        session.run("if rank == 1: dist.all_reduce(torch.ones(1))", timeout_s=30)
    assert session.run("x = torch.ones(1); dist.all_reduce(x); print(int(x))")[0].stdout == "2\n"


def test_a_rank_that_dies_is_replaced_on_its_host(session):
    session.run("kept = 'there'")
    pid_of = {state.rank: state.pid for state in session.status().rows}
    with pytest.raises(RankDiedError):
        session.run("import os\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")
    session.ranks.heal()
    result = session.run(
        "import os\nx = torch.ones(1); dist.all_reduce(x)\n"
        "print(int(x), globals().get('kept'), os.environ['GROUP_RANK'])"
    )
    assert [result[rank].stdout for rank in (0, 1)] == ["2 there 0\n", "2 None 1\n"]
    after = {state.rank: state.pid for state in session.status().rows}
    assert after[0] == pid_of[0] and after[1] != pid_of[1]


def test_what_they_call_is_recorded(session):
    session.run("dist.all_reduce(torch.full((4,), float(rank)))")
    newest = int(session.recording.rows("call")["cell"].max())
    calls = session.recording.collectives(op="all_reduce", cell=newest)
    assert {call.rank for call in calls} == {0, 1} and {call.site for call in calls} == {"cell line 1"}
    assert [call.output.mean for call in calls] == [1.0, 1.0]
    assert session.recording.hosts == ("one", "two")
    assert [row.host for row in session.status().rows] == ["one", "two"]


@pytest.mark.long
def test_a_rank_goes_back_to_its_host_where_no_other_has_room(session, monkeypatch):
    """The last test, because it changes the processes of the module's session.

    They are a new connection, and a controller on the notebook's machine with its own host server.
    """
    here, there = session._hosts.all
    monkeypatch.setitem(here.facts(), "memory_mib", 150)  # one rank gets 100 of it
    session.run("kept = 'there'")
    client = session.client
    assert client.ids == [0, 1] and client[:].apply_sync(os.getpid) == session.ranks.pids()
    theirs = client[:].execute("print('theirs', rank, kept)", block=True)
    theirs.wait_for_output(10)
    assert theirs.stdout == ["theirs 0 there\n", "theirs 1 there\n"]
    threading.Timer(0.3, there.transport._ssh.kill).start()
    with pytest.raises(RankDiedError, match="two was lost: the host server on two ended, or the connection to it"):
        session.run("dist.recv(torch.ones(1), 1 - rank)")
    assert session.ranks.heal()[1:] == ["rank 1 is on two now"]
    result = session.run("x = torch.ones(1); dist.all_reduce(x); print(int(x), globals().get('kept'))")
    assert [result[rank].stdout for rank in (0, 1)] == ["2 there\n", "2 None\n"]
    assert session.ranks.pids("host server") == [here.pid, session._hosts.all[1].pid] and not there.is_alive
    assert session.client is client and client[:].apply_sync(os.getpid) == session.ranks.pids()
    controller = psutil.Process(session.ranks.pids("controller")[0])
    assert controller.ppid() not in session.ranks.pids("host server")
    session.stop()
    assert not controller.is_running()
