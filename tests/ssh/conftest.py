"""An ssh server of the tests' own, and a Python that it runs."""

from __future__ import annotations

import tempfile

import pytest

from ddp_notebook.launch import warm
from tests.ssh import sshd


@pytest.fixture(autouse=True)
def no_notebook(monkeypatch):
    """Hosts do not wait for a next session, as they do for a notebook; tests before these may have been one."""
    monkeypatch.setattr(warm, "_is_preparing", False)


@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    """The folder of an ssh server's keys."""
    directory = tmp_path_factory.mktemp("sshd")
    with sshd.running(directory) as command, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_NOTEBOOK_SSH", command)
        patch.setenv("OF_THE_NOTEBOOK", "alone")
        yield directory


@pytest.fixture(scope="module")
def python(ssh):
    """Its shell prints a greeting, and has a variable of its own; it does not see the session's directory."""
    return sshd.python(ssh, first="echo welcome to one", variable="OF_THE_HOST=yes", without=tempfile.gettempdir())
