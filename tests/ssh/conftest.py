"""An ssh server of the tests, and a Python that it runs."""

from __future__ import annotations

import tempfile

import pytest

from ddp_notebook.launch import warm
from tests.ssh import sshd


@pytest.fixture(autouse=True)
def no_notebook(monkeypatch):
    """Prevent hosts from waiting for a next session, as they do for a notebook. Earlier tests may have loaded one."""
    monkeypatch.setattr(warm, "_is_preparing", False)


@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    """Return the folder of the ssh server's keys."""
    directory = tmp_path_factory.mktemp("sshd")
    with sshd.running(directory) as command, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_NOTEBOOK_SSH", command)
        patch.setenv("OF_THE_NOTEBOOK", "alone")
        yield directory


@pytest.fixture(scope="module")
def python(ssh):
    """Return a Python whose shell prints a greeting and has its own variable. It cannot see the session's directory."""
    return sshd.python(ssh, first="echo welcome to one", variable="OF_THE_HOST=yes", without=tempfile.gettempdir())
