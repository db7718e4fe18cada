"""Copies of files to hosts and back. Mount namespaces of this machine hide the notebook's folder from the hosts."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

import ddp_notebook
from ddp_notebook.errors import DDPNotebookError, HostError, RankDiedError, SessionBrokenError, StartError, UsageError
from ddp_notebook.launch.host.files import NOTE
from ddp_notebook.launch.hosts import DirectHosts
from ddp_notebook.launch.options import StartOptions
from ddp_notebook.records.marker import MARK
from tests import rights
from tests.conftest import wait_until
from tests.ssh import sshd


def make(folder, **texts):
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def apart(directory: Path, hidden: Path, *, home: Path, size: str = "64m") -> str:
    """Return an interpreter on a host on which this folder is replaced by an empty file system of this size, with its
    own home."""
    first = [
        'if [ -z "$OF_ITS_OWN" ]; then export OF_ITS_OWN=yes; exec unshare -m "$0" "$@"; fi',
        f"mount -t tmpfs -o size={size} apart {hidden}",
        f"export HOME={home}",
    ]
    return sshd.python(directory, first="\n".join(first))


@pytest.fixture(scope="module")
def project(ssh, tmp_path_factory):
    """Return the notebook's folder, and set it as the working directory."""
    if not rights.may(*rights.MOUNT):
        pytest.skip("mount namespaces cannot be made here: it takes root")
    folder = tmp_path_factory.mktemp("hidden") / "project"
    with pytest.MonkeyPatch.context() as patch:
        make(
            folder, **{"mod.py": "value = 41\n", "run.sh": "#!/bin/sh\necho runs\n", "a.log": "", ".gitignore": "*.log"}
        )
        make(folder, **{".env": "TOKEN=1", "data/x.csv": "1,2\n"})
        os.chmod(folder / "run.sh", 0o755)
        (folder / "big.bin").write_bytes(bytes(range(256)) * 10_000)  # in three pieces
        (folder / "out").symlink_to("/etc")
        (folder / "table.csv").symlink_to("data/x.csv")
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return the home folder of both hosts."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def session(ssh, project, home):
    python = apart(ssh, project.parent, home=home)
    told: list[str] = []
    with ddp_notebook.start(
        hosts=ddp_notebook.Ssh("one:1,two:1", python=python, sync="."), report=told.append, grace_s=0.3
    ) as session:
        assert any(text.startswith("\r") and text.endswith(" sent") for text in told)
        session.run("import os", quiet=True)
        yield session


def said(session, expression):
    result = session.run(f"print({expression})", quiet=True)
    return [result[rank].stdout.rstrip("\n") for rank in result.ranks]


@pytest.mark.long
def test_ranks_begin_in_the_folder_with_its_files(session, project):
    assert session.files.synced.folders == {"one": str(project), "two": str(project)}
    for line, host in zip(session.files.synced.lines[:2], ("one", "two"), strict=True):
        assert line.startswith(f"{host}: 6 files (2.6 MB) sent to {project} in "), line
    assert session.files.synced.lines[2:] == (
        "not sent, because files with such names usually contain keys: .env; %ddp_sync --also .env sends one",
        "not sent, because these links lead out of the folder: out",
    )
    there = "['.gitignore', 'big.bin', 'data', 'mod.py', 'run.sh', 'table.csv']"
    listed = "os.getcwd(), sorted(n for n in os.listdir() if n[:2] not in ('.i', '__'))"
    session.run("import mod, os, subprocess, hashlib", quiet=True)
    assert said(session, f"mod.value, {listed}") == [f"41 {project} {there}"] * 2
    assert said(session, "subprocess.check_output('./run.sh'), open('table.csv').read()") == ["b'runs\\n' 1,2"] * 2
    content = (project / "big.bin").read_bytes()
    assert (
        said(session, "len(open('big.bin', 'rb').read()), os.stat('big.bin').st_mtime_ns")
        == [f"{len(content)} {(project / 'big.bin').stat().st_mtime_ns}"] * 2
    )
    assert said(session, "open('big.bin', 'rb').read() == bytes(range(256)) * 10_000") == ["True"] * 2


def test_only_what_changed_is_sent_again(session, project):
    assert session.files.sync().sent == {"one": [], "two": []}
    (project / "mod.py").write_text("value = 42\n")
    os.utime(project / "big.bin")  # same content
    again = session.files.sync()
    assert again.sent == {"one": ["mod.py"], "two": ["mod.py"]}
    assert again.lines[0].endswith("; already there: 5")
    assert said(session, "open('mod.py').read()") == ["value = 42"] * 2
    assert session.files.sync().sent == {"one": [], "two": []}, "the time of the other one was taken over"


