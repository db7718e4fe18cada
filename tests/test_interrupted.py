"""An interrupted command shows one line about its finished and unfinished parts."""

from __future__ import annotations

import inspect
import signal
import threading
import time
from concurrent.futures import Future
from contextlib import closing

import numpy as np
import pytest

import ddp_notebook
from ddp_notebook.errors import UsageError
from ddp_notebook.magics import DDPMagics
from ddp_notebook.observe.recording import Plots, Recording
from ddp_notebook.run import interrupted, progress
from ddp_notebook.run.features import load
from ddp_notebook.run.files.files import SessionFiles
from ddp_notebook.run.groups.ranks import SessionRanks
from ddp_notebook.run.interrupted import (
    OF_FILES,
    OF_FUNCTIONS,
    OF_JOB,
    OF_JOBS,
    OF_MAGICS,
    OF_PLOTS,
    OF_RANKS,
    OF_RECORDING,
    OF_SESSION,
    OF_TORCHRUN_JOB,
    OF_VALUES,
    tells_interrupt,
    tells_interrupts,
)
from ddp_notebook.run.jobs.job import Job
from ddp_notebook.run.jobs.jobs import Jobs
from ddp_notebook.run.values.values_by_rank import RankValues
from ddp_notebook.session import Session
from ddp_notebook.torchrun.job import TorchrunJob
from tests.conftest import wait_until
from tests.kernels import NotebookKernel

# Public names of `Session` that do not wait.
_AT_ONCE = {"backend", "is_running", "jobs", "world_size"}
# Public names of `Recording` that only look something up, or that the package itself calls.
_LOOKS_UP = {"clock_error_ns", "dropped", "follow", "group_of", "plot", "text"}
# Public functions that do not wait in the notebook: `log` and `survive` belong to cells on ranks.
_FUNCTIONS_AT_ONCE = {"current", "log", "survive"}
# Public classes whose methods do not wait: values in memory.
_VALUES = {"Agreement", "CellResult", "HostTable", "Memory", "Placements", "RecordOptions", "Report", "Status"}
_VALUES |= {"TensorPlacement", *("Client", "Keep", "Mpi", "Profile", "Slurm", "Ssh")}


def test_every_public_function_that_may_wait_has_a_sentence():
    members = {name: getattr(ddp_notebook, name) for name in ddp_notebook.__all__}
    functions = {name for name, member in members.items() if inspect.isfunction(member)}
    classes = {name: member for name, member in members.items() if isinstance(member, type)}
    errors = {name for name, member in classes.items() if issubclass(member, Exception)}

    assert functions - _FUNCTIONS_AT_ONCE == set(OF_FUNCTIONS) - {"load_ipython_extension"}
    assert all(hasattr(members[name], "__wrapped__") for name in functions - _FUNCTIONS_AT_ONCE)
    assert set(classes) - errors - _VALUES == {"RankValues", "Recording", "Session", "TorchrunJob"}, (
        "test its methods below"
    )


def test_every_magic_has_a_sentence():
    magics = {name for kind in DDPMagics.magics.values() for name in kind}

    assert magics == set(OF_MAGICS) | {name for feature in load().values() for name in feature.magics}


def test_every_command_of_a_session_has_a_sentence():
    assert public(Session) - _AT_ONCE == {name for name in OF_SESSION if not name.startswith("_")}


@pytest.mark.parametrize(
    ("cls", "at_once", "sentences"),
    [
        (Recording, _LOOKS_UP, OF_RECORDING),
        (Plots, set(), OF_PLOTS),
        (SessionRanks, {"epoch", "pids"}, OF_RANKS),
        (SessionFiles, set(), OF_FILES),
        (RankValues, {"get", "items", "keys", "values"}, OF_VALUES),
        (Jobs, {"close", "join", "start", "unended"}, OF_JOBS),
        (TorchrunJob, {"is_running", "round", "world_size"}, OF_TORCHRUN_JOB),
        (Job, {"on_begin", "press", "ranks", "seconds", "show_state", "waits", "work"}, OF_JOB),
    ],
)
def test_every_method_that_may_wait_has_a_sentence(cls, at_once, sentences):
    inherited = dir(Future) if issubclass(cls, Future) else ()
    own = {name for name in public(cls) if name in vars(cls) or name not in inherited}

    assert own - at_once == {name for name in sentences if not name.startswith("_")}
    members = {name: inspect.getattr_static(cls, name) for name in sentences}
    assert all(hasattr(getattr(one, "fget", one), "__wrapped__") for one in members.values())


