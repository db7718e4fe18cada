"""What of this user's can be attached to: entries, and the doors that they name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from ddp_notebook.registry import doors, entries


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    """A runtime folder of this test's own; no other one is looked at."""
    own = tmp_path / "run"
    own.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
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


def test_what_a_killed_process_has_left_is_cleared_away(runtime):
    code = (
        "import os, signal; from ddp_notebook.registry import doors, entries\n"
        "entry = entries.enter('torchrun', 'train', {}); doors.listen(entry.door)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60)
    folder = runtime / "ddp_notebook"
    assert len(list(folder.iterdir())) == 2
    assert entries.entries() == [] and list(folder.iterdir()) == []


def test_a_process_with_a_reused_id_is_another(runtime):
    entry = entries.enter("torchrun", "train", {})
    said = json.loads(entry.path.read_text())
    entry.path.write_text(json.dumps({**said, "started": said["started"] - 1}))
    assert entries.entries() == []


@pytest.mark.parametrize(
    ("change", "why"),
    [({"format": 99, "version": "9.1"}, "is of ddp_notebook 9.1"), ({"machine": "another container"}, "")],
)
def test_files_that_are_not_ours_to_judge_stay(runtime, change, why):
    entry = entries.enter("torchrun", "train", {})
    entry.path.write_text(json.dumps({**json.loads(entry.path.read_text()), **change}))
    assert entries.entries() == [] and [why in one for one in entries.strangers("torchrun")] == [True] * bool(why)
    assert entry.path.exists()


def test_a_file_that_cannot_be_read_is_named(runtime):
    entry = entries.enter("torchrun", "train", {})
    entry.path.write_text("{")
    assert entries.entries() == []
    [why] = entries.strangers("torchrun")
    assert str(entry.path) in why and why.endswith("remove it")


def test_a_folder_that_is_open_to_others_is_refused(runtime):
    (runtime / "ddp_notebook").mkdir(mode=0o755)
    for ask in (lambda: entries.enter("torchrun", "train", {}), entries.entries):
        with pytest.raises(entries.RegistryError, match=r"is open to others.*chmod 700"):
            ask()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(runtime):
    path = runtime / "ddp_notebook"
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)
    with pytest.raises(entries.RegistryError, match=r"user 65534.*set XDG_RUNTIME_DIR"):
        entries.entries()


def test_without_a_runtime_folder_it_is_below_the_temporary_one(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    entry = entries.enter("torchrun", "train", {})
    assert entry.path.parent == tmp_path / f"ddp_notebook_{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    assert [one.path for one in entries.entries()] == [entry.path], "a notebook with the variable finds it too"


# ---- doors


@pytest.fixture(params=["short", "long"])
def path(request, tmp_path):
    folder = tmp_path / ("x" * (1 if request.param == "short" else 120))
    folder.mkdir()
    return folder / "a.sock"


def test_lines_go_both_ways(path):
    with doors.listen(path) as listener, doors.connect(path, 5.0) as here:
        there, _ = listener.accept()
        with there:
            there.settimeout(5.0)
            doors.check_user(there)
            doors.say(here, {"a": [1, "ä"]})
            assert doors.hear(there) == {"a": [1, "ä"]}
            there.sendall(b"hello\n")
            with pytest.raises(doors.DoorError, match="no line of this package"):
                doors.hear(here)
            there.close()
            with pytest.raises(doors.DoorError, match="has closed"):
                doors.hear(here)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_gets_nothing(path):
    """Even one who may look into the folder."""
    for folder in (path.parent, path.parent.parent, *path.parents[2:5]):
        if folder.stat().st_uid == 0 and len(folder.parts) > 2:
            folder.chmod(0o755)
    refused = []
    with doors.listen(path) as listener:
        path.chmod(0o666)

        def answer():
            there, _ = listener.accept()
            with there:
                try:
                    doors.check_user(there)
                except doors.DoorError as error:
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
    assert len(refused) == 1 and "is of user 65534, not of user 0" in refused[0]
