"""The tasks of a session, whatever has started them."""

from __future__ import annotations

import os
import queue
from typing import Any

from ddp_notebook.launch.starters.base import Starter
from ddp_notebook.launch.starters.tasks import Tasks
from ddp_notebook.launch.ways.base import LOOPBACK
from ddp_notebook.launch.ways.called import Called
from ddp_notebook.wire.events import Arrived


class _Noted(Starter):
    """Starts nothing, and leaves a file where it is ended."""

    words, address = "nothing", LOOPBACK

    def __init__(self, file) -> None:
        self._file = file

    def start(self, command, env) -> None: ...

    def trouble(self, *, now: bool = False) -> str:
        return ""

    def end(self) -> None:
        self._file.touch()


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


def test_the_end_of_a_host_is_told_though_its_launcher_fails():
    def why() -> str:
        raise RuntimeError("no such job")

    arrived = Arrived(host="a", address=LOOPBACK, pid=1, task=0, tasks=1)
    wire: Any = None
    way = Called("a", arrived, "a-1", queue.SimpleQueue(), wire, 30.0, why)
    try:
        assert way.how_it_ended() == "the host server on a ended"
    finally:
        way.sweep([])