def public(cls):
    """Return the public methods and properties of a class."""
    names = {name for name in dir(cls) if not name.startswith("_")}
    return {name for name in names if callable(getattr(cls, name)) or isinstance(getattr(cls, name), property)}


@pytest.mark.parametrize(
    "sentences",
    [OF_SESSION, OF_MAGICS, OF_RECORDING, OF_JOB, OF_JOBS, OF_TORCHRUN_JOB, OF_FUNCTIONS, OF_RANKS, OF_FILES, OF_PLOTS],
)
def test_a_sentence_is_one_line(sentences):
    for name, sentence in sentences.items():
        assert sentence.startswith("interrupted") and "\n" not in sentence and len(sentence) < 120, name


def test_an_error_in_a_magic_is_not_taken_for_a_wrong_argument(monkeypatch):
    def fail():
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("ddp_notebook.session_commands.of_session", fail)
    with pytest.raises(OSError, match="Read-only file system"):
        DDPMagics().ddp_resize("3")  # type: ignore[attr-defined]  # of a feature


def test_what_says_more_goes_through():
    @tells_interrupts({"first": "interrupted: first", "second": "interrupted: second"})
    class Commands:
        def first(self) -> None:
            raise KeyboardInterrupt

        def second(self) -> None:
            self.first()

    with pytest.raises(KeyboardInterrupt, match="interrupted: first"):
        Commands().second()
    assert list(inspect.signature(Commands.first).parameters) == ["self"]


@tells_interrupt("interrupted: nothing was read")
def read_an_index(error: type[Exception] | None = None):
    class Pressed:
        def __index__(self) -> int:
            signal.raise_signal(signal.SIGINT)
            return 0

    try:
        return np.arange(3)[Pressed()]
    except IndexError:
        raise (error or IndexError)("from NumPy") from None


