"""Folders that cannot be written to: another folder is used, or one sentence names the folder and the remedy."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from pathlib import Path

import pytest

from ddp_notebook.errors import StartError, UsageError
from ddp_notebook.launch.starters import launchers
from ddp_notebook.launch.starters.starter import shared_folder
from ddp_notebook.launch.transports import folders
from ddp_notebook.registry import entries, private
from tests.test_exhausted import AS_ROOT, in_program, mounted

pytestmark = [AS_ROOT, pytest.mark.processes]
_SENTENCE = "{folder}, where this session keeps files, cannot be written to: Read-only file system; set {variable} to"


@pytest.fixture
def read_only(tmp_path):
    """Return an empty folder of a read-only file system."""
    with mounted(tmp_path / "mounted", "size=1m") as folder:
        (folder / "inside").mkdir(mode=0o700)
        (folder / "inside" / "profile_mine").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield folder / "inside"


def test_a_runtime_directory(read_only, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(read_only))
    assert entries.folder() == Path(f"/tmp/ddp_notebook_{os.getuid()}")
    folders.remove(folders.make("ddp_notebook-"))


def test_a_directory_for_temporary_files(read_only, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(read_only))
    with pytest.raises(StartError, match=re.escape(_SENTENCE.format(folder=read_only, variable="TMPDIR"))):
        folders.make("ddp_notebook-", is_large=True)


def test_no_directory_for_temporary_files(monkeypatch):
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc"])
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(StartError, match="no directory for temporary files can be written to: set TMPDIR to one"):
        private.temporary()


def test_no_folder_for_registered_sessions(read_only, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(read_only))
    monkeypatch.setattr(entries, "_ELSEWHERE", str(read_only))
    with pytest.raises(UsageError, match="cannot be created: Read-only file system; set XDG_RUNTIME_DIR to a folder"):
        entries.folder()


def test_the_folder_that_hosts_share(read_only, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(read_only))
    folder = read_only / ".cache" / "ddp_notebook"
    with pytest.raises(StartError, match=re.escape(_SENTENCE.format(folder=folder, variable="XDG_CACHE_HOME"))):
        shared_folder()


def test_other_shortages_are_not_blamed_on_the_folder(tmp_path):
    with pytest.raises(OSError, match="Too many open files"), private.writing_to(tmp_path, "TMPDIR"):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_the_folder_of_profiles(read_only, monkeypatch, recwarn):
    """IPython itself would warn, and search in an empty folder."""
    monkeypatch.setenv("IPYTHONDIR", str(read_only))
    assert launchers.profile_dir("mine") == read_only / "profile_mine"
    with pytest.raises(UsageError, match=re.escape(f"profile 'other' does not exist in {read_only}; ipython profile")):
        launchers.profile_dir("other")
    assert not recwarn.list


@pytest.mark.long
def test_sessions_without_any_folder_of_the_user(tmp_path):
    """Plain and kept sessions start, run and stop if all folders of the user are read-only."""
    program = """
import ddp_notebook
for options in ({}, {"keep": ddp_notebook.Keep(hours=1)}):
    with ddp_notebook.start(2, **options) as session:
        print(session.run("t = torch.ones(1); dist.all_reduce(t); t.item()", quiet=True)[1].result)
        print(session.ranks.heal(), session.pull("t")[1].item())
"""
    with mounted(tmp_path / "mounted", "size=1m") as folder:
        (folder / "inside").mkdir(mode=0o700)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        inside = str(folder / "inside")
        names = ("HOME", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "IPYTHONDIR")
        lines = in_program(f"import os; os.chdir({inside!r})\n{program}", **dict.fromkeys(names, inside))
    assert [line.strip("'") for line in lines] == ["2.0", "['no rank has died'] 2.0"] * 2
