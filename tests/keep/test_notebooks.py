"""Two notebooks at one session, and rejected clients: other users, other versions, other environments."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ddp_notebook import attach_commands, session_commands
from ddp_notebook.errors import StartError, UsageError
from ddp_notebook.launch.keep import connect
from ddp_notebook.launch.keep.channel import Channel
from ddp_notebook.launch.keep.keeper import notebooks
from ddp_notebook.launch.keep.keeper.journal import Journal
from ddp_notebook.launch.keep.keeper.notebooks import Notebooks
from ddp_notebook.launch.keep.keeper.queue import Queue
from ddp_notebook.launch.keep.keeper.request_handler import RequestHandler
from ddp_notebook.launch.options import Keep, StartOptions
from ddp_notebook.messages.first_messages import StopKeeper, to_line
from ddp_notebook.messages.framing import ProcessText
from ddp_notebook.messages.keeper import TellRanks, Waiting, WaitingJobs
from ddp_notebook.messages.ranks import RunCell
from ddp_notebook.registry import entries, lookup
from tests.conftest import wait_until
from tests.keep.conftest import kill

AS_OTHER_USER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
for path in sys.argv[2:]:
    try:
        print(open(path).read())
    except PermissionError:
        print("no")
stream = socket.socket(socket.AF_UNIX)
try:
    stream.connect(sys.argv[1])
    stream.sendall(b'{"want": "stop"}\\n')
    print(stream.recv(100))
except OSError as error:
    print(type(error).__name__)
"""

# During a flood the notebook limits the output of ranks, and the output stays in their pipes.
HOLDS = """
import ddp_notebook, os, threading, time
def hold():
    while not os.path.exists({go!r}): time.sleep(0.01)
    ddp_notebook.current()._cluster.hold_text(True)
    open({held!r}, 'w').close()
threading.Thread(target=hold, daemon=True).start()
"""


@pytest.mark.parametrize(("count", "ranks"), [(1, "its 1 rank keeps running"), (2, "its 2 ranks keep running")])
def test_a_detached_session_keeps_running(count, ranks):
    session: Any = SimpleNamespace(
        world_size=count, _kept_as="kept-1", _outlives_stop=True, _ended_elsewhere=False, stop=lambda: None
    )
    assert session_commands.end(session) == f"detached from kept-1; {ranks}"


@pytest.mark.long
def test_one_drives_and_the_other_looks(notebook):
    first = notebook("%ddp_start 2 --keep 1")
    first.run("%%on_all_ranks\nfor _ in range(3): dist.all_reduce(torch.ones(1))")
    second = notebook()
    looks = second.run("%ddp_attach").stdout
    assert "the notebook of process" in looks and "This notebook has the monitor" in looks and "--take-over" in looks
    refused = second.run("%on_all_ranks 1")
    assert refused.ename == "SessionBrokenError" and "drives this session" in refused.traceback
    assert "idle" in second.run("%ddp_status").stdout
    first.run("%%on_all_ranks\nfor _ in range(2): dist.all_reduce(torch.ones(1))")
    count = "import ddp_notebook; len(ddp_notebook.current().recording.collectives())"
    assert second.run(count).displays[0]["text/plain"] == "10"
    assert second.run("%ddp_stop").stdout == "detached from kept-1; its 2 ranks keep running\n"
    assert first.run("%on_all_ranks rank").stdout == "[0] 0\n[1] 1\n", "one that looks ends nothing"
    second.run("%ddp_attach")
    first.run("%ddp_stop")
    second.run("import ddp_notebook, time\nwhile ddp_notebook.current().is_running: time.sleep(0.01)")
    assert second.run("%ddp_stop").stdout == "detached from kept-1; it has ended\n"
    first.run("%ddp_start 2 --keep 1")
    keeper = int(first.run("import ddp_notebook; print(ddp_notebook.current()._remote.pid)").stdout)
    second.run("%ddp_attach --take-over")
    second.run("%ddp_stop")
    wait_until(lambda: not psutil.pid_exists(keeper), 10.0)
    assert re.fullmatch(r"detached from kept-\d; it has ended\n", first.run("%ddp_stop").stdout)


