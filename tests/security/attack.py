"""Find each port, socket and file of the processes of a session, and attack them as a second user."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.conftest import below, marked_processes, net_connections

_PROGRAM = Path(__file__).with_name("stranger.py")
_TABLE = Path(__file__).parents[2] / "docs" / "security.md"
_WAITS_FOR_CONNECTIONS = "00010000"  # flag of a listening socket in /proc/net/unix
_LOOPBACK = "127.0.0.1"
_LONGEST_S = 180.0


class Listener(NamedTuple):
    """A TCP port on which a process listens."""

    host: str
    port: int
    pid: int
    program: str
    held_with: str  # the files in the epoll that holds the listener: gloo has a pipe there, TensorPipe an eventfd


Ignore = Callable[[Listener, str], bool]  # arguments: a listener and its protocol


def _nothing(*_: object) -> bool:
    return False


@dataclass(frozen=True)
class Found:
    """The results of an attack by a second user."""

    listeners: dict[str, Listener]  # by "host:port"
    ports: dict[str, dict[str, Any]]
    sockets: dict[str, str]
    paths: dict[str, str]

    def row_of(self, at: str, controllers: Collection[int] = ()) -> str:
        """The row of the table that describes a port; "" if there is none.

        Args:
            at: "host:port".
            controllers: processes of ipyparallel's controller.
        """
        listener, protocol = self.listeners[at], self.ports[at]["protocol"]
        if protocol == "ZeroMQ CURVE" and listener.program.startswith("sshd"):
            return "ports that ssh forwards"
        if protocol == "ZeroMQ CURVE":
            return "ipyparallel's controller" if listener.pid in controllers else "the notebook's wire"
        if protocol == "silent" and listener.held_with:
            return "TensorPipe" if "eventfd" in listener.held_with else "gloo"
        rows = {"TCPStore": "`MASTER_ADDR`", "store with a key": "the session's store, ranks on several hosts"}
        return rows.get(protocol, "")

    def socket_row_of(self, name: str) -> str:
        """The row of the table that describes a Unix socket; "" if there is none."""
        known = {
            r"@ddp_notebook-store-\w+": "the session's store, ranks on one machine",
            r"@ddp_notebook-\w+": "kept sessions over ssh",
            r"/.*/ddp_notebook(_\d+)?/(session|torchrun)-\d+\.sock": "kept sessions, torchrun jobs",
            r"/.*/ddp_notebook-\w+/ssh(\.\w+)?": "ssh to a host",
        }
        return next((row for pattern, row in known.items() if re.fullmatch(pattern, name)), "")

    def rows(self, controllers: Collection[int] = (), ignore: Ignore = _nothing) -> set[str]:
        """Return all rows that describe the found ports and sockets.

        Raises:
            AssertionError: A port or a socket is in no row of the table.
        """
        ports = {
            at: self.row_of(at, controllers)
            for at, one in self.listeners.items()
            if not ignore(one, self.ports[at]["protocol"])
        }
        sockets = {name: self.socket_row_of(name) for name in self.sockets}
        unknown = [one for one, row in (ports | sockets).items() if not row]
        about = [(self.listeners.get(one), self.ports.get(one)) for one in unknown]
        assert not unknown, f"docs/security.md has no row for {unknown}: {about}"
        found = {*ports.values(), *sockets.values()}
        in_table = [row[0] for row in table()]
        assert not (missing := [row for row in found if not any(one.startswith(row) for one in in_table)]), missing
        return found

    def check_nothing_was_read(self, ignore: Ignore = _nothing) -> None:
        """Check that the second user read no port, socket or file, and replaced none.

        Raises:
            AssertionError: one has.
        """
        for at, said in self.ports.items():
            protocol, read = said["protocol"], {*said["read"]} - {"closed"}
            if ignore(self.listeners[at], protocol):
                continue
            if protocol == "TCPStore":  # every user may read and replace its keys, as the table says
                continue
            if protocol == "store with a key":  # it sends a random number to each client
                read = {one for one in read if len(one) != 2 * 36}
            # its listener does not survive invalid data, as documented in the table
            if self.row_of(at) == "TensorPipe":
                read -= {"refused"}
            assert not read, f"{at} ({self.listeners[at]}) has told {read}"
        assert {*self.sockets.values()} <= {"closed", "refused"}, self.sockets
        assert not (seen := {path: how for path, how in self.paths.items() if how.replace("seen", "")}), seen


def table() -> list[list[str]]:
    """Return the cells of the table of ports in docs/security.md."""
    lines = _TABLE.read_text().partition("## Ports and sockets")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]
    return rows[2:]


class Stranger:
    """A process of the second user.

    Args:
        user: Id of the user.
        marker: File that is created if a pickle of the attacker is loaded.
    """

    def __init__(self, user: int, marker: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), str(user), str(marker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("DDP_NOTEBOOK_TEST_RUN")},
        )

    def attack(self) -> Found:
        """Attack all ports, Unix sockets and files of the processes of this test run."""
        marked = marked_processes() | {psutil.Process()}
        below = [child for one in marked for child in _below(one)]  # an ssh server overwrites its environment
        processes = {*marked, *below} - {psutil.Process(self._process.pid)}
        listeners = {f"{one.host}:{one.port}": one for one in listening(processes)}
        order = {
            "ports": [[one.host, one.port] for one in listeners.values()],
            "sockets": sorted(unix_sockets(processes)),
            "paths": sorted(files(processes)),
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Found(listeners, **json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate(timeout=_LONGEST_S)
        assert self._process.returncode == 0


def _below(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return process.children(recursive=True)
    return []


def attack(user: int, marker: Path) -> Found:
    """Make the second user attack all ports, Unix sockets and files of the processes of this test run once."""
    with contextlib.closing(Stranger(user, marker)) as stranger:
        return stranger.attack()


@contextlib.contextmanager
def attacking(user: int, marker: Path) -> Iterator[list[Found]]:
    """Repeat `attack` in the background. Yield the results of the rounds."""
    rounds: list[Found] = []
    errors: list[BaseException] = []
    ends = threading.Event()

    def run() -> None:
        try:
            with contextlib.closing(Stranger(user, marker)) as stranger:
                while not ends.is_set():
                    rounds.append(stranger.attack())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield rounds
    finally:
        ends.set()
        thread.join()
    assert not errors and rounds, errors


# ---- what processes expose


def listening(processes: Collection[psutil.Process]) -> list[Listener]:
    """Return the TCP ports on which processes listen."""
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            for one in net_connections(process):
                if one.status == psutil.CONN_LISTEN:
                    host = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(one.laddr.ip, one.laddr.ip)
                    found[one.laddr.port] = Listener(
                        host, one.laddr.port, process.pid, process.name(), _held_with(process.pid, one.fd)
                    )
    return [*found.values()]


def _held_with(pid: int, fd: int) -> str:
    """Return the kinds of files in the epoll of a process that contains this one."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link) != "anon_inode:[eventpoll]":
                continue
            info = Path(f"/proc/{pid}/fdinfo/{link.name}").read_text()
            held = [int(one) for one in re.findall(r"^tfd:\s*(\d+)", info, re.MULTILINE)]
            if fd in held:
                kinds = {
                    re.split(r"[:\[]", os.readlink(f"/proc/{pid}/fd/{one}").replace("anon_inode:[", ""))[0]
                    for one in held
                }
                return " ".join(sorted(one.rstrip("]") for one in kinds))
    return ""


