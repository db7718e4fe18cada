"""`peek` and `pull` while a job runs: the values are read between two optimizer steps, or at the end of the job."""

from __future__ import annotations

import contextlib
import io
import re
import threading
import time
from collections.abc import Iterator

import pytest

from ddp_notebook.errors import DDPNotebookError
from ddp_notebook.run.jobs.job import Job
from tests.conftest import wait_until

TRAINS = """
import time
def train(steps, pause):
    inside = []
    for step in range(steps):
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        history.append(step)
        inside.append(10 * step)
        time.sleep(pause)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
history, weights = [], torch.zeros(1000)
"""


@pytest.fixture(scope="module")
def prepared(session):
    session.run(TRAINS, quiet=True)
    return session


@contextlib.contextmanager
def job(session, code: str) -> Iterator[Job]:
    """Run a cell in the background, and cancel it at the end of the block."""
    session.run("history.clear()", quiet=True)
    running = session.submit(code, quiet=True)
    try:
        while running.state == "waiting" or min(map(int, session.peek("len(history)").values())) < 3:
            assert not running.done(), running
        yield running
    finally:
        session.jobs.cancel()


def test_peek_reads_an_expression_between_steps_of_a_running_job(prepared):
    with job(prepared, "train(10_000, 0.01)") as running:
        began = time.monotonic()
        seen = prepared.peek("history[-3:]")
        took = time.monotonic() - began
        assert not running.done() and took < 5, "the job would take 100 s"
        for rank in (0, 1):
            a, b, c = eval(seen[rank])
            assert (b, c) == (a + 1, a + 2)
        steps = re.findall(r"after (\d+) steps: \[", repr(seen))
        assert steps and all(int(one) > 1 for one in steps)
        inside = prepared.peek("inside[-1] - 10 * history[-1], len(inside) == len(history)", ranks=1)
        assert dict(inside) == {1: "(0, True)"}, "variables of the function, where no list has grown alone"


def test_pull_reads_only_copyable_values_from_a_running_job(prepared, capsys):
    with job(prepared, "train(10_000, 0.01)") as running:
        first, second = (prepared.pull("history")[0] for _ in range(2))
        assert not running.done() and second[: len(first)] == first and len(second) > len(first) > 0
        assert prepared.pull("weights", ranks=0, safe=True)[0].shape == (1000,)
        assert capsys.readouterr().err == ""
    with job(prepared, "train(10_000, 0.01)") as running, contextlib.redirect_stderr(io.StringIO()) as said:
        told = f"'model' (Linear) is read when job {running.number} has ended: while it runs, only numbers"

        def cancel() -> None:
            until = time.monotonic() + 60
            while told not in said.getvalue() and time.monotonic() < until:
                time.sleep(0.01)
            prepared.jobs.cancel()

        cancelling = threading.Thread(target=cancel)
        cancelling.start()
        assert prepared.pull("model", ranks=0)[0].weight.shape == (2, 2)
        cancelling.join()
        assert running.state == "cancelled" and told in said.getvalue()


def test_a_model_in_ddp_is_refused_at_once_during_a_job(prepared):
    prepared.run("wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))", quiet=True)
    with job(prepared, "train(10_000, 0.01)") as running:
        remedy = "pull its inner model: %on_all_ranks inner = wrapped.module, then %ddp_pull inner"
        with pytest.raises(
            DDPNotebookError,
            match=rf"^'wrapped' \(DistributedDataParallel\) cannot .* job {running.number} has ended, {remedy}$",
        ):
            prepared.pull("wrapped")
        assert not running.done()


LATE = """
from ddp_notebook.rank.engine import RankEngine
hooks, waited = RankEngine.instance()._rank._hooks, []
def wait_for_the_question(cell):
    until = time.monotonic() + 2  # a question that came before the job is answered already
    while not waited and not hooks.core.between and time.monotonic() < until:
        time.sleep(0.01)
    waited.append(cell)
hooks.cell_begins.insert(0, wait_for_the_question)
"""


@pytest.mark.parametrize("ask", ["peek", "pull"])
def test_a_request_before_a_job_is_answered_at_its_first_step(prepared, ask):
    """The rank has received the job before the request. If the request waited for the job, it would wait for its
    end."""
    prepared.run("history.clear()", quiet=True)  # features set their hooks at the end of a cell
    prepared.run(LATE, quiet=True)
    running = prepared.submit("train(10_000, 0.01)", quiet=True)
    try:
        wait_until(lambda: running.state == "running", 5, what="the job was sent")
        seen = prepared.peek("len(history)") if ask == "peek" else prepared.pull("history")
        assert not running.done() and dict(seen) in ({0: "0", 1: "0"}, {0: [], 1: []}), "the job would take 100 s"
    finally:
        prepared.jobs.cancel()


def test_a_job_without_steps_answers_at_its_end_after_a_message(prepared, capsys, tmp_path):
    begun = f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').close()"
    running = prepared.submit(f"{begun}; history[:] = [7]; time.sleep(1.5)", quiet=True)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 10, what="both ranks have begun")
    assert dict(prepared.peek("history")) == {0: "[7]", 1: "[7]"} and running.state in ("running", "done")
    said = capsys.readouterr().err
    assert f"waiting for the next optimizer step of job {running.number} on ranks 0,1, or for its end" in said
    running.result(10)