def test_an_interrupt_that_numpy_replaces_is_an_interrupt():
    with pytest.raises(IndexError):
        read_an_index.__wrapped__()  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt, match="interrupted: nothing was read"):
        read_an_index()
    with pytest.raises(UsageError, match="from NumPy"):  # an error of this package has its own message
        read_an_index(UsageError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_press_after_the_command_has_failed_shows_one_line(monkeypatch):
    """A press can arrive while the arguments of the failed call are compared."""

    def press(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(interrupted, "wrong_argument", press)

    @tells_interrupt("interrupted: nothing was done")
    def work():
        raise ValueError

    with pytest.raises(KeyboardInterrupt, match="interrupted: nothing was done"):
        work()


def test_an_error_without_a_press_stays():
    @tells_interrupt("interrupted: nothing was done")
    def fails(index: int) -> int:
        return [1][index]

    with pytest.raises(KeyboardInterrupt):
        read_an_index()
    with pytest.raises(IndexError, match="list index out of range"):
        fails(7)


@pytest.mark.processes
def test_a_progress_line_pressed_early_leaves_no_thread(monkeypatch):
    class Pressed(threading.Thread):
        def start(self) -> None:
            super().start()
            raise KeyboardInterrupt

    monkeypatch.setattr("ddp_notebook.run.progress.threading.Thread", Pressed)
    with pytest.raises(KeyboardInterrupt), progress.shown("pulling:"):
        pass
    wait_until(lambda: "ddp-progress" not in {thread.name for thread in threading.enumerate()}, 5)


def test_a_handler_of_the_user_gets_the_press():
    got: list[int] = []

    @tells_interrupt("interrupted: nothing was done")
    def pressed() -> str:
        signal.raise_signal(signal.SIGINT)
        return "done"

    before = signal.signal(signal.SIGINT, lambda number, _: got.append(number))
    try:
        assert pressed() == "done" and got == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    with closing(NotebookKernel()) as kernel:
        folder = str(tmp_path_factory.mktemp("saved"))  # interrupted commands leave incomplete files there
        assert kernel.run(f"import os; os.chdir({folder!r})").status == "ok"
        assert kernel.run("%load_ext ddp_notebook\n%ddp_start 2").status == "ok"
        assert kernel.run("import ddp_notebook; session = ddp_notebook.current(); value = 5").status == "ok"
        yield kernel


# Sends the signal at the first call of that function of the package in the main thread.
_ARM = """
import signal, sys
def _signal(frame, event, arg):
    code = frame.f_code
    if event == "call" and code.co_name == {function!r} and code.co_filename.endswith({file!r}):
        sys.setprofile(None)
        signal.raise_signal(signal.SIGINT)
sys.setprofile(_signal)
"""


_INNER = {
    "%ddp_trace run.json": "the file is not complete",
    "session.recording.save('run.npz')": "the file is not complete",
    "session.recording.plot.loss()": "the figure is not complete",
    "session.recording.steps()": "nothing was read",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "file", "function"),
    [
        ("%ddp_check", "consistency/agreement.py", "_ask"),
        ("%ddp_status", "groups/rank_states.py", "status"),
        ("%ddp_report", "ddp_notebook/session.py", "report"),
        ("%ddp_diff", "compare/named.py", "compare_named"),
        ("session.recording.compare()", "compare/comparison.py", "compare_with"),
        ("%ddp_monitor", "ddp_notebook/session.py", "monitor"),
        ("%ddp_resize 3", "resize/resizing.py", "_inspect"),
        ("session.client", "launch/client.py", "get"),
        ("session.check()", "run/rank_requests.py", "ask_all"),
        ("%ddp_push value", "values/exchange.py", "_check_can_be_sent"),
        ("%ddp_push value", "values/exchange.py", "_push"),
        ("session.push(value=value)", "values/exchange.py", "push"),
        ("%ddp_pull rank", "values/exchange.py", "pull"),
        ("session['rank']", "values/exchange.py", "_pull"),
        ("%ddp_heal", "groups/healing.py", "_ask_all"),
        ("session.ranks.reform()", "groups/healing.py", "reform"),
        ("%on_all_ranks 1", "cells/cells.py", "run"),
        ("%%on_all_ranks\n1", "ddp_notebook/session.py", "run"),
        ("%ddp_interrupt", "cells/abandoned_cells.py", "end"),
        ("session.recording", "record/recordings.py", "now"),
        ("session.recording.steps()", "observe/recording.py", "steps"),
        ("session.recording.to_pandas()", "observe/recording.py", "to_pandas"),
        ("session.recording.report()", "run/rank_requests.py", "ask_for"),
        ("repr(session)", "ddp_notebook/session.py", "__repr__"),
        ("session.recording.plot.steps()", "observe/recording.py", "steps"),
        ("session.recording.save_html('page.html')", "still/saved_page.py", "save"),
        ("%ddp_trace run.json", "tables/recorded.py", "rows"),
        ("session.recording.save('run.npz')", "tables/saved.py", "save"),
        ("session.recording.plot.loss()", "tables/recorded.py", "_metrics_until"),
        ("%ddp_start 2", "launch/start_line.py", "read"),
        ("ddp_notebook.load('run.npz')", "observe/files.py", "load"),
        ("ddp_notebook.check(2)", "preflight/query.py", "ask_all"),
        ("ddp_notebook.start(2)", "launch/start_line.py", "with_defaults"),
        ("ddp_notebook.load_ipython_extension(get_ipython())", "ddp_notebook/magics.py", "load"),
        ("session.jobs.cancel()", "jobs/jobs.py", "unended"),
        ("repr(session.jobs)", "jobs/jobs.py", "__repr__"),
        ("repr(session.recording)", "tables/recorded.py", "__repr__"),
        ("session.pull('rank').plot()", "values/values_by_rank.py", "_array"),
        ("%ddp_stop", "session_commands.py", "stop"),
    ],
)
def test_an_interrupt_shows_one_line(notebook, line, file, function):
    notebook.run(_ARM.format(file=file, function=function))
    reply = notebook.run(line)
    armed = notebook.run("print(sys.getprofile() is not None); sys.setprofile(None)")

    assert armed.stdout == "False\n", f"{function} was not called"
    assert reply.ename == "KeyboardInterrupt", reply
    assert "interrupted" in reply.evalue, reply
    if line in _INNER:  # the line is about the called command, not about the read inside it
        assert _INNER[line] in reply.evalue, reply
    assert "\n" not in reply.traceback and len(reply.traceback) < 200, reply.traceback
    assert notebook.run("%on_all_ranks rank").stdout == "[0] 0\n[1] 1\n"


_LATE = [
    ("%ddp_resize 1", "resize/resizing.py", "_of_samplers", "the resize is complete: 1 rank now: rank 1 has left"),
    ("%ddp_resize 2", "resize/resizing.py", "_of_samplers", "the resize is complete: 2 ranks now: rank 1 is new"),
    ("%ddp_heal", "groups/recovery.py", "stopped_stores", "the healing is complete: no rank has died"),
    ("%ddp_interrupt", "cells/abandoned_cells.py", "_end_calls", "no cell is under way"),
]


def test_a_press_after_the_last_check_ends_the_cell(make_kernel):
    kernel = make_kernel()
    assert kernel.run("%load_ext ddp_notebook\n%ddp_start 2").status == "ok"
    for line, file, function, said in _LATE:
        kernel.run(_ARM.format(file=file, function=function))
        reply = kernel.run(f"{line}\nprint('the rest')")
        kernel.run("sys.setprofile(None)")

        assert reply.ename == "KeyboardInterrupt" and reply.stdout == "", reply
        assert reply.evalue.startswith(f"interrupted, but {said}"), reply
        assert "\n" not in reply.traceback, reply.traceback
    assert kernel.run("%on_all_ranks rank").stdout == "[0] 0\n[1] 1\n"


_SLEEPS = "[open(f'FOLDER/{rank}', 'w').close(), __import__('time').sleep(60)]"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"%ddp_memory {_SLEEPS}", "interrupted: the measurement is not complete; variables are kept"),
        (
            f"%ddp_verify ({_SLEEPS}, model(x).mean())[1] --batch x --model model",
            "interrupted: the step was not compared; models, gradients and variables are restored",
        ),
        (
            f"%%ddp_twice\nx += 1\n{_SLEEPS}",
            "the cell was stopped\n  ranks 0,1 were interrupted at cell line 2\n"
            "the variables of ranks 0,1 are those from before the cell",
        ),
    ],
    ids=["memory", "verify", "twice"],
)
def test_a_stop_of_the_cell_that_a_command_runs(notebook, tmp_path, line, said):
    notebook.run("%%on_all_ranks\nx = torch.ones(2, 3)\nmodel = torch.nn.Linear(3, 1)")
    message = notebook.start(line.replace("FOLDER", str(tmp_path)))
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 20)
    notebook.interrupt()
    reply = notebook.finish(message, 10)

    assert reply.traceback == f"KeyboardInterrupt: {said}", reply
    left = notebook.run("%on_all_ranks int(x.sum()), '_ddp_told' in globals()")
    assert left.stdout == "[0-1] (6, False)\n", left


