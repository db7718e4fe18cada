"""A killed notebook leaves nothing on its machine that it has guarded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddp_notebook.launch.transports import cleanup_process, folders
from tests.conftest import below, wait_until

_ROOT = Path(__file__).parents[1]
_NOTEBOOK = """
import os, sys
from ddp_notebook.launch.transports import folders, cleanup_process
made = [folders.make("ddp_notebook- a $b\\\\n"), folders.make("ddp_notebook-")]
open(os.path.join(made[0], "log"), "w").close()
cleanup_process.guard(os.path.abspath("slurm-1.out"))
open("slurm-1.out", "w").close()
folders.remove(folders.make("ddp_notebook-"))
print("made", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "in order"])
def test_what_is_guarded_goes_with_its_process(tmp_path, end):
    private = tmp_path / "ddp_notebook"
    env = {**os.environ, "PYTHONPATH": str(_ROOT), "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _NOTEBOOK], env=env, cwd=tmp_path, stdin=pipe, stdout=pipe) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == b"made\n"
        assert len(list(tmp_path.rglob("ddp_notebook-*"))) == 2 and (tmp_path / "slurm-1.out").exists()
        [shell] = psutil.Process(one.pid).children()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # like VS Code when it stops and closes
            shell.send_signal(number)
        if end == "killed":
            one.kill()
    wait_until(lambda: below(tmp_path) == [private] and not shell.is_running())


@pytest.mark.processes
def test_with_the_last_folder_the_guard_ends(monkeypatch):
    monkeypatch.setattr(cleanup_process, "_guarded", set())  # from earlier tests
    monkeypatch.setattr(cleanup_process, "_shell", None)
    folder, other = folders.make("ddp_notebook-"), folders.make("ddp_notebook-")
    shell = cleanup_process._shell
    assert shell is not None and shell.poll() is None
    folders.remove(folder)
    folders.remove(folder)
    assert shell.poll() is None
    child = os.fork()
    if child == 0:  # the child has the pipe too
        time.sleep(60)
        os._exit(0)
    try:
        folders.remove(other)
        assert shell.poll() is not None and cleanup_process._shell is None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
