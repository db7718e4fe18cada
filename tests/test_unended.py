"""While a cell has not ended on some ranks, the others can be used. Ways to end it without loss are tried first."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest

from ddp_notebook.errors import CellTimeoutError, JobCancelledError, RankError, SessionBrokenError
from ddp_notebook.messages.ranks import Interrupt
from ddp_notebook.run.cells import abandoned_cells, watch
from ddp_notebook.run.cells.interrupt import ONE_PRESS_S
from tests.conftest import is_within, wait_until

SUM = "x = torch.ones(1); dist.all_reduce(x); int(x)"
# rank 1 ends only at the second interrupt
STUBBORN = """
import time
kept = rank
presses = 0
while rank == 1 and presses < 2:
    try: time.sleep(60)
    except KeyboardInterrupt: presses += 1; print('press', presses)
"""
DEAF = "kept = rank\nif rank == 1: sum(range(10**11))  # one long call in C"


@pytest.fixture(scope="module")
def session(waiting_host_server):
    from ddp_notebook import api

    waiting_host_server()
    with api.start(3) as running:
        yield running


@pytest.fixture(autouse=True)
def impatience(session, monkeypatch):
    monkeypatch.setattr(watch, "_END_S", 0.5)
    monkeypatch.setattr(abandoned_cells, "_END_S", 0.5)
    yield
    if session._cells.unended():  # the test failed; the next ones would wait for this cell
        session.interrupt(replace=True)


def leave_rank_1_in(session, code: str) -> None:
    with pytest.raises(CellTimeoutError, match=r"rank 1 not stopped yet; .* until %ddp_interrupt ends it"):
        session.run(code, timeout_s=0.3)


def test_the_others_can_be_used_until_it_is_ended_without_loss(session, capsys):
    leave_rank_1_in(session, STUBBORN)
    capsys.readouterr()
    for refused in (
        lambda: session.run("1"),
        lambda: session.run("1", ranks=1),
        lambda: session.pull("kept"),
        lambda: session.push(kept=1),
    ):
        with pytest.raises(
            SessionBrokenError, match=r"not ended on rank 1 .*%ddp_interrupt, .*keeps all.*%%on_ranks 0,2, or"
        ):
            refused()
    for refused in (session.ranks.heal, session.ranks.reform):
        with pytest.raises(SessionBrokenError, match=r"not ended on rank 1 .*or end it with %ddp_interrupt"):
            refused()

    assert session.run("print('works'); kept", ranks=[0, 2])[2].result == "2"
    with pytest.raises(RankError, match="ZeroDivisionError"):
        session.run("1/0", ranks=0)
    assert session.pull("kept", [0, 2]) == {0: 0, 2: 2}
    session.push(kept=5, ranks=[0, 2])
    assert str(session.check("kept")) == "2 ranks agree: kept; rank 1 is in a cell: not asked"
    assert [row.state.partition(" for")[0] for row in session.status().rows] == ["idle", "in a cell", "idle"]
    assert "press 1" in session.log(1)
    assert session.recording is not None
    assert "press" not in capsys.readouterr().out.partition("works")[2]

    epoch = session.ranks.epoch
    assert session.interrupt() == ["the cell was ended on rank 1; all variables are kept"]
    assert session.ranks.epoch == epoch + 1
    result = session.run(f"{SUM}, kept, presses")
    assert [result[rank].result for rank in (0, 1)] == ["(3, 5, 0)", "(3, 1, 2)"]
    assert "[1] (between cells) press 2" in capsys.readouterr().out
    assert session.interrupt() == ["no cell is under way"]


def test_what_cannot_be_ended_is_replaced_on_demand(session):
    session.run("before = 1")
    leave_rank_1_in(session, DEAF)
    said = session.interrupt()
    assert said[0].startswith("rank 1 has not ended yet: no answer")
    assert said[1].startswith("wait, or %ddp_interrupt --replace")
    pids = session.ranks.pids()
    assert session.interrupt(replace=True)[0].startswith("rank 1 was replaced and begins without variables")
    assert [old == new for old, new in zip(pids, session.ranks.pids(), strict=True)] == [True, False, True]
    result = session.run(f"{SUM}, 'before' in globals()")
    assert [result[rank].result for rank in (0, 1)] == ["(3, True)", "(3, False)"]


@pytest.mark.long
def test_a_cell_of_another_thread_loses_variables_only_on_demand(session):
    session.run("before = 1")
    pids = session.ranks.pids()
    rank_1 = psutil.Process(pids[1])
    used_s = rank_1.cpu_times().user
    future = session.submit(DEAF)
    # The rank is inside the call: before it, an interrupt would end the cell.
    wait_until(lambda: session._cells.busy == [1] and rank_1.cpu_times().user > used_s + 0.2)
    for _ in range(2):  # after the time in which two presses count as one
        assert session.interrupt()[0].startswith("rank 1 has not ended yet: no answer")
        time.sleep(ONE_PRESS_S)
    assert session.ranks.pids() == pids
    assert session.interrupt(replace=True)[0].startswith("rank 1 was replaced and begins without variables")
    assert [old == new for old, new in zip(pids, session.ranks.pids(), strict=True)] == [True, False, True]
    with pytest.raises(JobCancelledError, match="was cancelled"):
        future.result(5)
    result = session.run(f"{SUM}, 'before' in globals()")
    assert [result[rank].result for rank in (0, 1)] == ["(3, True)", "(3, False)"]


def test_a_cell_that_ends_by_itself_after_all(session):
    leave_rank_1_in(
        session, "import time\nif rank == 1:\n    try: time.sleep(9)\n    except KeyboardInterrupt: time.sleep(0.8)"
    )
    wait_until(lambda: not session._cells.busy)
    assert session.run(SUM)[1].result == "3"


def test_a_cell_of_another_thread(session):
    """The cell ends as after the stop button. A press ends the wait in the run queue, with a different message."""
    future = session.submit("import time; time.sleep(60)")
    wait_until(lambda: session._cells.watched is not None)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    told = rf"^interrupted while waiting for job {future.number} to end: nothing was done. %ddp_cancel ends it"
    with pytest.raises(KeyboardInterrupt, match=told):
        session.run("done = True")
    assert is_within(time.monotonic() - began, 1.3)
    assert not future.done()
    assert session.interrupt() == [f"job {future.number} was ended on ranks 0-2; all variables are kept"]
    with pytest.raises(JobCancelledError, match="was cancelled"):
        future.result(5)
    assert session.run("'done' in globals()")[0].result == "False"


def test_the_views_stop_button_ends_a_cell_of_another_thread(session):
    assert session._views.interrupt() == "no cell runs on the ranks"
    future = session.submit("import time; time.sleep(60)")
    wait_until(lambda: session._cells.watched is not None)
    assert session._views.interrupt() == "interrupted"
    with pytest.raises(JobCancelledError, match="was cancelled"):
        future.result(5)


def test_cells_that_wait_behind_the_one_that_is_ended(session, monkeypatch):
    """They start when the cell has ended, and `interrupt` does not wait for their end."""
    # a busy machine needs longer, and the limit is not tested here
    monkeypatch.setattr(abandoned_cells, "_END_S", 10.0)
    futures = [session.submit("import time; time.sleep(60)") for _ in range(2)]
    for ended, job in enumerate(futures, 1):
        wait_until(lambda: session._cells.watched is not None)
        said = session.interrupt()
        assert said.pop(0) == f"job {job.number} was ended on ranks 0-2; all variables are kept"
        assert ended == 2 or said == [f"job {job.number + 1} comes next: %ddp_cancel all ends all jobs"]
        wait_until(lambda ended=ended: sum(future.done() for future in futures) == ended, 10)
    for future in futures:
        with pytest.raises(JobCancelledError, match="was cancelled"):
            future.result()
    assert session.run(SUM)[1].result == "3"


def test_the_message_alone_ends_what_no_signal_of_python_ends(session):
    """The signals may have arrived before the cell began. Then only the message ends the cell."""
    future = session.submit("kept = 7\ndist.recv(torch.ones(1), 1)", ranks=0)
    wait_until(lambda: session._cells.under_way is not None)  # the cell was sent
    run = session._cells.under_way
    wait_until(lambda: "recv" in session._cells.inspect(run)[0].doing)
    session._cluster.send(0, Interrupt(cell=run.number))
    with pytest.raises(RankError, match="KeyboardInterrupt"):
        future.result(5)
    assert session.run(f"{SUM}, 'kept' in globals()")[0].result == "(3, True)"


# The rank sends itself the signals that the host server would send.
INTERRUPTED_IN_ITS_BEGIN = """
import gc, os
from ddp_notebook.rank.cell.runner import Runner
from ddp_notebook.wire.signals import INTERRUPT, RELEASE, send

