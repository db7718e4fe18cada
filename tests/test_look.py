"""Inspection of a process that cannot answer, from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from ddp_notebook.launch.host.process_state import ProcessInspector, stack_file
from ddp_notebook.messages.hosts import LookReply, Seen
from ddp_notebook.wire.signals import STACK
from tests.conftest import wait_until

PROCESS = """
import faulthandler, sys
faulthandler.register({number}, file=open({file!r}, "a"), all_threads=True)
def work():
    print("ready", flush=True)
    sum(range(10**12))
work()
"""


@pytest.fixture
def busy(tmp_path):
    """Start a process that holds the GIL in one long call; its number is 7."""
    code = PROCESS.format(number=int(STACK or signal.SIGUSR1), file=stack_file(str(tmp_path), 7))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        yield started
        started.kill()


def finish(look: ProcessInspector) -> float:
    """Poll until the inspection is done. Return the duration in seconds."""
    began = time.monotonic()
    wait_until(look.is_done)
    return time.monotonic() - began


@pytest.mark.processes
@pytest.mark.skipif(STACK is None, reason="this system has no real-time signals")
def test_a_stack_is_written_without_the_gil_and_not_repeated(busy, tmp_path):
    for _ in range(2):
        look = ProcessInspector({7: busy.pid}, str(tmp_path))
        finish(look)

        assert not look.seen[7].is_stopped
        assert look.seen[7].stack.count("in work") == 1
        assert look.advance() == LookReply(seen={7: Seen(False, look.seen[7].stack)})


@pytest.mark.processes
def test_a_stopped_process_is_told_at_once(busy, tmp_path):
    os.kill(busy.pid, signal.SIGSTOP)
    wait_until(lambda: ProcessInspector({7: busy.pid}, str(tmp_path)).seen[7].is_stopped)
    look = ProcessInspector({7: busy.pid}, str(tmp_path))

    assert finish(look) < 0.2
    assert look.seen[7] == (True, "")


@pytest.mark.processes
def test_a_process_without_a_stack_file_gets_no_signal(tmp_path):
    """The signal would end it: the store, or a rank that has not started."""
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        look = ProcessInspector({7: sleeper.pid, 8: 2**22 + 1}, str(tmp_path))  # and one that has ended

        assert finish(look) < 0.2
        assert look.seen == {7: (False, ""), 8: (False, "")}
        assert sleeper.poll() is None
        sleeper.kill()
