"""Processes by id and start time: hidden ones are found, and those that ignore signals are ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from ddp_notebook.launch.processes import TOKEN_VARIABLE, descendants, end, identity, is_running, relatives, wait_gone
from tests.conftest import wait_until

ROOT = Path(__file__).parents[1]
PRELUDE = "import os, signal, sys; from ddp_notebook.launch import processes; "


class Child(subprocess.Popen[str]):
    """A child process whose output is read."""

    stdout: IO[str]


@contextlib.contextmanager
def child(*command: str, **options) -> Iterator[Child]:
    """Start a child of this process, and end it and its descendants afterwards."""
    started = Child(command, stdout=subprocess.PIPE, cwd=ROOT, text=True, **options)
    try:
        yield started
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(started.pid).children(recursive=True):
                process.kill()
        started.kill()
        started.wait()
        started.stdout.close()


def sleeper(**options) -> contextlib.AbstractContextManager[Child]:
    return child("sleep", "60", **options)


def python(code: str, **options) -> contextlib.AbstractContextManager[Child]:
    return child(sys.executable, "-c", PRELUDE + code, **options)


# ---- identity


@pytest.mark.processes
def test_a_process_is_known_until_it_ends():
    with sleeper() as started:
        who = identity(started.pid)
        assert who == identity(started.pid)
        assert is_running(who)

        started.kill()
        wait_until(lambda: psutil.Process(started.pid).status() == psutil.STATUS_ZOMBIE)
        assert not is_running(who), "nobody has waited for it yet, and it runs no more"
        started.wait()
        assert not is_running(who)
        with pytest.raises(ProcessLookupError, match=f"^no process {started.pid}$"):
            identity(started.pid)


@pytest.mark.processes
def test_another_process_with_the_same_id_is_a_stranger():
    with sleeper() as started:
        pid, start = identity(started.pid)

        assert not is_running((pid, start - 1))
        assert not is_running((pid, start + 1))


@pytest.mark.processes
def test_two_processes_agree_on_who_a_third_one_is():
    with python("print(processes.identity(os.getppid()))") as started:
        assert started.stdout.readline().strip() == repr(identity(os.getpid()))


@pytest.mark.processes
def test_the_name_of_a_command_may_be_anything(tmp_path):
    program = tmp_path / "a) Z 1 ("
    shutil.copy(shutil.which("sleep") or "", program)
    with child(str(program), "60") as started:
        wait_until(lambda: psutil.Process(started.pid).name() == program.name)
        pid, start = identity(started.pid)

        assert start > 0
        assert is_running((pid, start))


# ---- relatives


@pytest.mark.processes
def test_descendants_are_the_process_and_all_below():
    with child("sh", "-c", "sleep 60 & sleep 60 & wait") as started:
        wait_until(lambda: [one.name() for one in descendants(started.pid)] == ["sh", "sleep", "sleep"])
        family = descendants(started.pid)

        assert family[0].pid == started.pid
        assert end(family) == []
    assert descendants(started.pid) == []


@pytest.mark.processes
def test_an_orphan_is_found_by_its_token_in_another_os_session():
    token = uuid.uuid4().hex
    leave_an_orphan = "(setsid sleep 60 >&- &)"
    with child("sh", "-c", leave_an_orphan, env={**os.environ, TOKEN_VARIABLE: token}) as started:
        started.wait()
        wait_until(lambda: [process.name() for process in relatives(token, [])] == ["sleep"])
        (orphan,) = relatives(token, [])

        assert orphan.ppid() != os.getpid()
        assert os.getsid(orphan.pid) not in (os.getsid(0), started.pid)
        assert relatives(uuid.uuid4().hex, []) == []
        assert end([orphan]) == []
    assert relatives(token, []) == []


@pytest.mark.processes
def test_an_orphan_without_environment_is_found_by_its_session():
    token = uuid.uuid4().hex
    leave_an_orphan = "(env -i sleep 60 >&- &)"
    with child(
        "sh", "-c", leave_an_orphan, env={**os.environ, TOKEN_VARIABLE: token}, start_new_session=True
    ) as started:
        started.wait()
        wait_until(lambda: [process.name() for process in relatives(token, [started.pid])] == ["sleep"])
        found = relatives("", [started.pid])

        assert [process.name() for process in found] == ["sleep"]
        assert relatives(token, []) == []
        assert end(found) == []


def test_without_a_token_and_leaders_nobody_is_a_relative():
    assert relatives("", []) == []


# ---- the end


@pytest.mark.processes
def test_a_process_that_ends_when_it_is_asked_to_is_not_killed():
    with python(
        "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'bye'), os._exit(0)));"
        "print('ready', flush=True); signal.pause()"
    ) as started:
        started.stdout.readline()

        assert end([psutil.Process(started.pid)], grace_s=5.0) == []
        assert started.stdout.read() == "bye"


@pytest.mark.processes
def test_a_process_that_ignores_sigterm_is_killed_after_grace_s():
    with child("sh", "-c", "trap '' TERM; echo ready; exec sleep 60") as started:
        started.stdout.readline()
        began = time.monotonic()

        assert end([psutil.Process(started.pid)], grace_s=0.2) == []
        assert 0.2 <= time.monotonic() - began < 2
        assert not psutil.pid_exists(started.pid)


@pytest.mark.processes
def test_without_grace_nobody_is_asked():
    with python(
        "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'asked'));"
        "print('ready', flush=True)\nwhile True: signal.pause()"
    ) as started:
        started.stdout.readline()

        assert end([psutil.Process(started.pid)]) == []
        assert started.stdout.read() == ""


@pytest.mark.processes
def test_a_stopped_process_ends_too():
    with sleeper() as started:
        os.kill(started.pid, signal.SIGSTOP)

        assert end([psutil.Process(started.pid)], grace_s=0.05) == []


@pytest.mark.processes
def test_who_is_gone_already_is_no_failure():
    with sleeper() as started:
        process = psutil.Process(started.pid)
        started.kill()
        started.wait()

        assert end([process], grace_s=1.0) == []


@pytest.mark.processes
def test_who_still_runs_is_told():
    with sleeper() as first, sleeper() as second:
        first.kill()

        left = wait_gone([psutil.Process(first.pid), psutil.Process(second.pid)], timeout_s=0.1)

        assert [process.pid for process in left] == [second.pid]


# ---- parents


@pytest.mark.processes
def test_a_process_dies_with_its_parent():
    with python(
        "parent = os.getpid()\n"
        "if os.fork() == 0: processes.die_with_parent(parent); print(os.getpid(), flush=True)\n"
        "signal.pause()"
    ) as parent:
        grandchild = psutil.Process(int(parent.stdout.readline()))
        assert grandchild.ppid() == parent.pid

        parent.kill()

        assert parent.stdout.read() == "", "its end of the pipe is closed too"
        assert wait_gone([grandchild], 5.0) == []


@pytest.mark.processes
def test_a_process_whose_parent_has_ended_meanwhile_ends_itself():
    with python("processes.die_with_parent(os.getppid() + 1); print('still here')") as started:
        assert started.wait() == 1
        assert started.stdout.read() == ""


@pytest.mark.processes
def test_orphans_are_adopted():
    with python(
        "processes.adopt_orphans()\n"
        "if os.fork() == 0:\n"
        "    if os.fork() == 0: print(os.getpid(), flush=True); signal.pause()\n"
        "    os._exit(0)\n"
        "os.wait(); print('ready', flush=True); signal.pause()"
    ) as adopter:
        lines = sorted([adopter.stdout.readline(), adopter.stdout.readline()])
        assert lines[1] == "ready\n"

        assert psutil.Process(int(lines[0])).ppid() == adopter.pid
        assert end(descendants(adopter.pid)) == []