runner = next(one for one in gc.get_objects() if type(one) is Runner)

def interrupt():
    os.kill(os.getpid(), INTERRUPT)
    if RELEASE is not None:
        send(os.getpid(), RELEASE, runner.running[0])

def interrupt_at_the_end_of(owner, step):
    do = getattr(owner, step)

    def do_once(*arguments, **options):
        setattr(owner, step, do)
        try:
            return do(*arguments, **options)
        finally:
            interrupt()

    setattr(owner, step, do_once)

def interrupt_at_the_end_of_the_last_hook():
    hooks = runner._hooks.cell_begins
    begins = hooks[-1]

    def do_once(*arguments):
        hooks[-1] = begins
        try:
            begins(*arguments)
        finally:
            interrupt()

    hooks[-1] = do_once

def interrupt_in_a_hook():
    def hook(_):
        get_ipython().events.unregister("pre_run_cell", hook)
        interrupt()

    get_ipython().events.register("pre_run_cell", hook)

"""


@pytest.mark.parametrize(
    "when",
    [
        "interrupt_at_the_end_of(runner._network, 'begin_cell')",
        "interrupt_at_the_end_of(runner._streams, 'begin')",
        "interrupt_at_the_end_of(runner._parents, 'set')",
        "interrupt_at_the_end_of(runner._tracebacks, 'begin')",
        "interrupt_at_the_end_of_the_last_hook()",
        "interrupt_at_the_end_of(runner._shell, 'transform_cell')",
        "interrupt_in_a_hook()",  # IPython prints an error of a hook and then runs the cell
        "interrupt_at_the_end_of(runner._shell.history_manager, 'store_inputs')",
        "interrupt_at_the_end_of(runner._shell.compile, 'cache')",
    ],
)
def test_an_interrupt_while_the_cell_begins_is_not_lost(session, when):
    session.run(INTERRUPTED_IN_ITS_BEGIN + when, ranks=0)
    future = session.submit("import time; time.sleep(60)", ranks=0)

    def is_past_its_begin() -> bool:
        run = session._cells.under_way
        return future.done() or (run is not None and "sleep" in session._cells.inspect(run)[0].doing)

    wait_until(is_past_its_begin)
    if not future.done():  # the message comes last
        session._cluster.send(0, Interrupt(cell=session._cells.under_way.number))
    with pytest.raises(RankError, match="KeyboardInterrupt"):
        future.result(5)
    assert session.run(SUM)[1].result == "3"
