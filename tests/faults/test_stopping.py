"""Some rows of `stopping.TABLE`: a process of a session is stopped. `tests/long` runs all of them."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing

import psutil
import pytest

from tests import conftest
from tests.conftest import wait_until
from tests.faults.holding import held
from tests.faults.stopping import NAMED_S, SLEEP, Stopping

pytestmark = pytest.mark.alone  # each message has a time limit

# Checked after the module, not after each test: a replaced store stays until the module ends.
nothing_is_left = pytest.fixture(scope="module", autouse=True)(conftest.nothing_is_left.__wrapped__)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def notebook():
    with closing(Stopping()) as made:
        yield made


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("rank", "status"),
        ("rank", "heal"),
        ("rank", "check"),
        ("rank", "call by client"),
        pytest.param("rank", "memory", marks=pytest.mark.long),
        ("store", "heal"),
        ("store", "stop"),
        ("host server", "running"),
        ("controller", "client"),
    ],
)
def test_a_stopped_process_is_named_and_comes_back(notebook, name, where):
    notebook.play(name, where)


def test_a_group_forms_after_a_stop_ended_a_stopped_store(notebook):
    notebook.play("store", "group")
    reply = notebook.kernel.run("%%on_all_ranks\nprint(dist.get_world_size(dist.new_group([0, 1])))")
    assert reply.stdout == "[0-1] 2\n", reply


@pytest.mark.long
def test_a_rank_that_is_stopped_during_a_command_is_named(notebook):
    """The command's own cell shows no output and no card."""
    pid = notebook.pid("rank")
    message = notebook.kernel.start("%ddp_memory [__import__('time').sleep(0.1) for _ in range(100)]")
    time.sleep(0.5)
    with notebook.stopped(pid):
        notebook.expect(rf"rank 1: its process {pid} is stopped; kill -CONT {pid}", NAMED_S)
        notebook.end(message)
    notebook.check_comes_back()


@pytest.mark.long
def test_a_stopped_rank_that_runs_no_part_of_the_cell_is_named(notebook):
    pid = notebook.pid("rank")
    with notebook.stopped(pid):
        message = notebook.kernel.start("%%on_ranks 0\nimport time\nfor _ in range(600): time.sleep(0.1)")
        notebook.expect(rf"rank 1: its process {pid} is stopped; kill -CONT {pid}", NAMED_S)
        notebook.end(message)
    notebook.check_comes_back()


@pytest.mark.long
def test_one_interrupt_returns_the_prompt_if_a_rank_is_stopped(notebook):
    notebook.play("rank", "stop")


def test_a_stopped_watchdog_is_continued_and_a_dead_one_replaced(notebook):
    first = notebook.pid("watchdog")
    os.kill(first, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(first).status() != psutil.STATUS_STOPPED, what="it goes on")
    server = psutil.Process(notebook.pid("host server"))
    before = {child.pid for child in server.children()}
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: {child.pid for child in server.children()} - before, what="another one is there")

    second = notebook.pid("watchdog")
    said = notebook.kernel.run("%on_all_ranks rank").stderr

    assert f"the watchdog of the host server (process {first})" in said and "was stopped" in said, said
    assert f"(process {second})" in said and "replaces one that had ended" in said, said


def test_healing_right_after_a_death_replaces_the_rank(notebook):
    """The end of a rank is reported some milliseconds after the signal."""
    pid = notebook.pid("rank")
    reply = notebook.kernel.run(f"import os, signal\nos.kill({pid}, signal.SIGKILL)\n%ddp_heal --from 0 kept")

    assert "rank 1 was replaced" in reply.stdout, reply
    assert "[0-1] 10\n" in notebook.kernel.run("%on_all_ranks kept").stdout
    notebook.kernel.run("%%on_all_ranks\nkept = 10 + rank")
    notebook.check_comes_back()


def test_a_rank_that_a_debugger_holds_is_named(notebook):
    notebook.play_held("rank", "%ddp_heal")


def test_a_host_server_that_a_debugger_holds_is_named(notebook):
    notebook.play_held("host server", "%ddp_status")


def test_a_rank_whose_interpreter_is_held_is_named_in_time(notebook):
    message = notebook.kernel.start(
        "%%on_all_ranks\nfrom tests.faults import on_rank\nif rank == 1: on_rank.hold_interpreter(5)"
    )
    began = time.monotonic()
    notebook.expect(r"rank 1: no answer: .*on_rank.py:\d+ in hold_interpreter, in one long call", 4.0)
    assert time.monotonic() - began < 4.0
    assert notebook.kernel.finish(message).status == "ok"


_END_A_THREAD = """
import ctypes, threading, time
[thread] = [one for one in threading.enumerate() if one.name == {name!r}]
ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp-wire", "ddp-host"])
def test_a_thread_of_the_notebook_that_has_ended_is_named(make_kernel, name):
    kernel = make_kernel()
    assert kernel.run("%load_ext ddp_notebook\n%ddp_start 2").status == "ok"
    kernel.run(_END_A_THREAD.format(name=name))
    kernel.run("session = __import__('ddp_notebook').current(); session._hosts.all[0].ask('ping')")
    kernel.run("thread.join(5); assert not thread.is_alive()")

    reply = kernel.run("%ddp_status")
    assert f"this notebook's thread {name}, which" in reply.stdout and "%ddp_restart" in reply.stdout, reply
    assert kernel.run("%ddp_restart").status == "ok"
    assert kernel.run("%on_all_ranks rank").stdout == "[0] 0\n[1] 1\n"


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp-wire", "ddp-host"])
def test_a_thread_of_the_notebook_that_a_debugger_holds_is_named(notebook, name):
    """Its host server and its ranks answer, so they are not blamed."""
    threads = "import threading; print(*[one.native_id for one in threading.enumerate() if one.name == {name!r}])"
    thread = int(notebook.kernel.run(threads.format(name=name)).stdout)
    for line in (SLEEP, "%ddp_status"):
        with held([thread]) as debugger:
            message = notebook.kernel.start(line)
            shown = notebook.expect(
                rf"the thread {name} of process {notebook.kernel.pid}, which .* has not run .*"
                rf"thread {thread} of its process {notebook.kernel.pid} is held .*process {debugger}\)",
                NAMED_S + 0.5,
            )
            reply = notebook.end(message)
        assert "in one long call" not in shown + reply.traceback and "did not answer" not in shown, reply
    notebook.check_comes_back()
