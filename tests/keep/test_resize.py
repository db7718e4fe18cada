"""Resizing a kept session, with notebooks that attach later or only look."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import wait_until
from tests.keep.conftest import kill

COUNT = "import ddp_notebook; [len(ddp_notebook.current().recording.collectives(rank=r)) for r in range(3)]"
SUM = "%%on_all_ranks\nfor _ in range({}): dist.all_reduce(torch.ones(1))\n(rank, world_size, x)"

TO_ONE_THAT_LEFT = """
from ddp_notebook.messages.ranks import Probe, RunCell
cluster = ddp_notebook.current()._cluster
cluster.send(2, Probe(request=1)); cluster.drop(2, 1); \
cluster.put_in_inboxes(RunCell(cell=99, code="", execution_count=1), [2])
"""


@pytest.mark.long
def test_the_next_notebook_has_as_many_ranks(notebook):
    first = notebook("%ddp_start 2 --keep 1")
    first.run("%%on_all_ranks\nx = 5; was = rank; print('I am', rank)")
    first.run(SUM.format(2))
    grown = first.run("%ddp_resize 3").stdout
    assert grown.startswith("3 ranks now: rank 2 is new\n1 variable of rank 0 copied to rank 2: x\n"), grown
    lines = first.run(SUM.format(3)).stdout.splitlines()
    assert sorted(lines) == ["[0] (0, 3, 5)", "[1] (1, 3, 5)", "[2] (2, 3, 5)"]
    kill(first)

    second = notebook()
    assert "kept-1: <Session: 3 ranks" in second.run("%ddp_attach").stdout
    lines = second.run(SUM.format(1)).stdout.splitlines()
    assert sorted(lines) == ["[0] (0, 3, 5)", "[1] (1, 3, 5)", "[2] (2, 3, 5)"]  # the order of arrival is not fixed
    assert second.run(COUNT).displays[0]["text/plain"] == "[6, 6, 4]"
    shrunk = second.run("%ddp_resize 2 --without 0")
    told = "2 ranks now: rank 0 has left; rank 1 is rank 0, rank 2 is rank 1"
    assert shrunk.stdout.startswith(told), shrunk.stdout + shrunk.traceback
    second.run(TO_ONE_THAT_LEFT)  # like the thread that compares clocks, if it sends while the rank leaves
    second.run("%%on_ranks 0\nprint('still', was)")
    kill(second)

    third = notebook()
    assert "kept-1: <Session: 2 ranks" in third.run("%ddp_attach").stdout
    assert third.run(SUM.format(10)).stdout == "[0] (0, 2, 5)\n[1] (1, 2, 5)\n"
    assert third.run(COUNT).displays[0]["text/plain"] == "[16, 16, 4]", "with the numbers of their time"
    logs = subprocess.run([sys.executable, "-m", "ddp_notebook", "logs", "kept-1"], capture_output=True, text=True)
    assert logs.stdout.startswith("---- rank 0\nI am 1\n") and "still 1\n" in logs.stdout, logs.stdout
    assert third.run("%ddp_stop").stdout == "stopped 2 ranks\n"


DIES_BEFORE_THE_COPIES = """
import os, signal
from ddp_notebook.run.resize.resizing import Resizing
Resizing._settle = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
%ddp_resize 3
"""


@pytest.mark.long
def test_the_next_notebook_lists_ranks_without_variables(notebook):
    first = notebook("%ddp_start 2 --keep 1")
    first.run("%%on_all_ranks\nx = 5")
    first.start(DIES_BEFORE_THE_COPIES)
    assert first.manager is not None
    wait_until(lambda: not first.manager.is_alive(), 30, what="the kernel is gone")
    told = "rank 2 is new, and the earlier notebook ended while it resized the session: variables may be missing there."

    second = notebook()
    attached = second.run("%ddp_attach").stdout
    assert "kept-1: <Session: 3 ranks" in attached and f"{told} %ddp_heal --from 0 copies" in attached, attached
    assert second.run("%on_all_ranks rank, world_size, 'x' in globals()").stdout == (
        "[0-1] (0 | 1, 3, True)\n[2] (2, 3, False)\n"
    )
    assert told in second.run("%ddp_attach").stdout, "as long as it is so"
    assert second.run("%ddp_heal --from 0").stdout == "1 variable of rank 0 copied to rank 2: x\n"
    assert told not in second.run("%ddp_attach").stdout
    assert second.run(SUM.format(1)).stdout == "[0] (0, 3, 5)\n[1] (1, 3, 5)\n[2] (2, 3, 5)\n"
    kill(second)

    assert told not in notebook("%ddp_attach").run("%ddp_attach").stdout


@pytest.mark.long
def test_what_cannot_be_is_refused_and_changes_nothing(notebook):
    kernel = notebook("%ddp_start 2 --keep 1")
    for line, words in (
        ("%ddp_resize 100000", "a session has at most 4,096 ranks, got N = 100000"),
        ("%ddp_resize 0", "world_size must be at least 1, got 0"),
    ):
        refused = kernel.run(line)
        assert refused.ename == "UsageError" and words in refused.traceback, refused.traceback
    job = "%%on_all_ranks --background\nimport time\ntime.sleep(60)"
    kernel.run(job)
    assert "a cell is running" in kernel.run("%ddp_resize 3").traceback
    kernel.run("%ddp_cancel all")
    kernel.run("%ddp_wait 1")  # ranks on a busy machine may take longer than cancelling waits
    left = kernel.run("%ddp_resize 1")
    assert left.stdout == "1 rank now: rank 1 has left\n", left


@pytest.mark.long
def test_a_notebook_that_looks_on_follows(notebook):
    drives = notebook("%ddp_start 2 --keep 1")
    drives.run("%%on_all_ranks\nx = 5")
    drives.run(SUM.format(2))
    looks = notebook()
    looks.run("%ddp_attach")
    assert drives.run("%ddp_resize 3").status == "ok"
    drives.run(SUM.format(3))
    assert looks.run(COUNT).displays[0]["text/plain"] == "[5, 5, 3]"
    status = looks.run("%ddp_status").stdout
    assert status.count("idle") == 3, status
    assert drives.run("%ddp_resize 1").status == "ok"
    looks.run(COUNT)
    assert looks.run("%ddp_status").stdout.count("idle") == 1
    assert "kept-1: <Session: 1 rank " in looks.run("%ddp_attach --take-over").stdout
    assert looks.run("%on_all_ranks rank, world_size").stdout == "[0] (0, 1)\n"
