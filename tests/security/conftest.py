"""The second user."""

from __future__ import annotations

import pwd
import subprocess

import pytest

_NAME = "ddp-nb-stranger"


@pytest.fixture(scope="module")
def stranger():
    """Return the id of a second user of this machine."""
    added = subprocess.run(["useradd", "--system", "--no-create-home", _NAME], capture_output=True, text=True)
    if added.returncode not in (0, 9):  # 9: the name exists
        pytest.skip(f"useradd: {added.stderr.strip()}")
    return pwd.getpwnam(_NAME).pw_uid  # the user stays: another worker may use it
