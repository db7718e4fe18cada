"""The browser of the browser tests: Debian's chromium, installed if allowed."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from typing import NoReturn

import pytest

ARGUMENTS = (
    "--no-sandbox",  # root in a container has no sandbox
    "--disable-gpu",
    # No background network traffic.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
)


def executable() -> str:
    """Return the path of chromium. If it cannot be installed, skip the test (in CI: fail it)."""
    missing = _missing_packages()
    if missing:
        _install(missing)
    return shutil.which("chromium") or _give_up("apt-get installed chromium, but it is not on the PATH")


def _missing_packages() -> list[str]:
    missing = [] if shutil.which("chromium") else ["chromium"]
    try:
        ctypes.CDLL("libatomic.so.1")  # the driver of playwright is linked with it
    except OSError:
        missing.append("libatomic1")
    return missing


def _install(packages: list[str]) -> None:
    names = " ".join(packages)
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        _give_up(f"not installed: {names} (on Debian: apt-get install {names})")
    for command in ("apt-get update", f"apt-get install -y --no-install-recommends {names}"):
        result = subprocess.run(
            command.split(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
        if result.returncode:
            last_words = (result.stderr.strip().splitlines() or ["no message"])[-1]
            _give_up(f"not installed: {names}, and {command} failed: {last_words}")


def _give_up(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