def test_a_rank_between_steps_is_not_reported_as_blocked(prepared, capsys, monkeypatch, tmp_path):
    """It answers at the next step, so it is not late."""
    from ddp_notebook.run import rank_requests, session_parts

    monkeypatch.setattr(rank_requests, "_SLOW_S", (0.1, 0.3))
    monkeypatch.setattr(session_parts, "_LONG_S", 0.2)
    begun = f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').close()"
    running = prepared.submit(f"{begun}; history[:] = [8]; time.sleep(2)", quiet=True)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 10, what="both ranks have begun")
    assert dict(prepared.peek("history", ranks=0)) == {0: "[8]"}
    said = capsys.readouterr().err
    assert "waiting for the next optimizer step" in said and "has not answered" not in said
    running.result(10)


def test_an_expression_that_fails_fails_alone(prepared):
    from ddp_notebook.errors import DDPNotebookError, UsageError

    with job(prepared, "train(10_000, 0.01)") as running:
        with pytest.raises(DDPNotebookError, match=r"^ranks 0-1: NameError: name 'nothing' is not defined$"):
            prepared.peek("nothing + 1")
        with pytest.raises(DDPNotebookError, match="SyntaxError"):
            prepared.peek("history[")
        with pytest.raises(DDPNotebookError, match="undefined variable 'nothing'"):
            prepared.pull("nothing")
        assert not running.done()
    with pytest.raises(UsageError, match="needs a Python expression"):
        prepared.peek(" ")


_FAILS = """
class Silent(Exception):
    __str__ = lambda self: None
def fail():
    raise Silent
class Unpicklable:
    def __init__(self, error):
        self.error = error
    def __reduce__(self):
        raise self.error
silent, ending = Unpicklable(Silent()), Unpicklable(SystemExit(3))
"""


class _Ending:
    """An object whose unpickling raises an error."""

    def __reduce__(self):
        return exec, ("class Silent(Exception):\n    __str__ = lambda self: None\nraise Silent",)


class _Exiting:
    def __reduce__(self):
        return exec, ("raise SystemExit(3)",)


def test_silent_errors_and_exits_in_peek_end_no_job_and_no_rank(prepared):
    from ddp_notebook.errors import DDPNotebookError

    def check_peek() -> None:
        with pytest.raises(DDPNotebookError, match=r"^ranks 0-1: Silent: <Silent.__str__ failed>$"):
            prepared.peek("fail()")
        with pytest.raises(DDPNotebookError, match="SystemExit: 3"):
            prepared.peek("__import__('sys').exit(3)")

    prepared.run(_FAILS, quiet=True)
    with job(prepared, "train(10_000, 0.01)") as running:
        check_peek()
        assert not running.done()
    check_peek()
    for name in ("silent", "ending"):
        with pytest.raises(DDPNotebookError, match=r"Silent.__str__ failed" if name == "silent" else "SystemExit: 3$"):
            prepared.pull(name)
    for value, error in ((_Ending(), r"Silent: <Silent.__str__ failed>"), (_Exiting(), "SystemExit: 3")):
        with pytest.raises(DDPNotebookError, match=error):
            prepared.push({"pushed": value})
    assert dict(prepared.peek("rank")) == {0: "0", 1: "1"}


def test_without_a_job_it_is_read_at_once(prepared):
    assert repr(prepared.peek("rank + 10")) == "[0] 10\n[1] 11"
    assert prepared.peek("torch.arange(1000.0)", ranks=0)[0] == (
        "tensor float32 (1000,) on cpu: min 0 mean 499.5 max 999"
    )
    assert prepared.peek("'x' * 5000", ranks=0)[0].endswith("... (5,002 characters)")


def test_the_size_of_a_large_value_is_told(prepared):
    from ddp_notebook.run import progress

    prepared.run("large = torch.ones(4_000_000)", quiet=True)
    with contextlib.redirect_stdout(io.StringIO()) as out, progress.shown("pulling:") as report:
        assert prepared.pull("large", report=report)[1].numel() == 4_000_000
    assert re.search(r"pulling:  large: 32 MB from 2 ranks in \d\.\d s\n$", out.getvalue())
    with contextlib.redirect_stdout(io.StringIO()) as out, progress.shown("pulling:") as report:
        prepared.pull("history", report=report)
    assert out.getvalue() == ""


def test_the_time_of_a_pull_is_that_which_a_user_waits(prepared):
    """Most of the time passes on the rank, which pickles and copies the value before it answers."""
    prepared.run(
        """
class Slow:
    def __reduce__(self):
        time.sleep(1)
        return bytes, (b"x" * 12_000_000,)
slow = Slow()
""",
        quiet=True,
    )
    told: list[str] = []
    prepared.pull("slow", ranks=0, report=told.append)
    found = re.fullmatch(r"slow: 12 MB in (\d+\.\d) s", told[-1])
    assert found and float(found[1]) >= 1.0, told


def test_pull_of_a_ddp_model_raises_an_error_with_the_inner_name(prepared):
    from ddp_notebook.errors import DDPNotebookError

    prepared.run("wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))", quiet=True)
    words = r"make sure to call init_process_group\. It needs the process group of the ranks.* %ddp_pull inner$"
    with pytest.raises(DDPNotebookError, match=words):
        prepared.pull("wrapped", ranks=0)
    prepared.run("inner = wrapped.module", quiet=True)
    assert prepared.pull("inner", ranks=0)[0].weight.shape == (2, 2)