@pytest.mark.processes
@pytest.mark.parametrize(
    ("file", "function", "said"),
    [
        ("wire/bulk.py", "pickled", "interrupted: nothing was sent, and the ranks continue"),
        ("values/transfers.py", "push", "interrupted: some or all ranks may have the variables; push again to set"),
    ],
)
def test_an_interrupted_push_says_if_anything_was_sent(notebook, file, function, said):
    notebook.run("several = list(range(100))\n" + _ARM.format(file=file, function=function))
    reply = notebook.run("%ddp_push value several")
    notebook.run("sys.setprofile(None)")

    assert reply.evalue.startswith(said), reply


@pytest.mark.processes
@pytest.mark.parametrize("line", ["%%local", "%%on_all_ranks --here"])
def test_a_stop_of_a_cell_in_the_notebook_shows_one_line(notebook, line):
    code = "if 'session' in globals():  # not on the ranks\n    print('begun')\n    while True: pass"
    message = notebook.start(f"{line}\n{code}")
    wait_until(lambda: "begun" in str(notebook.client.get_iopub_msg(timeout=5)["content"].get("text", "")))
    notebook.interrupt()
    reply = notebook.finish(message, 10)

    assert reply.ename == "KeyboardInterrupt" and reply.evalue.startswith("interrupted"), reply


@pytest.mark.processes
@pytest.mark.parametrize("line", ["job.result()", "job.exception()"])
def test_an_interrupted_wait_for_a_job_shows_one_line(notebook, line):
    assert notebook.run("job = session.submit('import time; time.sleep(30)')").status == "ok"
    message = notebook.start(f"print('waits')\n{line}")
    wait_until(lambda: notebook.client.get_iopub_msg(timeout=5)["msg_type"] == "stream")
    notebook.interrupt()
    reply = notebook.finish(message, 10)

    assert reply.evalue.startswith("interrupted: the job continues"), reply
    assert "\n" not in reply.traceback and len(reply.traceback) < 200, reply.traceback
    assert notebook.run("print(job.done()); job.cancel()").stdout == "False\n"


@pytest.mark.processes
@pytest.mark.parametrize("delay_s", [0.05, 0.1, 0.15])
def test_a_loop_that_reads_the_recording_shows_one_line(notebook, delay_s):
    message = notebook.start("print('begun')\nwhile True: session.recording.steps(), session.recording.waits()")
    wait_until(lambda: notebook.client.get_iopub_msg(timeout=5)["msg_type"] == "stream")
    time.sleep(delay_s)
    notebook.interrupt()
    reply = notebook.finish(message, 10)

    assert reply.ename == "KeyboardInterrupt"
    assert "ddp_notebook/" not in reply.traceback, reply.traceback
