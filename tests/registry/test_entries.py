"""Sessions and jobs of this user that a notebook can attach to: their entries and their sockets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

from ddp_notebook import attach_commands
from ddp_notebook.errors import UsageError
from ddp_notebook.messages.first_messages import Admitted, Refused
from ddp_notebook.registry import entries, lookup, unix_sockets


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    """Set a separate runtime folder for this test."""
    own = tmp_path / "run"
    own.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    return own


def test_an_entry_is_found_until_it_is_removed(runtime):
    entry = entries.enter("torchrun", "train", {"rank": 3})
    assert (entry.path.stat().st_mode & 0o777, entry.path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert entry.path.parent == runtime / "ddp_notebook"
    assert [(one.name, one.about, one.pid) for one in entries.entries()] == [("train", {"rank": 3}, os.getpid())]
    assert entries.entries("session") == []
    entry.remove()
    entry.remove()
    assert entries.entries() == [] and list(entry.path.parent.iterdir()) == []


@pytest.mark.processes
def test_what_a_killed_process_has_left_is_cleared_away(runtime):
    code = (
        "import os, signal; from ddp_notebook.registry import unix_sockets, entries\n"
        "entry = entries.enter('torchrun', 'train', {}); unix_sockets.listen(entry.door)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60)
    folder = runtime / "ddp_notebook"
    assert len(list(folder.iterdir())) == 2
    assert entries.entries() == [] and list(folder.iterdir()) == []


def test_a_process_with_a_reused_id_is_another(runtime):
    entry = entries.enter("torchrun", "train", {})
    said = json.loads(entry.path.read_text())
    entry.path.write_text(json.dumps({**said, "who": [os.getpid(), said["who"][1] - 1]}))
    assert entries.entries() == []


@pytest.mark.parametrize(
    ("change", "why"),
    [({"format": 99, "version": "9.1"}, "was written by ddp_notebook 9.1"), ({"machine": "another container"}, "")],
)
def test_files_that_are_not_ours_to_judge_stay(runtime, change, why):
    entry = entries.enter("torchrun", "train", {})
    entry.path.write_text(json.dumps({**json.loads(entry.path.read_text()), **change}))
    assert entries.entries() == [] and [why in one for one in entries.strangers()] == [True] * bool(why)
    assert entry.path.exists()


def test_a_file_that_cannot_be_read_is_named(runtime):
    entry = entries.enter("torchrun", "train", {})
    entry.path.write_text("{")
    assert entries.entries() == []
    [why] = entries.strangers()
    assert str(entry.path) in why and why.endswith("remove it")


def test_a_folder_that_is_open_to_others_is_refused(runtime):
    (runtime / "ddp_notebook").mkdir(mode=0o755)
    for ask in (lambda: entries.enter("torchrun", "train", {}), entries.entries):
        with pytest.raises(UsageError, match=r"must be a folder that only you can use, got mode 755 .*chmod 700"):
            ask()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(runtime):
    path = runtime / "ddp_notebook"
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)
    with pytest.raises(UsageError, match=r"user 65534.*XDG_RUNTIME_DIR to another folder"):
        entries.entries()


def test_without_a_runtime_folder_it_is_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(entries, "_ELSEWHERE", str(tmp_path))
    assert entries.enter("torchrun", "train", {}).path.parent == tmp_path / f"ddp_notebook_{os.getuid()}"


def test_a_folder_that_goes_with_an_entry_goes_with_it(tmp_path):
    own, other = tmp_path / f"{entries.SPOOL}1", tmp_path / "other"
    for path in (own, other):
        path.mkdir()
        entries.enter("session", "kept-1", {}, folder_with_it=str(path)).remove()
    assert (own.exists(), other.exists()) == (False, True), "no file can have another folder removed"


@pytest.mark.slow
def test_names_that_are_counted_are_each_given_once(runtime):
    code = (
        "import sys; from ddp_notebook.registry import entries\nprint(entries.enter_next('session', 'kept', {}).name)"
    )
    code += "\nsys.stdout.flush(); sys.stdin.read()"
    many = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    names = {one.stdout.readline().strip() for one in many if one.stdout is not None}
    for one in many:
        one.communicate()
    assert names == {"kept-1", "kept-2", "kept-3", "kept-4"}
    assert entries.enter_next("session", "kept", {}).name == "kept-1", "those have ended"


# ---- what a name means


def test_which_one_a_name_means(runtime):
    """A session, and a job of two ranks. All belong to this process here, so their files are distinguished manually."""
    about = {"key": "7", "script": "train.py", "arguments": ["--lr", "1"], "world_size": 3}
    for kind, name, told in (
        ("session", "kept-1", {"directory": "/home/me"}),
        ("torchrun", "train-3f2a", {**about, "rank": 0}),
        ("torchrun", "train-3f2a", {**about, "rank": 2}),
    ):
        entry = entries.enter(kind, name, told)
        entry.path.rename(entry.path.with_name(f"{kind}-{name}-{told.get('rank', 0)}.json"))
    assert [lookup.find(name).name for name in ("kept-1", "kept", "train", "train-3f2a")] == [
        *["kept-1"] * 2,
        *["train-3f2a"] * 2,
    ]
    assert lookup.find("", "session").kind == "session"
    with pytest.raises(UsageError) as several:
        lookup.find()
    said = str(several.value)
    assert said.startswith("several are running; choose one:\n  %ddp_attach ")
    assert "%ddp_attach kept-1: kept ranks for 0 s, /home/me" in said
    assert "%ddp_attach train-3f2a: train.py --lr 1, 3 ranks, here ranks 0,2 for 0 s" in said
    with pytest.raises(UsageError, match=r"cannot attach to 'tra'.*running are (kept-1, train-3f2a|train-3f2a, ke)"):
        lookup.find("tra")


# ---- doors


@pytest.fixture(params=["short", "long"])
def path(request, tmp_path):
    folder = tmp_path / ("x" * (1 if request.param == "short" else 120))
    folder.mkdir()
    return folder / "a.sock"


def test_lines_go_both_ways(path):
    with unix_sockets.listen(path) as listener, unix_sockets.connect(path, 5.0) as here:
        there, _ = listener.accept()
        with there:
            there.settimeout(5.0)
            unix_sockets.check_user(there)
            unix_sockets.send_line(here, Refused(why="ä"))
            assert unix_sockets.hear(there, Admitted, Refused) == Refused(why="ä")
            there.sendall(b"hello\n")
            with pytest.raises(unix_sockets.AttachSocketError, match="expected the message Refused of version"):
                unix_sockets.hear(here, Refused)
            there.close()
            with pytest.raises(unix_sockets.AttachSocketError, match="has closed"):
                unix_sockets.hear(here, Refused)


@pytest.mark.processes
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_gets_nothing(path):
    """Not even a user with access to the folder."""
    for folder in (path.parent, path.parent.parent, *path.parents[2:5]):
        if folder.stat().st_uid == 0 and len(folder.parts) > 2:
            folder.chmod(0o755)
    refused = []
    with unix_sockets.listen(path) as listener:
        path.chmod(0o666)

        def answer():
            there, _ = listener.accept()
            with there:
                try:
                    unix_sockets.check_user(there)
                except unix_sockets.AttachSocketError as error:
                    refused.append(str(error))

        thread = threading.Thread(target=answer)
        thread.start()
        code = (
            f"import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX); os.chdir({str(path.parent)!r})\n"
        )
        code += "s.connect('a.sock'); print(s.recv(10))"
        ran = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
        thread.join(10)
    assert ran.stdout == "b''\n", ran.stderr
    assert len(refused) == 1 and "must belong to user 0, got user 65534" in refused[0]


_ENTERS = """
import sys
from ddp_notebook.registry import entries
entries.enter("session", sys.argv[1], {"directory": sys.argv[2]})
print("entered", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_without_a_name_the_kept_session_of_this_folder_is_found(tmp_path):
    def enter(stack: ExitStack, name: str, directory: str) -> None:
        command = [sys.executable, "-c", _ENTERS, name, directory]
        process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert process.stdout is not None and process.stdin is not None
        stack.callback(process.stdin.close)
        assert process.stdout.readline() == "entered\n"

    job = entries.enter("torchrun", "train-1", {"directory": os.getcwd(), "key": "train"})
    with ExitStack() as stack:
        enter(stack, "kept-1", str(tmp_path))
        with pytest.raises(UsageError, match="several are running; choose one:"):
            lookup.find()
        enter(stack, "kept-2", os.getcwd())
        assert lookup.find().name == "kept-2"
        assert lookup.find(kind=lookup.SESSION).name == "kept-2"
        assert lookup.find("kept-1").name == "kept-1"
        with pytest.raises(UsageError, match="several are running that match 'kept'; choose one:"):
            lookup.find("kept")
        assert attach_commands.others_in_a_line() == (
            "also running: kept-2 (kept ranks of this folder), train-1 (torchrun job of this folder), "
            "kept-1 (kept ranks); attach with %ddp_attach kept-2"
        )
        assert attach_commands.kept_sessions() == ["kept-2", "kept-1"]
        enter(stack, "kept-3", os.getcwd())
        assert " and 1 more; attach with %ddp_attach kept-" in attach_commands.others_in_a_line()
        with pytest.raises(UsageError, match="several are running; choose one:"):
            lookup.find()
    job.remove()
    assert attach_commands.others_in_a_line() == ""
