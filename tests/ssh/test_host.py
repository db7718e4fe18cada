"""A host reached by ssh: its end, and the messages if it cannot start."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

import ddp_notebook
from ddp_notebook.errors import DDPNotebookError, HostError, StartError
from ddp_notebook.launch import warm
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.transports import remote_python
from ddp_notebook.launch.transports import ssh as way
from ddp_notebook.launch.transports.ssh import SshTransport
from tests.conftest import wait_until
from tests.ssh import sshd


@pytest.mark.long
@pytest.mark.slow
def test_nothing_is_left_of_a_session(python):
    with ddp_notebook.start(hosts=ddp_notebook.Ssh("one:1", python=python)) as session:
        pids = [*session.ranks.pids(), *session.ranks.pids("store"), *session.ranks.pids("host server")]
        directories = [host.directory for host in session._hosts.all]  # type: ignore[attr-defined]
        assert session.run("print(1)")[0].stdout == "1\n"
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))
    assert not any(map(os.path.exists, directories))


@pytest.mark.long
def test_a_notebook_that_is_killed_leaves_nothing(python):
    with tempfile.TemporaryDirectory() as folder:  # short path, because it contains a socket
        code = f"""
import sys, ddp_notebook
with ddp_notebook.start(hosts=ddp_notebook.Ssh("one:1", python={python!r})) as session:
    print(*session.ranks.pids(), *session.ranks.pids("host server"), flush=True)
    sys.stdin.read()