def unix_sockets(processes: Collection[psutil.Process]) -> set[str]:
    """Return the names of the Unix sockets at which processes listen."""
    inodes = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if (target := os.readlink(link)).startswith("socket:["):
                        inodes.add(target[8:-1])
    names = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *name = line.split(maxsplit=7)
        if inode in inodes and flags == _WAITS_FOR_CONNECTIONS and name:
            names.add(_path_of(name[0]))
    return names


def _path_of(name: str) -> str:
    """Return the path of a socket that was bound through its folder, because the path is too long for the system."""
    if not name.startswith("/proc/self/fd/"):
        return name
    return str(Path(os.environ["XDG_RUNTIME_DIR"], "ddp_notebook", Path(name).name))


def files(processes: Collection[psutil.Process]) -> set[str]:
    """Return the files and folders of sessions.

    These are files that processes have open in the temporary folders and the runtime directory, and all files in the
    package's own folders.
    """
    roots = {os.environ["TMPDIR"], os.environ.get("XDG_RUNTIME_DIR", ""), f"/tmp/ddp_notebook_{os.getuid()}"} - {""}
    found = set()
    for root in roots:
        for top in [*Path(root).glob("*ddp_notebook*"), *([Path(root)] if "ddp_notebook_" in root else [])]:
            found |= {str(top), *map(str, below(top))}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found |= {one.path for one in process.open_files() if any(one.path.startswith(root) for root in roots)}
    return {one for one in found if os.path.exists(one) and not Path(one).is_socket()}
