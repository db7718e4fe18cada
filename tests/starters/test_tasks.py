"""The tasks of a session, with any starter."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from typing import Any

import pytest

from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.starters.starter import Starter
from ddp_notebook.launch.starters.tasks import Tasks
from ddp_notebook.launch.transports.base import LOOPBACK
from ddp_notebook.launch.transports.callback import OutpostConnection
from ddp_notebook.messages.outposts import Arrived


class _Noted(Starter):
    """Starts nothing, and creates a file when it is ended."""

    words, address = "nothing", LOOPBACK

    def __init__(self, file) -> None:
        self._file = file

    def start(self, command, env) -> None: ...

    def trouble(self, *, now: bool = False) -> str:
        return ""

    def end(self) -> None:
        self._file.touch()


class _Outposts(Starter):
    """Starts tasks on this machine, each after the previous one has connected. Tasks do not know their number."""

    words, address = "outposts", LOOPBACK

    def __init__(self, count, tasks=None) -> None:
        self.tasks = tasks
        self._count = count
        self.processes: list[subprocess.Popen[str]] = []
        self.has_called = threading.Semaphore()

    def start(self, command, env) -> None:
        self._line, self._env = command, {**os.environ, **env}
        threading.Thread(target=lambda: [self.start_one() for _ in range(self._count)], daemon=True).start()

    def start_one(self) -> subprocess.Popen[str]:
        self.has_called.acquire()
        one = subprocess.Popen(self._line, env=self._env, text=True, stderr=subprocess.PIPE, start_new_session=True)
        self.processes.append(one)
        return one

    def trouble(self, *, now: bool = False) -> str:
        return ""

    def end(self) -> None:
        for one in self.processes:
            one.communicate(timeout=30)


def tasks_of(starter) -> Tasks:
    """Return tasks whose next one starts when one has connected."""
    tasks = Tasks(starter, None, {}, lease_s=30)
    arrivals, told = tasks._arrivals, tasks._arrivals._on_message

    def on_message(peer, epoch, message):
        told(peer, epoch, message)
        if isinstance(message, Arrived):
            starter.has_called.release()

    arrivals._wire._receive = on_message
    return tasks


@pytest.mark.long
def test_a_task_that_calls_when_all_have_is_told_and_ends():
    starter = _Outposts(1, tasks=1)
    tasks = tasks_of(starter)
    try:
        [way] = tasks.wait(60, lambda: None, lambda _: None)
        late = starter.start_one()
        _, words = late.communicate(timeout=30)
        assert late.returncode == 0
        assert words.endswith(f"{way._arrived.host}: the start has ended without this task\n")
        assert starter.processes[0].poll() is None, "the others stay"
        assert len(tasks._arrivals._arrived) == 1
        Host(way).close()
    finally:
        tasks.end()


@pytest.mark.long
def test_with_an_unknown_number_of_tasks_later_tasks_are_found():
    starter = _Outposts(2)
    tasks = tasks_of(starter)
    try:
        ways = tasks.wait(60, lambda: None, lambda _: None)
        assert len(ways) == 2
        for way in ways:
            Host(way).close()
    finally:
        tasks.end()


@pytest.mark.processes
def test_a_forked_child_of_the_notebook_ends_no_job(tmp_path):
    ended = tmp_path / "ended"
    tasks = Tasks(_Noted(ended), None, {}, lease_s=30)
    try:
        child = os.fork()
        if child == 0:
            tasks._at_exit()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0 and not ended.exists()
        tasks._at_exit()
        assert ended.exists()
    finally:
        tasks.end()


@pytest.mark.processes
def test_the_end_of_a_host_is_told_though_its_launcher_fails():
    def why() -> str:
        raise RuntimeError("no such job")

    arrived = Arrived(host="a", address=LOOPBACK, pid=1, task=0, tasks=1)
    wire: Any = None
    way = OutpostConnection("a", arrived, "a-1", queue.SimpleQueue(), wire, 30.0, why)
    try:
        assert way.how_it_ended() == "the host server on a ended"
        assert way.how_it_ended("it has sent nothing") == "it has sent nothing"
        way._why = lambda: "Slurm job 42 has reached its time limit"
        words = "it has sent nothing for 30 s"
        assert way.how_it_ended(words) == f"{words}: Slurm job 42 has reached its time limit"
    finally:
        way.sweep([])
