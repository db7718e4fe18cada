"""An ssh server of the tests on this machine, which it serves under several names."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import rights

SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
_CONFIG = """
Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey {directory}/hostkey
AuthorizedKeysFile {directory}/id.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PidFile none
MaxStartups 100
"""
_NAMES = """
Host one two three
  Port {port}
  UserKnownHostsFile {directory}/known_hosts
Host nobody-listens
  Port 1
Host wants-a-password
  Port {port}
  UserKnownHostsFile {directory}/known_hosts
Host unknown-key
  Port {port}
  UserKnownHostsFile /dev/null
Host changed-key
  Port {port}
  UserKnownHostsFile {directory}/known_before
Host two
  HostName 127.0.0.2
Host one three nobody-listens wants-a-password unknown-key changed-key
  HostName 127.0.0.1
Host one two three nobody-listens unknown-key changed-key
  IdentityFile {directory}/id
Host *
  User {user}
  IdentityFile {directory}/hostkey
  IdentitiesOnly yes
  StrictHostKeyChecking yes
"""


@contextmanager
def running(directory: Path) -> Iterator[str]:
    """Yield the ssh command for which the names "one", "two", "three" and some invalid ones are configured."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("no ssh server: `make cluster-tools` installs it")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name in ("id", "hostkey"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True)
    given = {"directory": directory, "port": port, "user": getpass.getuser()}
    (directory / "sshd_config").write_text(_CONFIG.format(**given))
    (directory / "ssh_config").write_text(_NAMES.format(**given))
    host_key = (directory / "hostkey.pub").read_text()
    (directory / "known_hosts").write_text(f"[127.0.0.1]:{port},[127.0.0.2]:{port} {host_key}")
    another_key = (directory / "id.pub").read_text()
    (directory / "known_before").write_text(f"[127.0.0.1]:{port} {another_key}")
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # usually created by its systemd unit
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", directory / "sshd_config"], stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < until, "sshd does not start"
                time.sleep(0.02)
        yield f"ssh -F {directory}/ssh_config"
    finally:
        server.terminate()
        server.wait()


def python(directory: Path, *, first: str = "", variable: str = "", without: str = "") -> str:
    """Return an interpreter as users have one: a script that runs a command first and has the package.

    If permitted, it cannot see the files in the folder `without`, like another machine that cannot see the notebook's
    files.
    """
    script = directory / f"python{abs(hash((first, variable)))}"
    root = Path(__file__).parents[2]
    run = f'exec {sys.executable} "$@"'
    if without and rights.may(*rights.MOUNT):
        run = f"exec unshare -m sh -c 'mount -t tmpfs none {without} && {run}' sh \"$@\""
    lines = [
        first,
        f"export PYTHONPATH={root}",
        f"export {variable}" if variable else "",
        run,
    ]
    script.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    script.chmod(0o700)
    return str(script)
