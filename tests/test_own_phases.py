"""Code of this package is not shown as a place of the user's program, however long it takes."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

import ddp_notebook
from ddp_notebook.errors import RankError
from ddp_notebook.run.groups.probe import describe_silence
from tests.conftest import wait_until

OWN_FILES = {path.name for path in Path(ddp_notebook.__file__).parent.rglob("*.py")} - {"__init__.py", "__main__.py"}
SLOW = '''
import types
from ddp_notebook.rank.cell import isolation, runner as runner_module
from ddp_notebook.rank.engine import RankEngine
from ddp_notebook.rank.variables import values
of_rank = RankEngine.instance()._rank
of_cells = of_rank.runner
def slow(wait, then=lambda *_, **__: None):
    """Make a function of the package that is slow. Its frames are in a file of the package."""
    names = {"then": then, "time": __import__("time")}
    code = f"def work(*args, **named):\\n    {wait}\\n    return then(*args, **named)"
    exec(compile(code, isolation.__file__, "exec"), names)
    return names["work"]
'''
SLEEPS, HOLDS = "time.sleep(1.5)", "sum(range(10**8))"  # the second one lets no other thread run
PREPARING, CLEANING = "preparing the cell", "cleaning up after the cell"
PHASES = {  # change of the rank -> what the rank is shown to do
    "a hook before the cell": ("of_cells._hooks.cell_begins.insert(0, slow({wait}))", PREPARING),
    "a change of the code": ("of_cells._hooks.cell_code.insert(0, slow({wait}, lambda code: code))", PREPARING),
    "a hook after the cell": ("of_cells._hooks.cell_ends.append(('recording', slow({wait})))", CLEANING),
    "tensors that are dropped": ("isolation.forget_tensors = slow({wait})", CLEANING),
    "the groups after the cell": (
        "of_cells._network.end_cell = slow({wait}, of_cells._network.end_cell)",
        CLEANING,
    ),
    "the last output": ("of_cells._outgoing.flush = slow({wait}, of_cells._outgoing.flush)", "sending its output"),
    "a comparison": (
        "of_cells._network.recorder.guard = slow({wait}, of_cells._network.recorder.guard)",
        "cell line 2",
    ),
}


def shows_own_code(text: str) -> bool:
    """Return whether a text names a line of this package."""
    return any(name in OWN_FILES for name in re.findall(r"(\w+\.py):\d+", text))


def sample(session, job) -> set[str]:
    """Return everything that rank 1 is shown to do until a job ends."""
    seen = set()
    while not job.done():
        if (run := session._cells.under_way) is not None:
            seen.add(session._cells.inspect(run)[1].doing)
        seen |= {row.state for row in session.status().rows if row.rank == 1}
    return seen


@pytest.mark.parametrize(
    ("name", "wait"),
    [
        pytest.param(name, wait, marks=() if (name, wait) == ("tensors that are dropped", HOLDS) else pytest.mark.long)
        for name in PHASES
        for wait in (SLEEPS, HOLDS)
    ],
)
def test_a_slow_phase_is_named_and_has_no_place(make_session_alone, name, wait):
    session = make_session_alone(2)
    session.run(SLOW, quiet=True)
    change, shown = PHASES[name]
    session.run(change.format(wait=repr(wait)), ranks=1, quiet=True)
    seen = sample(session, session.submit("x = torch.ones(3)\ndist.all_reduce(x)", quiet=True))
    assert [text for text in seen if shows_own_code(text)] == []
    assert any(shown in text for text in seen), seen


def press_stop(session, after_s: float) -> None:
    """Press stop some time after the start of the next cell."""

    def press() -> None:
        wait_until(lambda: session._cells.watched is not None, 20)
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()


def pids(session) -> list[int]:
    return [row.pid for row in session.status().rows]


@pytest.mark.long
def test_stops_during_the_clean_up_replace_no_rank(make_session, capsys):
    """Both presses come while rank 1 cleans up. The second one replaces ranks that do not end their cell."""
    session = make_session(2)
    session.run(SLOW, quiet=True)
    session.run(f"kept = 7; isolation.forget_tensors = slow({'time.sleep(4)'!r})", ranks=1, quiet=True)
    before = pids(session)
    press_stop(session, 0.5)
    press_stop(session, 2.0)
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        session.run("pass")
    assert time.monotonic() - began_s < 6
    assert "replace" not in capsys.readouterr().err
    wait_until(lambda: not session._cells.busy, 10)
    assert pids(session) == before and session.run("kept", ranks=1)[1].result == "7"


@pytest.mark.long
def test_garbage_is_collected_after_the_end_of_a_failed_cell(make_session):
    """A collection takes seconds with large libraries. It neither delays the result nor looks like a hang."""
    session = make_session(2)
    session.run(SLOW + "class Kept: pass\n", quiet=True)
    session.run(f"runner_module.gc = types.SimpleNamespace(collect=slow({'sum(range(10**8))'!r}))", ranks=1, quiet=True)
    began_s = time.monotonic()
    with pytest.raises(RankError):
        session.run("1 / 0")
    took_s = time.monotonic() - began_s
    seen = set()

    def next_cell() -> None:
        session.run("pass", quiet=True)

    job = threading.Thread(target=next_cell)
    began_s = time.monotonic()
    job.start()
    while job.is_alive():
        if (run := session._cells.under_way) is not None:
            seen.add(session._cells.inspect(run)[1].doing)
    assert took_s < time.monotonic() - began_s, "the next cell waits for the collection, and not the failed one"
    assert CLEANING in seen and not any(map(shows_own_code, seen)), seen


def test_the_variables_of_a_failed_function_are_released(make_session):
    session = make_session(2)
    session.run(
        "import gc, types, weakref\nfrom ddp_notebook.rank.cell import runner\n"
        "runner.gc = types.SimpleNamespace(collect=int)\nclass Large: pass\n"
        "def work():\n    global seen\n    large = Large(); seen = weakref.ref(large)\n    1 / 0"
    )
    with pytest.raises(RankError, match="ZeroDivisionError"):
        session.run("gc.disable(); work()")
    assert session.run("runner.gc = gc; gc.enable(); seen()")[0].result is None


_MAIN = 'Current thread 0x1 (most recent call first):\n{}  File "<string>", line 1 in <module>\n'
_FRAME = '  File "/opt/site/ddp_notebook/{}", line 12 in {}\n'


def test_frames_of_the_package_are_no_place():
    cleaning = _FRAME.format("rank/cell/isolation.py", "forget_failure") + _FRAME.format(
        "rank/cell/internal_phases.py", "clean_up"
    )
    assert describe_silence(_MAIN.format(cleaning)) == CLEANING
    user = '  File "/home/me/data.py", line 3 in __del__\n'
    assert describe_silence(_MAIN.format(user + cleaning)).startswith("data.py:3 in __del__, in one long call")
    agent = "Thread 0x2 (most recent call first):\n{}" + _FRAME.format("wire/endpoint.py", "_loop") + "\n"
    idle = agent.format('  File "/usr/lib/python3.11/site-packages/zmq/sugar/poll.py", line 3 in poll\n')
    assert describe_silence(idle + _MAIN.format(_FRAME.format("rank/process.py", "_form"))) == ""
    blocked = agent.format(_FRAME.format("wire/bulk.py", "handle")) + _MAIN.format("")
    assert describe_silence(blocked) == "its thread ddp-agent, which answers, is blocked"
    foreign = agent.format('  File "/home/me/fake_time.py", line 4 in sleep\n') + _MAIN.format("")
    assert describe_silence(foreign) == "its thread ddp-agent, which answers, is blocked at fake_time.py:4"