def test_sending_takes_nothing_of_the_time_to_start(session):
    before = session._hosts.began_s
    session._hosts.sync_first(lambda: None, lambda _: None)
    assert session._hosts.began_s > before


def test_nothing_there_is_deleted_and_what_is_newer_there_stays(session, project):
    session.run("if rank: open('data/x.csv', 'a').write('3,4\\n')\nopen('result.txt', 'w').write('mine')", quiet=True)
    (project / "data" / "x.csv").rename(project / "data" / "y.csv")
    make(project, **{"data/x.csv": "1,2,3\n"})
    os.utime(project / "data" / "x.csv", (1, 1))
    kept = session.files.sync()
    newer = "newer on {} and not changed: data/x.csv; %ddp_sync --overwrite sends those from here"
    assert kept.sent == {"one": ["data/y.csv"], "two": ["data/y.csv"]}
    assert [line for line in kept.lines if "newer" in line] == [newer.format("one"), newer.format("two")]
    assert said(session, "open('data/x.csv').read(), open('result.txt').read()") == ["1,2\n mine", "1,2\n3,4\n mine"]
    session.files.sync(overwrite=True)
    assert said(session, "open('data/x.csv').read(), open('result.txt').read()") == ["1,2,3\n mine"] * 2


def test_a_key_is_sent_when_it_is_named(session):
    assert session.files.sync(also=[".env"]).sent == {"one": [".env"], "two": [".env"]}
    assert said(session, "open('.env').read()") == ["TOKEN=1"] * 2


def test_what_is_in_the_way_is_told(session, project):
    session.run("os.mkdir('new.py'); open('folder', 'w').close()", quiet=True)
    make(project, **{"new.py": "", "folder/a.py": ""})
    with pytest.raises(
        HostError, match=r"folder/a.py cannot be written on (one|two): .*a file has the name of a needed folder"
    ):
        session.files.sync()
    session.run("os.unlink('folder')", quiet=True)
    told = session.files.sync()
    assert "not a file on one, and not changed: new.py; move it away on that host" in told.lines
    session.run("os.rmdir('new.py')", quiet=True)


def test_a_file_that_changes_while_it_is_read_is_not_sent(session, project):
    growing, stop = project / "growing.bin", threading.Event()

    def grow():
        with open(growing, "ab", buffering=0) as file:
            while not stop.is_set():
                file.write(bytes(4096))

    growing.write_bytes(bytes(20 << 20))
    writer = threading.Thread(target=grow)
    writer.start()
    try:
        told = session.files.sync()
    finally:
        stop.set()
        writer.join()
        growing.unlink()
    assert "changed while they were read, and not sent to one: growing.bin" in told.lines
    assert (
        said(session, f"os.path.exists('growing.bin'), [n for n in os.listdir() if n.startswith('{MARK}')]")
        == ["False []"] * 2
    )


def test_a_full_disk_is_told_and_nothing_half_is_left(session, project):
    (project / "huge.bin").write_bytes(bytes(70 << 20))
    try:
        with pytest.raises(
            HostError, match=r"huge.bin cannot be written on (one|two): No space left .*; the disk of that host is full"
        ):
            session.files.sync()
    finally:
        (project / "huge.bin").unlink()
    wait_until(lambda: said(session, f"[n for n in os.listdir() if n[:4] in ('{MARK[:4]}', 'huge')]") == ["[]"] * 2)


def test_an_interrupt_leaves_nothing_half(session, project):
    (project / "slow.bin").write_bytes(bytes(40 << 20))
    connection = session._hosts.all[1].transport._ssh

    def press(_):
        connection.send_signal(signal.SIGSTOP)  # a link that accepts no data for a while
        os.kill(os.getpid(), signal.SIGINT)

    try:
        # The press may come first, or the silence of the stopped connection.
        with pytest.raises(
            (KeyboardInterrupt, SessionBrokenError),
            match=r"interrupted: the files sent so far are complete, the others were not sent|, and kill -CONT",
        ):
            session.files.sync(report=press)
    finally:
        connection.send_signal(signal.SIGCONT)
        (project / "slow.bin").unlink()
    wait_until(lambda: said(session, f"[n for n in os.listdir() if n.startswith('{MARK}')]") == ["[]"] * 2)
    assert said(session, "os.path.exists('slow.bin')")[1] == "False"
    session.run("if os.path.exists('slow.bin'): os.unlink('slow.bin')", quiet=True)