"""
        env = {**os.environ, "TMPDIR": folder, "PYTHONPATH": str(Path(__file__).parents[2])}
        pipe = subprocess.PIPE
        with subprocess.Popen([sys.executable, "-c", code], env=env, stdin=pipe, stdout=pipe, text=True) as notebook:
            assert notebook.stdout is not None
            pids = list(map(int, notebook.stdout.readline().split()))
            assert os.listdir(folder)
            notebook.kill()
        wait_until(lambda: not os.listdir(folder) and not any(map(psutil.pid_exists, pids)), 10.0)


@pytest.mark.long
def test_a_notebook_keeps_its_hosts_for_the_next_session(python, monkeypatch):
    """They have imported torch. Their connections to the notebook end with the session."""

    def servers(**options) -> tuple[list[int], list[str]]:
        with ddp_notebook.start(hosts=ddp_notebook.Ssh("one:2", python=python), **options) as session:
            result = session.run("x = torch.ones(1); dist.all_reduce(x); print(int(x))")
            assert [one.stdout for one in result.by_rank.values()] == ["2\n", "2\n"]
            assert session._cluster is not None
            urls = [host.transport.reach(session._cluster._endpoint.url) for host in session._hosts.all]  # type: ignore[attr-defined]
            return session.ranks.pids("host server"), urls

    monkeypatch.setattr(warm, "_is_preparing", True)
    first, urls = servers()
    assert all(map(psutil.pid_exists, first))
    for url in map(urlsplit, urls):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((url.hostname, url.port), timeout=5)
    assert servers()[0] == first
    others, _ = servers(env={"ONE": "more"})
    assert not set(others) & set(first)
    warm.drop()
    wait_until(lambda: not any(map(psutil.pid_exists, first + others)))


@pytest.mark.long
def test_a_host_with_a_changed_shell_environment_is_restarted(ssh, monkeypatch, tmp_path):
    bashrc = tmp_path / ".bashrc"
    bashrc.write_text("export EDITED=no\n")
    python = sshd.python(ssh, first=f"export HOME={tmp_path}\n. {bashrc}")
    monkeypatch.setattr(warm, "_is_preparing", True)

    def server_and_variable() -> tuple[list[int], str]:
        with ddp_notebook.start(hosts=ddp_notebook.Ssh("one:1", python=python)) as session:
            edited = session.run("import os; print(os.environ['EDITED'])")[0].stdout
            return session.ranks.pids("host server"), edited

    first, edited = server_and_variable()
    assert edited == "no\n" and server_and_variable() == (first, edited)
    bashrc.write_text("export EDITED=yes\n")
    second, edited = server_and_variable()
    assert edited == "yes\n" and second != first
    warm.drop()
    wait_until(lambda: not any(map(psutil.pid_exists, first + second)))


def _connection(host: Host) -> subprocess.Popen[bytes]:
    assert isinstance(host.transport, SshTransport)
    return host.transport._ssh


@pytest.mark.long
def test_a_connection_that_ends_is_told_and_ends_the_ranks(python):
    with ddp_notebook.start(hosts=ddp_notebook.Ssh("one:1", python=python)) as session:
        pids = [*session.ranks.pids(), *session.ranks.pids("store"), *session.ranks.pids("host server")]
        _connection(session._hosts.all[0]).kill()  # type: ignore[attr-defined]
        wait_until(lambda: not session.is_running)
        wait_until(lambda: not any(map(psutil.pid_exists, pids)))
        with pytest.raises(DDPNotebookError, match="host server"):
            session.run("1")


@pytest.mark.long
def test_a_host_that_hears_nothing_ends_what_it_has_started(python):
    host = Host(SshTransport("one", python=python, lease_s=3.0))
    try:
        server = host.facts()["pid"]
        time.sleep(4.0)  # longer than the lease: the notebook sends heartbeats by itself
        assert psutil.pid_exists(server) and not host.trouble()
        _connection(host).send_signal(signal.SIGSTOP)  # as if the link were cut
        wait_until(lambda: not psutil.pid_exists(server), 15.0)
    finally:
        _connection(host).send_signal(signal.SIGCONT)
        host.close()


@pytest.mark.long
def test_a_server_that_is_stopped_is_heard(python):
    """Heartbeats of both sides continue, although the server neither reads nor writes."""
    host = Host(SshTransport("one", python=python, lease_s=3.0))
    try:
        server = host.facts()["pid"]
        os.kill(server, signal.SIGSTOP)
        try:
            time.sleep(4.0)  # longer than the lease
            assert host.is_alive and host.silent_s < 2.0 and not host.is_unreachable
        finally:
            os.kill(server, signal.SIGCONT)
        wait_until(lambda: not host.trouble())
        until = time.monotonic() + way._END_S + 1.0
        while time.monotonic() < until:  # a stopped server must not count as ended
            assert host.facts()["pid"] == server
            time.sleep(0.1)
    finally:
        host.close()


@pytest.mark.long
@pytest.mark.alone  # other tests need ports too
def test_a_forwarded_port_is_found_where_most_ports_are_taken(python):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 12_000:
        pytest.skip(f"only {hard} files may be open here")
    host = Host(SshTransport("one", python=python))
    taken: list[socket.socket] = []
    try:
        host.facts()
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        for port in range(33_000, 60_000, 3):
            with contextlib.suppress(OSError):
                taken.append(socket.create_server(("127.0.0.1", port)))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = urlsplit(host.transport.reach(f"tcp://127.0.0.1:{listener.getsockname()[1]}"))
            with socket.create_connection((url.hostname, url.port), timeout=5) as connection:
                listener.settimeout(5)
                answered, _ = listener.accept()
                with answered:
                    answered.sendall(b"here")
                    assert connection.recv(4) == b"here"
    finally:
        for one in taken:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        host.close()


@pytest.mark.long
@pytest.mark.slow
def test_shell_output_is_not_the_reason_of_a_server_that_ended(ssh):
    noisy = sshd.python(ssh, first="echo \"rm: cannot remove 'x': No such file or directory\" >&2")
    with ddp_notebook.start(hosts=ddp_notebook.Ssh("one:1", python=noisy)) as session:
        assert session._hosts is not None
        (host,) = (one for one in session._hosts.all if isinstance(one.transport, SshTransport))  # type: ignore[attr-defined]
        os.kill(host.transport.pid, signal.SIGKILL)
        with pytest.raises(DDPNotebookError, match="the host server on one ended, or the connection to it") as raised:
            session.run("import time; time.sleep(30)")
        assert "--python" not in str(raised.value)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("host", "words"),
    [
        (
            "nowhere.invalid",
            r"no host server on nowhere.invalid: .*; check the spelling of the name, and ~/.ssh/config",
        ),
        ("nobody-listens", r"no host server on nobody-listens: .*; no ssh server answers there"),
        ("wants-a-password", r"no host server on wants-a-password: .*; set up a key: ssh-copy-id wants-a-password"),
        ("unknown-key", r"no host server on unknown-key: .*; run ssh unknown-key once"),
        ("changed-key", r"no host server on changed-key: Host key .* has changed .*; its host key has changed"),
    ],
)
def test_a_host_that_cannot_be_reached(ssh, host, words):
    with pytest.raises(StartError, match=words):
        ddp_notebook.start(hosts=host)
    assert ddp_notebook.current() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "words"),
    [
        ("exec /no/such/python", "pass the path of a Python with torch on that host: --python"),
        ("unset PYTHONPATH; cd /; exec python3 -I -c 'import ddp_notebook.launch'", "pass another Python than"),
    ],
)
def test_a_python_that_will_not_do(ssh, first, words):
    with pytest.raises(StartError, match=words):
        ddp_notebook.start(hosts=ddp_notebook.Ssh("one", python=sshd.python(ssh, first=first)))


@pytest.mark.slow
def test_a_host_without_torch_is_reached(ssh):
    """The error contains the packages that its Python lacks, by their usual names."""
    bare = ssh / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    version = ".".join(map(str, sys.version_info[:3]))
    lacks = rf"reached.*{bare}/bin/python \(Python {version}\) has no torch, and no .*, which ddp_notebook needs"
    with pytest.raises(StartError, match=f"no host server on one: {lacks}; .*--python"):
        ddp_notebook.start(hosts=ddp_notebook.Ssh("one", python=f"{bare}/bin/python"))
    (row,) = repr(ddp_notebook.check(hosts=ddp_notebook.Ssh("one", python=f"{bare}/bin/python"))).splitlines()[1:]
    assert re.match(rf"one +reached\*, but {bare}/bin/python .* has no torch", row) and "not reached" not in row


@pytest.mark.slow
@pytest.mark.parametrize(
    ("python", "words"),
    [
        (
            "/no/such/python",
            "/no/such/python: .*; pass the path of a Python with torch on that host: --python /path/to/python",
        ),
        ("/bin/false", "ssh ended with status 1"),
    ],
)
def test_a_host_without_that_python_is_reached(ssh, python, words):
    with pytest.raises(StartError, match=f"no host server on one: reached, but .*{words}"):
        ddp_notebook.start(hosts=ddp_notebook.Ssh("one", python=python))
    (row,) = repr(ddp_notebook.check(hosts=ddp_notebook.Ssh("one", python=python))).splitlines()[1:]
    assert re.match(rf"one +reached\*, but .*{words}$", row)


@pytest.mark.long
def test_the_path_of_the_notebooks_interpreter_is_tried_first(ssh, tmp_path, monkeypatch):
    """And python3 if that interpreter lacks something."""
    assert ddp_notebook.check(hosts="one").fits
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    good = tmp_path / "python3"
    good.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    good.chmod(0o700)
    path = f"{tmp_path}:{os.environ['PATH']}"
    for ours in (f"{bare}/bin/python", "/no/such/python"):
        monkeypatch.setattr(sys, "executable", ours)
        command = remote_python.command(None, "ddp_notebook.launch.transports.reconnecting")
        done = subprocess.run(["sh", "-c", command], env={**os.environ, "PATH": path}, input=b"", capture_output=True)
        assert done.returncode == 0, done.stderr
        assert ("ddp_notebook lacks torch" in done.stderr.decode()) == (ours != "/no/such/python")


@pytest.mark.processes
def test_a_torch_that_cannot_be_imported(ssh):
    """Detected after the start of the host server."""
    (ssh / "without").mkdir()
    (ssh / "without" / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    python = sshd.python(ssh, variable=f'PYTHONPATH="{ssh / "without"}:$PYTHONPATH"')
    with pytest.raises(StartError, match=r"No module named 'torch'; .* another Python than .* with --python"):
        ddp_notebook.start(hosts=ddp_notebook.Ssh("one", python=python))


@pytest.mark.long
def test_a_variable_that_python_reads_as_it_starts(ssh):
    """The variable is set for the host server and its ranks, although ssh starts the Python that receives it."""
    with ddp_notebook.start(
        hosts=ddp_notebook.Ssh("one:1", python=sshd.python(ssh)), env={"PYTHONHASHSEED": "7"}
    ) as session:
        said = session.run("import os; print(os.environ['PYTHONHASHSEED'], hash('a'))")[0].stdout
    code, env = "print(7, hash('a'))", {"PYTHONHASHSEED": "7"}
    assert said == subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout


@pytest.mark.processes
def test_without_ssh(monkeypatch):
    monkeypatch.setenv("DDP_NOTEBOOK_SSH", "/no/such/ssh")
    with pytest.raises(HostError, match=r"ssh cannot be run: .*; install it, or set DDP_NOTEBOOK_SSH"):
        ddp_notebook.start(hosts="one")