@pytest.mark.long
def test_one_that_looks_sees_the_cells_of_the_other(notebook, tmp_path):
    first = notebook("%ddp_start 2 --keep 1")
    second = notebook("%ddp_attach --look")
    assert second.run("%ddp_jobs").stdout == (
        "no cell is running or queued in this session; this notebook is attached read-only and has no jobs\n"
    )
    end = tmp_path / "end"
    for line in ("--background", "--background"):
        first.run(
            f"%%on_all_ranks {line}\nimport os, time\nlog(loss=1.0)\n"
            f"while not os.path.exists({str(end)!r}): time.sleep(0.01)"
        )
    wait_until(lambda: "waiting" in second.run("%ddp_jobs").stdout, what="the cells of the other notebook are not seen")
    title, *table = second.run("%ddp_jobs").stdout.splitlines()
    assert title == "this notebook is read-only; cells of the notebook that drives the session:"
    assert [line.split()[:5] for line in table] == [
        ["cell", "ranks", "state", "s", "code"],
        ["In", "[3]", "0-1", "running", table[1].split()[4]],
        ["In", "[4]", "all", "waiting", "import"],
    ]
    head = (
        "import ddp_notebook; session = ddp_notebook.current()\n"
        "print({name: session._views._new_publisher(None).head()[name] for name in ('state', 'label')})"
    )
    assert second.run(head).stdout == "{'state': 'running', 'label': 'In [3]'}\n"
    assert second.run("print(session._views.interrupt())").stdout.startswith("this notebook is read-only")
    end.touch()
    wait_until(lambda: "no cell is running" in second.run("%ddp_jobs").stdout, what="the cells have ended")
    last = "{'state': 'idle', 'label': 'In [4]'}\n"
    wait_until(lambda: second.run(head).stdout == last, what="the label of the last cell")
    assert second.run("%ddp_monitor 4").status == "ok"


@pytest.mark.long
def test_a_take_over_detaches_a_busy_notebook_and_keeps_ranks(notebook, tmp_path):
    first = notebook("%ddp_start 2 --keep 1")
    go, held, end = tmp_path / "go", tmp_path / "held", tmp_path / "end"
    first.run(HOLDS.format(go=str(go), held=str(held)))
    busy = first.start(
        "%%on_all_ranks\nimport os, time\nfor i in range(400):\n    print('step', i); time.sleep(0.01)\n"
        f"    while i == 300 and not os.path.exists({str(end)!r}): time.sleep(0.01)"
    )
    first.wait_for_text("step 20")
    go.touch()
    wait_until(held.exists, 10.0)
    second = notebook()
    taken = second.run("%ddp_attach --take-over")
    assert "continues as job 1" in taken.stdout
    lost = first.finish(busy, 20)
    assert lost.ename == "SessionBrokenError" and "has taken the session over" in lost.traceback
    assert "is driven by another notebook; %ddp_stop detaches this notebook from it" in first.run("%ddp_start 2").evalue
    assert "kept-1 goes on without it" in first.run("%ddp_restart").evalue
    shown = first.run("%ddp_status").stdout
    assert shown.count("goes on elsewhere") == 2 and "died" not in shown and "has taken the session over" in shown
    assert first.run("%ddp_stop").stdout == "detached from kept-1; its 2 ranks keep running\n"
    kill(first)
    end.touch()
    rest = second.run("%ddp_attach --wait")
    last = re.findall(r"^\[(0-1|0|1)\] step 399$", taken.stdout, re.M)  # merged lines if they arrived together
    assert rest.status == "ok" and last in (["0-1"], ["0", "1"], ["1", "0"])
    assert second.run("%on_all_ranks rank").stdout == "[0] 0\n[1] 1\n"


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_gets_nothing(notebook, runtime):
    kernel = notebook("%ddp_start 2 --keep 1")
    [entry] = entries.entries()
    file = entry.path
    assert [path.stat().st_mode & 0o777 for path in (file.parent, file)] == [0o700, 0o600]
    spool = [path for path in Path(entry.folder).iterdir() if path.is_file()]
    assert Path(entry.folder).stat().st_mode & 0o777 == 0o700 and spool

    def as_other_user() -> list[str]:
        asked = [str(entry.door), str(file), str(spool[0])]
        done = subprocess.run([sys.executable, "-c", AS_OTHER_USER, *asked], capture_output=True, text=True, check=True)
        return done.stdout.split("\n")[:-1]

    assert as_other_user() == ["no", "no", "PermissionError"]
    for folder in (runtime, file.parent):  # if the folder were open by mistake, the socket would still check the user
        folder.chmod(0o755)
    entry.door.chmod(0o666)
    answer = as_other_user()[2]
    assert answer in ("b''", "ConnectionResetError", "BrokenPipeError")
    with pytest.raises(UsageError, match=r"must be a folder that only you can use, got mode 755"):
        entries.entries()
    file.parent.chmod(0o700)
    assert kernel.run("%on_all_ranks rank").stdout == "[0] 0\n[1] 1\n"


