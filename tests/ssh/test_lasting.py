"""A stream that survives the end of its connection, and an ssh session in it."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest

import ddp_notebook
from ddp_notebook.errors import StartError
from ddp_notebook.launch.transports.reconnecting import LastingStream
from ddp_notebook.registry import entries
from tests.conftest import wait_until
from tests.keep.conftest import notebook, runtime  # noqa: F401  # fixtures
from tests.ssh import namespaces, sshd


class Ends:
    """Two sides of a stream, and the data that each has received."""

    def __init__(self) -> None:
        self.inner = [socket.socketpair() for _ in range(2)]
        self.streams = [LastingStream(theirs.fileno(), theirs.fileno()) for _, theirs in self.inner]
        self.got = [bytearray(), bytearray()]
        self._number = -1
        self._sockets = [one for pair in self.inner for one in pair]
        self._threads: list[threading.Thread] = []
        for side in (0, 1):
            self._start(self._read, side)

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):  # it may be closed already
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for one in self._sockets:
            one.close()

    def _start(self, target: Callable[..., object], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _read(self, side: int) -> None:
        while data := self.inner[side][0].recv(1 << 16):
            self.got[side] += data

    def give(self, side: int, data: bytes) -> None:
        """Send data in a thread, because the stream may block."""
        self._start(self.inner[side][0].sendall, data)

    @property
    def count(self) -> int:
        """Return the number of received bytes of both sides."""
        return len(self.got[0]) + len(self.got[1])

    def wait_for(self, count: int) -> None:
        wait_until(lambda: self.count >= count, 20)

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """Start a connection that carries the stream from now on. Shutting down either end cuts it."""
        self._number += 2
        ends = socket.socketpair()
        self._sockets += ends
        for stream, end in zip(self.streams, ends, strict=True):
            self._start(stream.carry, end.fileno(), end.fileno(), self._number)
        return ends


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_cuts_lose_nothing_and_double_nothing(seed):
    drawn = random.Random(seed)
    data = [drawn.randbytes(60_000_000), drawn.randbytes(40_000_000)]
    all_of_it = len(data[0]) + len(data[1])
    cuts = 0
    with Ends() as both:
        for side in (0, 1):
            both.give(side, data[side])
        while both.count < all_of_it:
            ends = both.connect()
            both.wait_for(min(both.count + drawn.randrange(10_000_000), all_of_it))
            drawn.choice(ends).shutdown(socket.SHUT_RDWR)
            cuts += 1
        assert [bytes(got) for got in both.got] == [data[1], data[0]]
        assert cuts > 3

        both.connect()
        both.inner[0][0].shutdown(socket.SHUT_WR)
        assert both.streams[1].ended.wait(10), "the other side hears of the end"


def carriers() -> list[psutil.Process]:
    """Return the processes of the connections that carry streams."""
    return [one for one in psutil.process_iter() if _is_carrier(one)]


def _is_carrier(process: psutil.Process) -> bool:
    try:
        line = process.cmdline()
    except psutil.Error:
        return False
    return line[:1] == ["ssh"] and "reconnecting import main" in line[-1]


STEPS = """import time
for step in range(40):
    dist.all_reduce(torch.ones(1)); print('step', step); time.sleep(0.1)
"""


@pytest.mark.long
def test_a_kept_session_goes_on_through_connections_that_end(ssh, python, notebook):  # noqa: F811
    kernel = notebook(f"%ddp_start --hosts one:2 --python {python} --keep 1")
    pids = kernel.run("import ddp_notebook; ddp_notebook.current().ranks.pids()").displays[0]["text/plain"]
    running = kernel.start(f"%%on_all_ranks\n{STEPS}")
    said = ""
    for step in (5, 15):
        said += kernel.wait_for_text(f"step {step}")
        [carrier] = carriers()
        carrier.kill()
        wait_until(lambda: len(carriers()) == 1 and carriers() != [carrier], 10, "it is dialled again")  # noqa: B023
    done = kernel.finish(running)
    assert done.status == "ok", done.traceback
    for rank in "01":
        found = re.findall(rf"^\[(?:0-1|{rank})\] step (\d+)$", said + done.stdout, re.M)
        assert found == [str(step) for step in range(40)]
    assert kernel.run("%on_all_ranks rank").stdout == "[0] 0\n[1] 1\n"
    counted = kernel.run("len(ddp_notebook.current().recording.collectives())")
    assert counted.displays[0]["text/plain"] == "80", "no row is lost, and none is there twice"
    assert kernel.run("ddp_notebook.current().ranks.pids()").displays[0]["text/plain"] == pids
    [entry] = entries.entries()
    os.kill(entry.pid, signal.SIGKILL)
    ranks = [int(pid) for pid in pids.strip("[]").split(",")]
    wait_until(lambda: not carriers() and not any(map(psutil.pid_exists, ranks)), 20, "with the keeper all is gone")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "words"),
    [("wants-a-password", r"Permission denied .*ssh-copy-id"), ("unknown-key", "Host key verification")],
)
def test_why_no_host_is_reached_is_told(ssh, python, runtime, host, words):  # noqa: F811
    with pytest.raises(StartError, match=f"no host server on {host}: .*{words}"):
        ddp_notebook.start(hosts=ddp_notebook.Ssh(f"{host}:1", python=python), keep=ddp_notebook.Keep(hours=1))
    assert entries.entries() == []


@pytest.mark.long
@pytest.mark.alone  # changes links and addresses of the machine
def test_a_link_that_is_away_for_longer_than_a_connection_lives(tmp_path, runtime, monkeypatch):  # noqa: F811
    with namespaces.hosts(tmp_path, "a") as made:
        monkeypatch.setenv("DDP_NOTEBOOK_SSH", made.command)
        with ddp_notebook.start(
            hosts=ddp_notebook.Ssh("a:2", python=sshd.python(tmp_path)), keep=ddp_notebook.Keep(hours=1)
        ) as session:
            job = session.submit(STEPS, quiet=True)
            [carrier] = carriers()
            made.cut("a")
            wait_until(lambda: not carrier.is_running(), 30, "it is silent, and given up")
            wait_until(lambda: carriers(), 30, "another one is tried")
            assert "Nothing is lost" in session._trouble
            made.cut("a", is_up=True)
            result = job.result(60)
            assert [result[rank].stdout for rank in (0, 1)] == ["".join(f"step {n}\n" for n in range(40))] * 2
            wait_until(lambda: not session._parts.cluster.unheard, 5, "it is told that it is back")
            assert session.run("rank", quiet=True)[1].result == "1"
