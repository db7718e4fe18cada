"""Cleaners and users remove temporary folders at any time: sessions continue, and no rank is killed unnecessarily."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from ddp_notebook import session as sessions
from ddp_notebook import session_commands
from ddp_notebook.errors import StartError
from ddp_notebook.launch import warm
from ddp_notebook.launch.keep.recording_store import KeptRecording, batches
from ddp_notebook.launch.rank_log import RankLog
from ddp_notebook.launch.transports import folders
from ddp_notebook.messages.record_options import RecordOptions
from ddp_notebook.registry import private
from tests.conftest import wait_until


def files() -> list[Path]:
    """Return the files of this package in the temporary and in the runtime directory."""
    return [*Path(tempfile.gettempdir()).glob("ddp_notebook*"), *Path(os.environ["XDG_RUNTIME_DIR"]).iterdir()]


def clean() -> None:
    """Remove all of `files()`."""
    for path in files():
        shutil.rmtree(path)


@pytest.mark.long
def test_ranks_start_if_the_host_servers_folders_are_deleted(make_session):
    warm.drop()
    clean()  # folders of earlier tests, and of the server that ends now
    warm.prepare()
    assert len(files()) == 2, files()
    clean()

    session = make_session(2)

    assert session.run("print(rank)")[1].stdout == "1\n"
    for folder in (session._hosts.all[0].directory, session._cluster.directory):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    session.stop()
    clean()
    assert make_session(2).run("print(rank)")[1].stdout == "1\n"


@pytest.mark.long
def test_a_session_goes_on_without_its_folders(make_session):
    session = make_session(2)
    session.run("kept = 'of before'; print('first')")
    clean()
    assert session.run("print(kept)")[0].stdout == "of before\n"
    assert session.log(0).splitlines() == ["first", "of before"]
    clean()
    assert session.client.ids == [0, 1]
    clean()
    assert session.client[:].apply_sync(os.getpid) == session.ranks.pids()
    [controller] = session.ranks.pids("controller")
    os.kill(controller, signal.SIGKILL)
    wait_until(lambda: not session.ranks.pids("controller"), what="the controller has ended")
    clean()
    assert session.client[:].apply_sync(os.getpid) == session.ranks.pids()
    clean()
    os.kill(session.ranks.pids()[1], signal.SIGKILL)
    wait_until(lambda: len(session.ranks.pids()) == 1, what="rank 1 has died")
    session.ranks.heal()
    assert session.run("print(kept)", 0)[0].stdout == "of before\n"
    clean()
    assert "profile" not in session.run("torch.ones(2) + 1", record=RecordOptions(profile=True))[0].stderr
    clean()
    session.ranks.resize(3)
    clean()
    assert session.run("import os; print(rank)")[2].stdout == "2\n"
    assert "first" in session.log(0)
    clean()
    session.stop()


@pytest.mark.long
def test_the_stack_of_a_rank_is_read_though_its_file_was_removed(make_session):
    session = make_session(2)
    session.run("print()")
    clean()
    seen = session._cluster.inspect([0])
    assert "File" in seen[0].stack


def test_a_restart_that_cannot_succeed_ends_no_rank(make_session):
    session = make_session(2)
    session.run("kept = 1")
    folder = Path(session._hosts.all[0].directory)
    shutil.rmtree(folder)
    folder.symlink_to("/tmp")  # another user can create this in a folder that all users may write to
    try:
        with pytest.raises(StartError, match=r"is a link.*none was ended: 2 of 2 ranks live, with their variables"):
            session_commands.restart(session)
        assert session.run("print(kept)")[0].stdout == "1\n"
        for pid in session.ranks.pids():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not session.ranks.pids(), what="all ranks have died")
        with pytest.raises(StartError, match=r"is a link.*none was ended: no rank is left$"):
            session_commands.restart(session)
    finally:
        folder.unlink()
    clean()
    session_commands.restart(session)
    again = sessions.current()
    assert again is not None and again is not session
    assert again.run("print(rank)")[1].stdout == "1\n"


@pytest.mark.parametrize("trap", ["link", "open to all", "another user's", "file"])
def test_no_folder_is_used_that_another_user_can_use(tmp_path, trap):
    folder = tmp_path / "ddp_notebook-x"
    if trap == "link":
        folder.symlink_to(tmp_path)
    elif trap == "file":
        folder.touch()
    else:
        folder.mkdir(mode=0o777 if trap == "open to all" else 0o700)
        folder.chmod(0o777 if trap == "open to all" else 0o700)
        if trap == "another user's":
            if os.geteuid():
                pytest.skip("only root can give a folder to another user")
            os.chown(folder, 65534, -1)

    with pytest.raises(StartError, match=f"{folder} must be a folder that only you can use"):
        private.restore(str(folder))


def test_a_runtime_directory_that_another_user_holds_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "ddp_notebook").mkdir()
    (tmp_path / "ddp_notebook").chmod(0o777)

    assert private.runtime() == tempfile.gettempdir()


@pytest.mark.processes
def test_the_directory_for_temporary_files_itself_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "of a batch job"))

    folder = folders.make("ddp_notebook-", is_large=True)

    assert Path(folder).parent == tmp_path / "of a batch job"
    folders.remove(folder)


def test_a_log_whose_files_were_removed_is_whole(tmp_path):
    log = RankLog(tmp_path / "logs", 0, limit_bytes=20)
    for number in range(6):
        log.write(f"line {number}\n")
    before = log.read()
    shutil.rmtree(tmp_path / "logs")

    assert log.read() == before
    log.write("line 6\n")
    log.restore()
    assert log.read().endswith("line 5\nline 6\n")
    assert (tmp_path / "logs" / "rank0.log").read_text().endswith("line 6\n")
    assert (tmp_path / "logs" / "rank0.log.1").exists()
    log.close()


def test_a_recording_whose_files_were_removed_is_whole(tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    recorded = KeptRecording(str(folder), 32 * 100)
    for number in range(10):
        recorded.put(number % 2, bytes([number]) * 60)
    shutil.rmtree(folder)
    recorded.put(0, b"x" * 60)

    found = list(batches(recorded.parts()))

    assert found == [*((n % 2, bytes([n]) * 60) for n in range(10)), (0, b"x" * 60)]
    recorded.close()


def test_no_folder_of_multiprocessing_stays(make_session):
    session = make_session(2)
    code = (
        "import multiprocessing, os, tempfile\n"
        "from multiprocessing.connection import Listener\n"
        "listener = Listener(family='AF_UNIX')\n"
        "print(os.path.dirname(listener.address))"
    )
    first = session.run(code)[0].stdout.strip()
    assert Path(first).parent == Path(session._hosts.all[0].directory)
    clean()
    second = session.run(code)[0].stdout.strip()
    assert Path(second).is_dir()
    session.stop()
    assert not Path(second).exists()
    assert not list(Path(tempfile.gettempdir()).glob("pymp-*"))


@pytest.mark.slow
def test_processes_that_make_a_folder_again_at_the_same_time(tmp_path):
    rounds, begin, end = 200, threading.Barrier(5), threading.Barrier(5)
    errors: list[Exception] = []

    def make(number: int) -> None:
        for _ in range(rounds):
            begin.wait()
            try:
                private.restore(str(tmp_path / "a" / "b" / str(number)))
            except Exception as error:
                errors.append(error)
            end.wait()

    threads = [threading.Thread(target=make, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(rounds):
        begin.wait()
        end.wait()
        assert len(list((tmp_path / "a" / "b").iterdir())) == 4 or errors
        shutil.rmtree(tmp_path / "a")
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_folder_below_a_removed_working_directory_is_not_made(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError):
        private.restore("folder")


_UNPICKLE_IN_A_REMOVED_DIRECTORY = """
import os, tempfile
from ddp_notebook.run.values import exchange
from ddp_notebook.wire.buffers import join
removed = tempfile.mkdtemp()
os.chdir(removed)
os.rmdir(removed)
pickled = b"\\x80\\x04\\x8c\\x05torch\\x8c\\x04Size\\x93."
print(exchange._unpickle(0, "x", "a type", bytearray(b"".join(join([[pickled]])))))
try:
    os.getcwd()