@pytest.mark.long
def test_without_the_key_it_says_nothing(notebook):
    notebook("%ddp_start 2 --keep 1")
    [entry] = entries.entries()
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(str(entry.door))
        stream.sendall(to_line(StopKeeper(secret="guessed")))
        assert stream.recv(100) == b""
    assert entries.entries() == [entry]


def test_a_notebook_that_does_not_read_is_dropped(monkeypatch):
    monkeypatch.setattr(notebooks, "_MOST_WAITING", 10_000)
    here, there = socket.socketpair()
    for stream in (here, there):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    notebook = Notebooks().add(here, os.getpid(), "this")
    notebook.welcome([ProcessText(0, 1, bytes(1000))] * 500)
    channel = Channel(there)
    assert channel.receive() == ProcessText(0, 1, bytes(1000))
    for _ in range(600):
        notebook.send(ProcessText(0, 1, bytes(1000)))
    left = list(iter(channel.receive, None))
    assert len(left) < 1000
    channel.close()
    notebook.close()
    wait_until(lambda: not notebook._thread.is_alive(), 5.0, "its thread has ended")


class _Ranks:
    """Two ranks that record their messages."""

    gone: list[int] = []

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.is_asked = threading.Event()

    @property
    def ranks(self) -> list[int]:
        self.is_asked.set()
        return [0, 1]

    def put_in_inboxes(self, message: Any, ranks: list[int]) -> None:
        self.told.append((message, ranks))


def test_requests_of_the_old_notebook_are_dropped_in_a_take_over():
    """The other notebook received the state of the session without that cell."""
    here, there = socket.socketpair()
    all_of, ranks, journal, queue = Notebooks(), _Ranks(), Journal("ab12", limit_bytes=1000), Queue()
    asked = RequestHandler(ranks, None, journal, queue, all_of, *4 * [lambda *_: None])  # type: ignore[arg-type]
    first, second = all_of.add(here, os.getpid(), "first"), all_of.add(socket.socket(), os.getpid(), "second")
    all_of.give(first, take_over=False)
    serving = threading.Thread(target=asked.serve, args=(first,))
    serving.start()
    cell = RunCell(cell=1, code="pass", execution_count=1)
    channel = Channel(there)
    with all_of.lock:
        channel.send(TellRanks(message=cell, ranks=[0, 1]))
        assert ranks.is_asked.wait(5)
        all_of.give(second, take_over=True)
    with contextlib.suppress(OSError):  # it may be closed already
        channel.send(WaitingJobs(waiting=[Waiting(told=cell, ranks=None, timeout_s=None)]))
    serving.join(5)  # the thread ends because the replaced notebook's connection is closed
    for closing in (channel, second):
        closing.close()
    assert not serving.is_alive() and not ranks.told and not journal.cells and not queue.waiting


@pytest.mark.slow
def test_what_cannot_be_entered_leaves_nothing(runtime, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    entries.folder().chmod(0o755)
    try:
        with pytest.raises(StartError, match="must be a folder that only you can use"):
            connect.start(
                StartOptions(world_size=1, keep=Keep(hours=1.0)),
                lambda: None,
                lambda _: None,
            )
    finally:
        (runtime / "ddp_notebook").chmod(0o700)
    assert list(tmp_path.iterdir()) == list(entries.folder().iterdir()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "0.0.9"}, "kept-1 runs ddp_notebook 0.0.9, and this kernel"),
        ({"environment": "/opt/other"}, "kept-1 runs in the environment /opt/other, and this kernel in"),
    ],
)
def test_files_of_others_are_refused_with_a_sentence(runtime, change, words):
    entry = entries.enter_next(lookup.SESSION, "kept", {"secret": ""})
    assert entry.name == "kept-1"
    entry.path.write_text(json.dumps({**json.loads(entry.path.read_text()), **change}))
    with pytest.raises(UsageError) as caught:
        attach_commands.attach_session()
    assert words in str(caught.value)
    entry.path.chmod(0o644)
    with pytest.raises(UsageError, match="must be owned by you and closed to other users"):
        attach_commands.attach_session("kept-1")
    entry.path.write_text(json.dumps({"name": 3}))
    entry.path.chmod(0o600)
    with pytest.raises(UsageError, match="cannot be read by version"):
        attach_commands.attach_session("kept-1")
    entry.remove()
