"""`--check` by ssh, with one machine under several names: reachable and unreachable hosts, and cleanup."""

from __future__ import annotations

import re

import pytest

import ddp_notebook
from ddp_notebook.errors import StartError
from tests.conftest import marked_processes, wait_until
from tests.ssh import sshd


@pytest.mark.long
def test_every_host_is_a_row(python):
    before = marked_processes()
    table = ddp_notebook.check(
        hosts=ddp_notebook.Ssh("one:1,two:2,nobody-listens,wants-a-password,unknown-key,nowhere.invalid", python=python)
    )
    titles, *rows = repr(table).splitlines()[:7]
    assert [row.split()[0] for row in rows] == [answer.host for answer in table.answers]
    one, two, *lost = rows
    assert "127.0.0.1" in one and "127.0.0.2" in two and one.count("the same") == two.count("the same") == 1
    assert titles.split()[:3] == ["host", "reached", "at"] and one.index("127.0.0.1") == titles.index("reached at")
    for row, fix in zip(
        lost,
        [
            "no ssh server answers there",
            "set up a key: ssh-copy-id wants-a-password",
            "run ssh unknown-key once in a terminal and accept its host key",
            "check the spelling of the name, and ~/.ssh/config",
        ],
        strict=True,
    ):
        assert re.search(rf"not reached\*: .*{re.escape(fix)}$", row)
    assert table.unreached == ["nobody-listens", "wants-a-password", "unknown-key", "nowhere.invalid"]
    assert not table.fits and ddp_notebook.current() is None
    wait_until(lambda: marked_processes() <= before)


@pytest.mark.long
def test_what_would_start_is_said(python):
    table = ddp_notebook.check(hosts=ddp_notebook.Ssh("one:1,two:2", python=python))
    assert table.fits
    assert repr(table).endswith(
        "they reach each other: 2 connections were tried\n3 ranks would start, by gloo: 1 on one, 2 on two"
    )


@pytest.mark.long
def test_another_version_is_told_with_the_table(ssh):
    """The message appears before ranks start, with the other facts of the hosts."""
    folder = ssh / "older"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import ddp_notebook.version; ddp_notebook.version.__version__ = '0.0.9'")
    older = sshd.python(ssh, variable=f'PYTHONPATH="{folder}:$PYTHONPATH"')
    words = "ddp_notebook differs between hosts: .* on the notebook, 0.0.9 on one and two; install one version"
    with pytest.raises(StartError, match=words) as told:
        ddp_notebook.start(hosts=ddp_notebook.Ssh("one:1,two:1", python=older))
    assert str(told.value).count(" 0.0.9*") == 2