except FileNotFoundError:
    print("still removed")
"""


@pytest.mark.long
@pytest.mark.processes
def test_pull_works_in_a_deleted_working_directory():
    """oneMKL ends a process that imports torch in such a directory, and the notebook with it."""
    code = _UNPICKLE_IN_A_REMOVED_DIRECTORY
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "<class 'torch.Size'>\nstill removed\n"), ended.stderr


@pytest.mark.long
def test_private_folders_and_files_are_private_under_any_umask(make_session):
    before = os.umask(0o777)
    try:
        session = make_session(2, cold=True)
        session.run("%%timeit -n1 -r1\nprint(rank)", record=RecordOptions(profile=True))
        session.run("import tempfile; tempfile.TemporaryFile()")
        with session.client:
            modes = {
                str(path): stat.S_IMODE(path.lstat().st_mode)
                for folder in files()
                for path in (folder, *folder.rglob("*"))
                if path.is_dir() or path.is_file() or path.is_socket()
            }
    finally:
        os.umask(before)
    assert len(modes) > 8 and any("profile" in path for path in modes) and any("stack" in path for path in modes)
    wrong = {path: oct(mode) for path, mode in modes.items() if Path(path).is_dir() and mode != 0o700}
    wrong |= {path: oct(mode) for path, mode in modes.items() if mode & 0o600 != 0o600}
    assert not wrong