@pytest.mark.long
@pytest.mark.parametrize("stopped_s", [2.0, 4.0])  # its cause was named; it was silent long enough to be unreachable
def test_a_cell_runs_at_once_after_its_ssh_was_resumed(session, stopped_s):
    connection = session._hosts.all[1].transport._ssh
    for _ in range(5):
        connection.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: session._hosts.all[1].silent_s > stopped_s)
            assert session._hosts.all[1].is_unreachable
        finally:
            connection.send_signal(signal.SIGCONT)
        session.run("ran = True", quiet=True)


def test_files_of_ranks_come_apart(session, tmp_path):
    session.run("open('log.txt', 'w').write(f'of {rank}'); open(f'only{rank}.txt', 'w').close()", quiet=True)
    fetched = session.files.fetch("log.txt", to=tmp_path)
    assert [path.read_text() for path in fetched] == ["of 0", "of 1"]
    assert repr(fetched) == f"1 file (4 B) of rank 0 in {tmp_path}/rank0\n1 file (4 B) of rank 1 in {tmp_path}/rank1"
    with pytest.raises(
        DDPNotebookError, match=r"rank 0: no file matches 'only1.txt' in the working directory .*/project"
    ):
        session.files.fetch("only1.txt", to=tmp_path)
    [path] = session.files.fetch("only1.txt", to=tmp_path, ranks=1)
    assert path == tmp_path / "only1.txt"


def test_hosts_that_share_the_folder_get_nothing(session, tmp_path):
    make(tmp_path, **{"a.py": ""})
    os.truncate(tmp_path / "a.py", 2 * 10**9)  # more than is sent without a confirmation
    told = session.files.sync(tmp_path)
    assert told.lines == (f"one: shares {tmp_path}, nothing was sent", f"two: shares {tmp_path}, nothing was sent")
    assert os.listdir(tmp_path) == ["a.py"]


def test_hosts_that_share_a_folder_of_their_own(session, project, home):
    """The folder is sent to only one of them, here into the home folder, because its path cannot be created."""
    path = project.parent / "file" / "code"
    make(path, **{"a.py": "1"})
    session.run(f"open({str(path.parent)!r}, 'w').close()", quiet=True)
    told = session.files.sync(path)
    assert told.folders == {"one": f"{home}/code", "two": f"{home}/code"}
    assert told.lines[0].startswith(f"one: 1 file (1 B) sent to {home}/code ({path} cannot be created there) in ")
    assert told.lines[1] == f"two: has {home}/code from one, which shares it"
    assert sorted(os.listdir(home / "code")) == [NOTE, "a.py"]
    (home / "code" / "a.py").write_text("of somebody else")
    (home / "code" / NOTE).unlink()
    os.utime(home / "code" / "a.py", (1, 1))
    with pytest.raises(
        HostError, match=rf"its folder {home}/code has files that no sync has sent, .*: echo > {home}/c"
    ):
        session.files.sync(path)
    assert (home / "code" / "a.py").read_text() == "of somebody else"
    (home / "code" / NOTE).write_text("\n")
    assert session.files.sync(path).sent == {"one": ["a.py"], "two": []}


def test_a_folder_that_is_a_link_is_not_followed(session, project, home):
    session.run(f"if local_rank == 0: os.symlink({str(home)!r}, 'linked')", quiet=True)
    make(project, **{"linked/a.py": "1"})
    told = session.files.sync()
    assert (
        "in a folder that is a link on one, and not sent: linked/a.py; move the link away on that host"
    ) in told.lines
    assert "a.py" not in os.listdir(home)
    session.run("if local_rank == 0: os.unlink('linked')", quiet=True)


@pytest.mark.long
def test_what_cannot_be_sent_stops_the_start(session, project):
    with pytest.raises(UsageError, match="the folder to send must exist, got 'no/such'"):
        DirectHosts(StartOptions(hosts=ddp_notebook.Ssh("one:1", sync="no/such")))
    (project / "huge.bin").write_bytes(bytes(70 << 20))
    try:
        with pytest.raises(
            StartError, match=r"huge.bin cannot be written on (one|two): .*the disk of that host is full"
        ):
            session._hosts.sync_first(lambda: None, lambda _: None)
    finally:
        (project / "huge.bin").unlink()


def test_a_rank_that_is_replaced_begins_in_the_folder_too(session, project):
    with pytest.raises(RankDiedError):
        session.run("if rank: os.kill(os.getpid(), 9)\ndist.barrier()", quiet=True)
    session.ranks.heal()
    session.run("import os", quiet=True)
    assert said(session, "os.getcwd()") == [str(project)] * 2
