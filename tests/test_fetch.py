"""Copies of files from ranks to the notebook."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ddp_notebook.errors import CannotWriteError, DDPNotebookError, UsageError
from ddp_notebook.magics import DDPMagics
from ddp_notebook.rank import files
from ddp_notebook.run.files import fetching
from ddp_notebook.run.files.fetching import File
from ddp_notebook.run.files.landing import Landing
from ddp_notebook.run.progress import shown

OLD = 10**18


@pytest.fixture
def folder(tmp_path):
    """Create the working folder of the ranks."""
    made = tmp_path / "ranks"
    for path in ("a.txt", "runs/1/model.pt", "runs/1/log.txt", "runs/2/model.pt", "runs/.hidden", "[odd].txt"):
        (made / path).parent.mkdir(parents=True, exist_ok=True)
        (made / path).write_text(path)
    os.chmod(made / "a.txt", 0o755)
    os.utime(made / "a.txt", ns=(OLD, OLD))
    (made / "empty").mkdir()
    return made


# ---- in a rank


def test_files_of_two_hosts_are_compared_by_their_contents(folder):
    """Written in the same clock tick, and each the first file of its file system."""
    [one] = files.find(f"{folder}/a.txt")
    with open(folder / "a.txt", "r+") as file:
        file.write("A")
    os.utime(folder / "a.txt", ns=(OLD, OLD))
    [other] = files.find(f"{folder}/a.txt")
    assert one[:-1] == other[:-1] and one != other


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.txt", ["a.txt"]),
        ("runs/1/model.pt", ["model.pt"]),
        ("./runs/1", ["1/log.txt", "1/model.pt"]),
        ("runs/", ["runs/.hidden", "runs/1/log.txt", "runs/1/model.pt", "runs/2/model.pt"]),
        ("runs/*/model.pt", ["1/model.pt", "2/model.pt"]),
        ("runs/1/*.pt", ["model.pt"]),
        ("**/*.txt", ["[odd].txt", "a.txt", "runs/1/log.txt"]),
        ("[odd].txt", ["[odd].txt"]),
    ],
)
def test_files_are_found_as_a_shell_would(folder, monkeypatch, pattern, names):
    monkeypatch.chdir(folder)
    for one in (pattern, f"{folder}/{pattern}"):
        assert sorted(found[1] for found in files.find(one)) == names


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("none", "no file matches 'none' in the working directory {}"),
        ("*.pt", "no file matches '*.pt' in the working directory {}"),
        ("empty", "'empty' contains no files ({}/empty)"),
    ],
)
def test_what_is_not_there(folder, monkeypatch, pattern, words):
    monkeypatch.chdir(folder)
    with pytest.raises(files.CannotFetchError) as error:
        files.find(pattern)
    assert str(error.value) == words.format(folder)


@pytest.mark.parametrize("pattern", ["~", "~/", "..", "../..", "/", "link", "~/notes/.."])
def test_the_home_folder_and_folders_above_it_are_refused(tmp_path, monkeypatch, pattern):
    notes = tmp_path / "home" / "notes"
    notes.mkdir(parents=True)
    (notes / "a.txt").touch()
    (notes / "link").symlink_to(tmp_path / "home")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(notes)
    with pytest.raises(files.CannotFetchError, match="must not be the home folder or a folder above it"):
        files.find(pattern)
    assert [found[1] for found in files.find("~/notes")] == ["notes/a.txt"]


def test_more_than_20000_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "many").mkdir()
    for number in range(20_001):
        os.close(os.open(f"many/{number}", os.O_CREAT))
    for pattern in ("many", "many/*", "**", "man*"):
        with pytest.raises(files.CannotFetchError, match="has more than 20,000 files"):
            files.find(pattern)
    os.unlink("many/0")
    assert len(files.find("many")) == 20_000


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("runs/*/../a.txt", []),
        ("run*/../a.txt", ["a.txt"]),
        ("runs/*/../../a.txt", ["a.txt"]),
        ("runs/1/../2/*.pt", ["model.pt"]),
        ("runs/[1]/../2/*.pt", ["model.pt"]),
        ("../ranks/run*/../*.txt", ["[odd].txt", "a.txt"]),
    ],
)
def test_no_name_leads_out_of_the_target_folder(folder, monkeypatch, pattern, names):
    monkeypatch.chdir(folder)
    if not names:
        with pytest.raises(files.CannotFetchError):
            files.find(pattern)
    else:
        assert sorted(found[1] for found in files.find(pattern)) == names


def test_a_file_that_changes_is_not_read(folder):
    [(path, _, size, mtime_ns, *_)] = files.find(str(folder / "a.txt"))
    assert files.read([(path, 1, 3, size, mtime_ns), (path, 0, 1, size, mtime_ns)]) == b".txa"
    (folder / "a.txt").write_text("A.txt")
    with pytest.raises(files.CannotFetchError, match=r"a.txt is being written: it changed while it was read"):
        files.read([(path, 1, 3, size, mtime_ns)])


# ---- here


def test_files_are_asked_for_in_segments(monkeypatch):
    monkeypatch.setattr(fetching, "_SEGMENT_BYTES", 10)
    monkeypatch.setattr(fetching, "_MOST_PARTS", 3)
    sizes = {"a": (0, 4), "b": (0, 17), "c": (0, 0), "d": (0, 1), "e": (1, 2)}
    of = {Path(name): (rank, File(name, name, size, OLD, 0o644, 1, "")) for name, (rank, size) in sizes.items()}
    segments = [
        (rank, [(target.name, offset, nbytes) for target, _, offset, nbytes in parts])
        for rank, parts in fetching._segments(of)
    ]
    assert segments == [
        (0, [("a", 0, 4), ("b", 0, 6)]),
        (0, [("b", 6, 10)]),
        (0, [("b", 16, 1), ("c", 0, 0), ("d", 0, 1)]),
        (1, [("e", 0, 2)]),
    ]


def test_a_file_has_its_name_when_it_is_whole(tmp_path):
    target = tmp_path / "sub" / "a"
    with Landing(overwrite=False) as landing:
        landing.write(target, b"ab")
        assert not target.exists()
        landing.write(target, b"c")
        landing.end(target, 0o640, OLD)
        its = target.stat()
        assert (target.read_bytes(), its.st_mode & 0o777, its.st_mtime_ns) == (b"abc", 0o640, OLD)
        landing.write(tmp_path / "half", b"ab")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "sub"] and landing.written == [target]
    with Landing(overwrite=False) as landing:
        landing.write(target, b"x")
        with pytest.raises(DDPNotebookError, match="a cannot be written here: File exists; name another folder"):
            landing.end(target, 0o640, OLD)
    assert target.read_bytes() == b"abc" and len(list(target.parent.iterdir())) == 1


def test_an_arriving_file_is_private_and_gets_no_setuid_bit(tmp_path):
    with Landing(overwrite=False) as landing:
        landing.write(tmp_path / "a", b"secret")
        [arriving] = tmp_path.iterdir()
        assert arriving.stat().st_mode & 0o777 == 0o600
        landing.end(tmp_path / "a", 0o4755, OLD)
    assert (tmp_path / "a").stat().st_mode & 0o7777 == 0o755


def test_a_file_system_without_hard_links_takes_files_too(tmp_path, monkeypatch):
    def link(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    target = tmp_path / "a"
    with Landing(overwrite=False) as landing:
        landing.write(target, b"ab")
        landing.end(target, 0o640, OLD)
        landing.write(target, b"cd")
        with pytest.raises(DDPNotebookError, match="a cannot be written here: File exists"):
            landing.end(target, 0o640, OLD)
    assert target.read_bytes() == b"ab" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../../b"])
def test_no_rank_writes_beside_the_folder(name):
    with pytest.raises(DDPNotebookError, match=r"rank 3 sent the path .* outside the folder; nothing was fetched"):
        fetching._listed(3, json.dumps([["/x", name, 1, OLD, 0o644, 1, ""]]).encode())


def test_a_link_that_leads_out_of_the_target_folder_is_refused(tmp_path):
    target, outside = tmp_path / "target", tmp_path / "outside"
    for made in (target / "own", outside):
        made.mkdir(parents=True)
    (target / "runs").symlink_to(outside)
    (target / "inner").symlink_to(target / "own")
    for name in ("inner/a", "b/c/d", "a"):
        fetching._check_links([File("a", name, 1, OLD, 0o644, 1, "")], target)
    for name in ("runs/a", "runs/b/c"):
        with pytest.raises(DDPNotebookError, match=r"runs.* leads out of the target folder, to .*outside"):
            fetching._check_links([File("a", name, 1, OLD, 0o644, 1, "")], target)


def test_a_line_of_progress(capsys, monkeypatch):
    monkeypatch.setattr("ddp_notebook.run.progress._EVERY_S", -1.0)
    monkeypatch.setattr("ddp_notebook.run.progress._FIRST_S", -1.0)
    with shown("starting:") as report:
        for text in ("hosts 1 s", "\r10 of 20 MB", "\r9 MB", "sync 2 s", "group 3 s"):
            report(text)
    line, longer = "starting:  hosts 1 s", "starting:  hosts 1 s  10 of 20 MB"
    shorter = f"{line}  9 MB"
    assert capsys.readouterr().out == (
        f"{line}\r{longer}\r{' ' * len(longer)}\r{shorter}\r{line}  sync 2 s  group 3 s\n"
    )
    with shown("sync:") as report:
        report("\r10 MB")
    assert capsys.readouterr().out == "\rsync:  10 MB\r            \r"
    with shown("sending:"):
        pass
    assert capsys.readouterr().out == ""


# ---- both


@pytest.fixture
def ranks(session, folder):
    """Start a session whose ranks are in the folder."""
    session.run(f"import os; os.chdir({str(folder)!r})", quiet=True)
    yield session
    session.run("os.chdir('/')", quiet=True)


@pytest.mark.long
def test_one_file_of_all_ranks_comes_once(ranks, tmp_path):
    fetched = ranks.files.fetch("a.txt", to=tmp_path / "to")
    assert list(fetched) == [tmp_path / "to" / "a.txt"]
    its = fetched[0].stat()
    assert (fetched[0].read_text(), its.st_mode & 0o777, its.st_mtime_ns) == ("a.txt", 0o755, OLD)
    assert repr(fetched) == f"1 file (5 B) of ranks 0,1, who share it, in {tmp_path}/to"
    again = ranks.files.fetch("a.txt", to=tmp_path / "to")
    assert not again and repr(again) == f"{tmp_path}/to has all 1 file (5 B) of ranks 0,1, who share it, already"


def test_ranks_that_are_elsewhere_have_files_of_their_own(ranks, tmp_path):
    ranks.run("os.chdir(f'runs/{rank + 1}')", quiet=True)
    fetched = ranks.files.fetch("*", to=tmp_path / "to")
    assert sorted(str(path.relative_to(tmp_path / "to")) for path in fetched) == [
        "rank0/log.txt",
        "rank0/model.pt",
        "rank1/model.pt",
    ]
    assert repr(fetched).splitlines()[1] == f"1 file (15 B) of rank 1 in {tmp_path}/to/rank1"
    with pytest.raises(DDPNotebookError) as error:
        ranks.files.fetch("log.txt", to=tmp_path / "to")
    assert str(error.value) == (
        f"rank 1: no file matches 'log.txt' in the working directory {tmp_path}/ranks/runs/2; nothing was fetched: "
        "name the ranks that have it, --ranks 0"
    )
    assert [path.name for path in ranks.files.fetch("log.txt", "0", tmp_path / "to")] == ["log.txt"]


def test_a_file_that_is_here_is_replaced_on_demand_only(ranks, tmp_path):
    target = tmp_path / "to" / "a.txt"
    target.parent.mkdir()
    target.write_text("mine")
    with pytest.raises(DDPNotebookError, match=r"existing files: .*/to/a.txt. Nothing was fetched: .* --overwrite"):
        ranks.files.fetch("**/*.txt", to=target.parent)
    assert [path.name for path in target.parent.iterdir()] == ["a.txt"] and target.read_text() == "mine"
    assert len(ranks.files.fetch("**/*.txt", to=target.parent, overwrite=True)) == 3
    assert target.read_text() == "a.txt"


def test_a_large_file_comes_in_pieces(ranks, folder, tmp_path):
    content = os.urandom(1 << 20) * 40
    (folder / "large.bin").write_bytes(content)
    told: list[str] = []
    [path] = ranks.files.fetch("large.bin", 0, tmp_path, report=told.append)
    assert path.read_bytes() == content
    assert told == [f"\r{done} MB of 42 MB" for done in (17, 34, 42)]


def test_an_interrupt_leaves_nothing_half(ranks, folder, tmp_path):
    with open(folder / "large.bin", "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(KeyboardInterrupt, match="interrupted: the transfer was dropped, and the ranks continue"):
        ranks.files.fetch("large.bin", 0, tmp_path / "to", report=lambda _: os.kill(os.getpid(), signal.SIGINT))
    assert list((tmp_path / "to").iterdir()) == []
    assert ranks.run("1 + 1", quiet=True)[0].result == "2"


def test_a_file_that_is_gone_meanwhile_is_told(ranks, folder, tmp_path):
    with open(folder / "large.bin", "wb") as file:
        file.truncate(40 << 20)
    with pytest.raises(DDPNotebookError, match=r"rank 0: .*large.bin cannot be read: No such file"):
        ranks.files.fetch("large.bin", 0, tmp_path / "to", report=lambda _: (folder / "large.bin").unlink())
    assert list((tmp_path / "to").iterdir()) == []


def test_a_folder_that_cannot_be_made_here(ranks, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DDPNotebookError, match=r"file/to/a.txt cannot be written here: .*; name another folder"):
        ranks.files.fetch("a.txt", to=tmp_path / "file" / "to")


def test_files_that_do_not_fit_are_refused(ranks, folder, tmp_path):
    with open(folder / "runs" / "1" / "large.bin", "wb") as file:
        file.truncate(8 << 40)  # without any block on the disk
    words = r"3 files of 8\.8 TB cannot be written to .*/to here: [\d.]+ [MGT]B of [\d.]+ [GT]B are free\. Nothing was "
    with pytest.raises(CannotWriteError, match=words):
        ranks.files.fetch("runs/1", ranks=0, to=str(tmp_path / "to"))
    assert not (tmp_path / "to").exists()
    [only] = ranks.files.fetch("runs/1/log.txt", ranks=0, to=str(tmp_path / "to"))
    assert only.read_text() == "runs/1/log.txt"


def test_the_magics(ranks, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    magics: Any = DDPMagics()
    magics.ddp_fetch("'**/*.txt' --ranks 0 --to got")
    assert capsys.readouterr().out == "3 files (28 B) of rank 0 in got\n"
    assert len(list((tmp_path / "got").rglob("*.txt"))) == 3
    with pytest.raises(UsageError, match="usage: %ddp_fetch PATH"):
        magics.ddp_fetch("")
    with pytest.raises(
        UsageError, match="only ranks on other machines need a sync; these read the notebook's own files"
    ):
        magics.ddp_sync("--overwrite --also .env a.pem --large")
