"""Synchronization of a folder: the selected files, the action for each file, and how a host writes them."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from dataclasses import replace

import pytest

from ddp_notebook.errors import UsageError
from ddp_notebook.launch.host.files import NOTE, Files, digest
from ddp_notebook.launch.hosts import DirectHosts
from ddp_notebook.launch.options import Ssh, StartOptions
from ddp_notebook.launch.sync import selection
from ddp_notebook.launch.sync.selection import SyncEntry, choose, may_hold_keys, names, resolved
from ddp_notebook.launch.sync.upload import Plan
from ddp_notebook.messages.hosts import (
    CompareReply,
    CompareRequest,
    DiscardRequest,
    DoneReply,
    FileDigest,
    FileErrorReply,
    FilePart,
    FolderReply,
    FolderRequest,
    FoundFile,
    MarkRequest,
    NamesReply,
    NamesRequest,
    StatRequest,
    WriteRequest,
)
from ddp_notebook.records.marker import MARK
from tests.conftest import is_within


def make(folder, *paths, **texts):
    """Write files into a folder. `texts` gives the content; for `paths` the content is the path."""
    for path in paths:
        texts.setdefault(path, path)
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def git(folder, *words):
    subprocess.run(["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a", *words], check=True)


# ---- which there are

IGNORED = {
    ".gitignore": "*.log\n/build/\ndata/*\n!data/keep.csv\n",
    "sub/.gitignore": "!kept.log\n/local.py\n",
}
LISTED = [".gitignore", "a.py", "data/keep.csv", "sub/.gitignore", "sub/build/x", "sub/deep/local.py", "sub/kept.log"]


def make_ignoring(folder):
    make(folder, *LISTED, "a.log", "build/x", "data/big.csv", "sub/local.py", "__pycache__/a.pyc", **IGNORED)


@pytest.mark.processes
@pytest.mark.parametrize("is_repository", [True, False])
def test_what_git_ignores_is_not_listed(tmp_path, is_repository):
    if is_repository:
        git(tmp_path, "init", "--quiet")
    make_ignoring(tmp_path)
    assert names(tmp_path) == LISTED


@pytest.mark.processes
def test_what_is_tracked_is_listed_though_it_is_ignored(tmp_path):
    git(tmp_path, "init", "--quiet")
    make(tmp_path, "a.log", "b.log", "gone.py", **{".gitignore": "*.log"})
    git(tmp_path, "add", "--force", "a.log", "gone.py")
    (tmp_path / "gone.py").unlink()
    assert [entry.path for entry in choose(tmp_path).entries] == [".gitignore", "a.log"]


@pytest.mark.processes
def test_a_part_of_a_work_tree_has_the_rules_of_the_whole(tmp_path):
    git(tmp_path, "init", "--quiet")
    make(tmp_path, "part/a.py", "part/a.log", "other.py", **{".gitignore": "*.log\n/ignored/"})
    make(tmp_path, "ignored/b.py", "ignored/b.log", **{"ignored/.gitignore": "b.log"})
    assert names(tmp_path / "part") == ["a.py"]
    assert names(tmp_path / "ignored") == [".gitignore", "b.py"], "which was asked for by its name"


@pytest.mark.processes
def test_a_repository_within_has_its_own_rules(tmp_path):
    for folder in (tmp_path, tmp_path / "within"):
        folder.mkdir(exist_ok=True)
        git(folder, "init", "--quiet")
    make(tmp_path, "a.py", "within/b.py", "within/b.log", **{"within/.gitignore": "*.log"})
    assert names(tmp_path) == ["a.py", "within/.gitignore", "within/b.py"]
    git(tmp_path / "within", "add", ".")
    git(tmp_path / "within", "commit", "--quiet", "--message", "b")
    git(tmp_path, "-c", "advice.addEmbeddedRepo=false", "add", ".")  # like a submodule
    assert names(tmp_path) == ["a.py", "within/.gitignore", "within/b.py"]


@pytest.mark.processes
def test_a_submodule_that_is_not_checked_out_has_no_files(tmp_path):
    git(tmp_path, "init", "--quiet")
    make(tmp_path, "a.py")
    git(tmp_path, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},sub")
    (tmp_path / "sub").mkdir()
    assert names(tmp_path) == ["a.py"]


@pytest.mark.processes
def test_environments_and_caches_are_not_listed(tmp_path):
    make(tmp_path, "a.py", "env/pyvenv.cfg", "env/lib/b.py", "envs.py", ".ipynb_checkpoints/a.ipynb", "sub/.hg/x")
    assert names(tmp_path) == ["a.py", "envs.py"]


@pytest.mark.processes
def test_odd_names_are_listed(tmp_path):
    odd = ["a b.py", "new\nline", "ü.py", os.fsdecode(b"\xff.py"), "-x", '"q"']
    for name in odd:
        (tmp_path / name).touch()
    assert sorted(names(tmp_path)) == sorted(odd)


@pytest.mark.processes
def test_without_git(tmp_path, monkeypatch):
    make(tmp_path, "a.py", "sub/b.py", ".git/config", "env/pyvenv.cfg", "env/c.py")
    (tmp_path / "link").symlink_to("sub")
    monkeypatch.setenv("PATH", "")
    assert names(tmp_path) == ["a.py", "link", "sub/b.py"]
    (tmp_path / "sub" / ".gitignore").write_text("*.log")
    with pytest.raises(UsageError, match=r"sub has a \.gitignore, which only git can apply; install git"):
        names(tmp_path)


# ---- which are sent


@pytest.mark.parametrize(
    "name",
    ["id_rsa", ".ssh/config", "certs/tls.PEM", "a.key", ".env", ".env.local", ".aws/x", ".netrc", "kubeconfig.yaml"],
)
def test_names_of_keys(name):
    assert may_hold_keys(name)


@pytest.mark.parametrize("name", ["id_rsa.pub", "keys.py", "credentials.py", ".env.example", "env.yaml", "monkey"])
def test_names_that_are_none_of_keys(name):
    assert not may_hold_keys(name)


@pytest.mark.processes
def test_keys_are_sent_when_they_are_named(tmp_path):
    make(tmp_path, "a.py", ".env", "certs/a.pem", "certs/b.pem")
    left = choose(tmp_path)
    assert [entry.path for entry in left.entries] == ["a.py"] and left.keys == [".env", "certs/a.pem", "certs/b.pem"]
    named = choose(tmp_path, also=["./.env", "certs/a*"])
    assert [entry.path for entry in named.entries] == [".env", "a.py", "certs/a.pem"] and named.keys == ["certs/b.pem"]


@pytest.mark.processes
def test_links_stay_in_the_folder_and_outside_targets_are_listed(tmp_path):
    folder = tmp_path / "folder"
    make(tmp_path, "secret.txt", "folder/sub/a.py")
    for name, target in {
        "absolute": folder / "sub" / "a.py",
        "sub/up": "../sub",
        "out": "../secret.txt",
        "etc": "/etc",
        "round": "../folder/sub/a.py",
        "broken": "nothing",
    }.items():
        (folder / name).symlink_to(target)
    chosen = choose(folder)
    links = {entry.path: entry.link for entry in chosen.entries if entry.link}
    assert links == {"absolute": "sub/a.py", "sub/up": ".", "round": "sub/a.py", "broken": "nothing"}
    assert chosen.leading_out == ["etc", "out"]


@pytest.mark.processes
def test_pipes_and_sockets_are_left_out(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    make(tmp_path, "a.py", f"{MARK}of-another-one")
    assert [entry.path for entry in choose(tmp_path).entries] == ["a.py"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("limit", "most", "words"),
    [
        (
            "MOST_BYTES",
            4000,
            "12 files (4.1 kB) to send: data/ 2 files (4.0 kB), a.py 1 file (50 B), many/ 9 files (9 B);",
        ),
        (
            "MOST_FILES",
            11,
            "12 files (4.1 kB) to send: many/ 9 files (9 B), data/ 2 files (4.0 kB), a.py 1 file (50 B);",
        ),
    ],
)
def test_a_large_folder_is_sent_on_demand_only(tmp_path, monkeypatch, limit, most, words):
    make(tmp_path, **{"a.py": "x" * 50, "data/a": "x" * 2000, "data/b": "x" * 2000})
    make(tmp_path, **{f"many/{i}.txt": "x" for i in range(9)})
    monkeypatch.setattr(selection, limit, most)
    with pytest.raises(UsageError) as error:
        choose(tmp_path)
    assert words in str(error.value) and "--sync-large (sync_large=True) or %ddp_sync --large" in str(error.value)
    assert len(choose(tmp_path, is_large=True).entries) == 12
    monkeypatch.setattr(selection, limit, 5000)
    assert len(choose(tmp_path).entries) == 12


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("no/such", "must exist, got 'no/such'"),
        ("~", "must not be the home or root folder"),
        ("/", "must not be the home or root folder, got /;"),
    ],
)
def test_folders_that_cannot_be_sent(folder, words):
    with pytest.raises(UsageError, match=words):
        resolved(folder)


# ---- what is done about each

OLD, NEW = 10**18, 2 * 10**18


def planned(entry, its, overwrite=False):
    plan = Plan()
    plan.add([entry], [its], overwrite=overwrite)
    return plan


FILE = SyncEntry(path="a", size=3, mtime_ns=OLD, mode=0o644)
LINK = SyncEntry(path="a", size=0, mtime_ns=OLD, mode=0, link="b")


@pytest.mark.parametrize(
    ("entry", "its"),
    [
        (FILE, None),
        (FILE, FoundFile("file", 4, OLD - 1, 0o644)),
        (FILE, FoundFile("file", 3, OLD, 0o755)),  # only the mode differs: the new file is not executable
        (FILE, FoundFile("link", 1, OLD, 0o777, "b")),
        (LINK, None),
        (LINK, FoundFile("link", 1, OLD, 0o777, "c")),
        (LINK, FoundFile("file", 1, OLD, 0o644)),
    ],
)
def test_what_is_sent(entry, its):
    assert planned(entry, its) == Plan(send=[entry])


@pytest.mark.parametrize(
    ("entry", "its"), [(FILE, FoundFile("file", 3, OLD, 0o600)), (LINK, FoundFile("link", 1, NEW, 0o777, "b"))]
)
def test_what_is_there(entry, its):
    assert planned(entry, its) == Plan(there=1)


@pytest.mark.parametrize(
    ("entry", "its"),
    [
        (FILE, FoundFile("file", 4, NEW, 0o644)),
        (FILE, FoundFile("link", 1, NEW, 0o777, "b")),
        (LINK, FoundFile("link", 1, NEW, 0o777, "c")),
        (LINK, FoundFile("file", 1, NEW, 0o644)),
    ],
)
def test_newer_files_on_the_host_are_kept_without_overwrite(entry, its):
    assert planned(entry, its) == Plan(newer=["a"])
    assert planned(entry, its, overwrite=True) == Plan(send=[entry])


@pytest.mark.parametrize("time_ns", [OLD - 1, NEW])
def test_the_content_decides_where_only_times_differ(time_ns):
    its = FoundFile("file", 3, time_ns, 0o644)
    plan = planned(FILE, its)
    assert plan == Plan(ask=[(FILE, its)])
    plan.add_compared(FILE, its, is_same=True, overwrite=False)
    assert plan.there == 1 and not plan.send
    plan.add_compared(FILE, its, is_same=False, overwrite=False)
    assert (plan.send, plan.newer) == (([FILE], []) if time_ns < OLD else ([], ["a"]))


def test_a_folder_is_in_the_way():
    assert planned(FILE, FoundFile("other", 4096, OLD, 0o755), overwrite=True) == Plan(in_the_way=["a"])


# ---- on the host


@pytest.fixture
def files():
    return Files()


def write(files, folder, *parts, data=b""):
    return ask(files, WriteRequest(folder=str(folder), parts=list(parts), data=data))


def ask(files, request):
    return files.handlers[type(request)](request)


def test_parts_become_files(files, tmp_path):
    done = write(
        files,
        tmp_path,
        FilePart("sub/run.sh", 2, end=(0o750, OLD)),
        FilePart("empty", 0, end=(0o600, OLD)),
        FilePart("link", link="sub"),
        FilePart("long", 3),
        data=b"hilon",
    )
    assert done == DoneReply()
    its = (tmp_path / "sub/run.sh").stat()
    assert (tmp_path / "sub/run.sh").read_text() == "hi" and (its.st_mode & 0o777, its.st_mtime_ns) == (0o750, OLD)
    assert os.readlink(tmp_path / "link") == "sub" and (tmp_path / "empty").read_bytes() == b""
    assert not (tmp_path / "long").exists(), "it is not whole"
    assert write(files, tmp_path, FilePart("long", 1, is_first=False, end=(0o644, OLD)), data=b"g") == DoneReply()
    assert (tmp_path / "long").read_text() == "long"
    assert not list(tmp_path.rglob(f"{MARK}*"))


def test_what_is_not_whole_goes_and_what_was_there_stays(files, tmp_path):
    make(tmp_path, a="before")
    write(files, tmp_path, FilePart("a", 3), FilePart("b", 3), data=b"abcdef")
    assert len(list(tmp_path.iterdir())) == 3
    write(files, tmp_path, FilePart("b", discard=True))
    ask(files, MarkRequest(folder=str(tmp_path), name=f"{MARK}x"))
    names = NamesRequest(folder=str(tmp_path), names=["a", f"{MARK}x", "y"])
    assert ask(files, names) == NamesReply(names=["a", f"{MARK}x"])
    ask(files, DiscardRequest())
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "before"


def test_what_cannot_be_written_is_told(files, tmp_path):
    make(tmp_path, file="")
    for path, number in ("file/a", errno.EEXIST), ("file/sub/a", errno.ENOTDIR):
        done = write(files, tmp_path, FilePart(path, 1, end=(0o644, OLD)), data=b"x")
        assert done == FileErrorReply(path=path, number=number, error=os.strerror(number))


def test_what_is_there_is_told(files, tmp_path):
    make(tmp_path, a="abc")
    (tmp_path / "link").symlink_to("a")
    os.utime(tmp_path / "a", ns=(OLD, OLD))
    os.chmod(tmp_path / "a", 0o640)
    paths = ["a", "link", ".", "a/b", "none"]
    found = ask(files, StatRequest(folder=str(tmp_path), paths=paths)).found
    assert found[0] == FoundFile("file", 3, OLD, 0o640)
    assert (found[1].kind, found[1].link, found[2].kind, found[3:]) == ("link", "a", "other", [None, None])


def test_contents_are_compared_in_steps(files, tmp_path):
    make(tmp_path, a="abc", b="abc", c="abd")
    (tmp_path / "large").write_bytes(bytes(64 << 20))
    *_, wanted = digest(str(tmp_path / "a"))
    of = [FileDigest(name, wanted, OLD) for name in ("large", "a", "b", "c", "none")]
    work = ask(files, CompareRequest(folder=str(tmp_path), files=of))
    steps, longest_s = 0, 0.0
    reply = None
    while reply is None:
        began = time.monotonic()
        reply = work.advance()
        steps, longest_s = steps + 1, max(longest_s, time.monotonic() - began)
    assert reply == CompareReply(same=[False, True, True, False, False])
    assert is_within(longest_s, 1.0), "the server answers meanwhile"
    assert (tmp_path / "a").stat().st_mtime_ns == OLD != (tmp_path / "c").stat().st_mtime_ns


def test_where_a_folder_goes(files, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "mark").touch()
    (tmp_path / "file").touch()

    def settle(path, marker):
        return ask(files, FolderRequest(path=str(tmp_path / path), marker=marker))

    assert settle("shared", "mark") == FolderReply(folder=str(tmp_path / "shared"), is_shared=True)
    assert settle("shared", "other") == FolderReply(folder=str(tmp_path / "shared"), is_shared=False)
    assert settle("new/folder", "mark") == FolderReply(folder=str(tmp_path / "new/folder"), is_shared=False)
    assert settle("file/folder", "mark") == FolderReply(folder=str(tmp_path / "home/folder"), is_shared=False)
    assert settle("file/folder", "mark") == FolderReply(folder=str(tmp_path / "home/folder"), is_shared=False), "again"
    (tmp_path / "home" / "folder" / "mark").touch()
    assert settle("file/folder", "mark").is_shared, "by another path"
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert isinstance(settle("file/folder", "mark"), FileErrorReply)


def test_a_folder_at_home_that_has_other_files_is_not_taken(files, tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    make(tmp_path, "file", "home/folder/of-another-one", "home/empty/.ddp_notebook-being-written")

    def settle(path):
        return ask(files, FolderRequest(path=str(tmp_path / "file" / path), marker="none"))

    refused = FolderReply(folder=str(home / "folder"), is_of="")
    assert settle("folder") == refused
    (home / "folder" / NOTE).write_text("\n")  # the user allows the existing folder
    assert settle("folder").is_of is None and settle("folder").is_of is None
    assert settle("sub/folder") == replace(refused, is_of=str(tmp_path / "file/folder")), "which has the same name"
    assert settle("empty").is_of is None


def test_links_to_folders_are_not_followed(files, tmp_path):
    make(tmp_path, "elsewhere/a", "folder/file")
    (tmp_path / "folder" / "link").symlink_to("../elsewhere")
    (tmp_path / "folder" / "nowhere").symlink_to("nothing")
    paths = ["link/a", "link/sub/b", "nowhere/c", "file", "link"]
    found = ask(files, StatRequest(folder=str(tmp_path / "folder"), paths=paths)).found
    assert [its.kind for its in found] == ["behind", "behind", "behind", "file", "link"]
    for path in paths[:3]:
        done = write(files, tmp_path / "folder", FilePart(path, 1, end=(0o644, OLD)), data=b"x")
        assert (done.path, done.number) == (path, errno.ELOOP)
    assert os.listdir(tmp_path / "elsewhere") == ["a"] and (tmp_path / "elsewhere/a").read_text() == "elsewhere/a"
    assert planned(FILE, found[0], overwrite=True) == Plan(behind=["a"])


@pytest.mark.processes
def test_sync_uses_the_working_directory_of_the_start(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    monkeypatch.setenv("DDP_NOTEBOOK_SSH", "false")  # the test needs no host
    monkeypatch.chdir(tmp_path)
    hosts = DirectHosts(StartOptions(hosts=Ssh("one", sync=".")))
    try:
        monkeypatch.chdir("sub")
        assert hosts._folder == str(tmp_path)
    finally:
        hosts.end()
