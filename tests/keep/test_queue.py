"""Queued jobs of a notebook that ends still run once and in order."""

from __future__ import annotations

import pytest

from ddp_notebook.launch.keep.keeper.journal import Journal
from ddp_notebook.launch.keep.keeper.queue import Queue
from ddp_notebook.messages.keeper import Waiting
from ddp_notebook.messages.ranks import CellDone, RunCell
from tests.conftest import wait_until
from tests.keep.conftest import kill
from tests.keep.test_kept import listed

FIRST = """%%on_all_ranks --background
import os, time
while not os.path.exists({go!r}): time.sleep(0.01)
order = ['first']
{then}
"""
NEXT = "%%on_all_ranks --background{options}\norder.append({name!r}); dist.all_reduce(torch.ones(1)); print({name!r})"


def leave(notebook, go, then: str = "pass", options: str = "") -> None:
    """Start a notebook with a running job and two queued jobs, and end it."""
    first = notebook("%ddp_start 2 --keep 1")
    first.run(FIRST.format(go=str(go), then=then))
    for name in ("second", "third"):
        first.run(NEXT.format(name=name, options=options))
    kill(first)


@pytest.mark.long
def test_they_begin_without_a_notebook(notebook, tmp_path):
    leave(notebook, tmp_path / "go")
    assert "cell [3] runs for" in listed() and ", 2 more wait, alone" in listed()
    (tmp_path / "go").touch()
    wait_until(lambda: ", 3 ended unattended, alone" in listed(), 20.0, "all have run")
    second = notebook()
    shown = second.run("%ddp_attach").stdout
    assert "[0-1] second\n" in shown and "[0-1] third\n" in shown
    assert second.run("%on_all_ranks ' '.join(order)").stdout == "[0-1] 'first second third'\n"
    ended = [f"cell [{number}] of the earlier notebook is done, and was shown here" for number in (3, 4, 5)]
    assert second.run("%ddp_jobs").stdout.splitlines() == ended


@pytest.mark.long
def test_the_next_notebook_has_them_in_its_queue(notebook, tmp_path):
    leave(notebook, tmp_path / "go")
    second = notebook()
    told = second.run("%ddp_attach").stdout
    assert "cell [3] of the earlier notebook continues as job 1\n" in told
    for job in (2, 3):
        assert f"cell [{job + 2}], which waited in the queue of the earlier notebook, is job {job}\n" in told
    assert second.run("%ddp_cancel 2").stdout == "job 2 was cancelled after 0.0 s\n"
    kill(second)
    (tmp_path / "go").touch()
    wait_until(lambda: ", 2 ended unattended, alone" in listed(), 20.0, "the others have run")
    third = notebook()
    third.run("%ddp_attach")
    assert third.run("%on_all_ranks ' '.join(order)").stdout == "[0-1] 'first third'\n"


@pytest.mark.long
@pytest.mark.parametrize(("then", "options"), [("1 / 0", ""), ("pass", " --timeout 60")])
def test_what_needs_a_notebook_waits_for_one(notebook, tmp_path, then, options):
    leave(notebook, tmp_path / "go", then, options)
    (tmp_path / "go").touch()
    wait_until(lambda: "2 more wait, 1 ended unattended, alone" in listed(), 20.0, "the first has run")
    second = notebook()
    attached = second.run("%ddp_attach")
    told = "cell [5], which waited in the queue of the earlier notebook, is job 2\n"
    assert told in attached.stdout + attached.stderr and attached.ename == ("RankError" if "0" in then else "")
    second.run("%ddp_wait")
    assert second.run("%on_all_ranks ' '.join(order)").stdout == "[0-1] 'first second third'\n"


def waiting(code: str, ranks: list[int] | None = None) -> Waiting:
    return Waiting(told=RunCell(cell=0, code=code, execution_count=1), ranks=ranks, timeout_s=None)


def test_a_started_job_leaves_the_queue_and_its_copy_stays():
    queue = Queue()
    queue.waiting = [waiting("train()"), waiting("train()"), waiting("test()")]
    queue.on_told(RunCell(cell=7, code="train()", execution_count=1))
    queue.on_told(RunCell(cell=8, code="other()", execution_count=1))
    assert [one.told.code for one in queue.waiting] == ["train()", "test()"]


@pytest.mark.parametrize("status", ["ok", "error"])
def test_no_job_starts_during_another_or_after_a_failed_one(status):
    queue, journal = Queue(), Journal("ab12", 1000)
    queue.waiting = [waiting("train()", [1])]
    journal.on_told(RunCell(cell=4, code="", execution_count=1), [0])
    assert queue.begin(journal, ranks=[0, 1], alive=[0, 1]) is None
    journal.on_message(0, CellDone(cell=4, status=status, duration_s=1.0))
    journal.cells[4].close(0, "text")
    journal.on_message(0, CellDone(cell=4, status=status, duration_s=1.0))
    assert queue.begin(journal, ranks=[0, 1], alive=[0]) is None
    begun = queue.begin(journal, ranks=[0, 1], alive=[0, 1])
    if status == "ok":
        assert begun is not None and begun[0].cell == 5 and begun[1] == [1]
    else:
        assert begun is None and len(queue.waiting) == 1
