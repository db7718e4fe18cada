"""The interface of a transport to a host."""

from __future__ import annotations

import select
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_notebook.launch.processes import Identity
from ddp_notebook.messages.hosts import Seen

LOOPBACK = "127.0.0.1"
# Variables in which a starter of this package passes a task its number and the number of tasks.
OWN_NUMBER = ("DDP_NOTEBOOK_TASK", "DDP_NOTEBOOK_TASKS")
LOCAL = "this machine"  # name of the notebook's own host; no other host has it
LEASE_S = 30.0  # time without a message until notebook and host declare each other lost
BEAT_S = 1.0  # interval of heartbeats while nothing else is sent


def is_readable(fd: int) -> bool:
    """Return whether a file descriptor has data that were not read. A closed one (-1) has none."""
    if fd < 0:
        return False
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return any(event & select.POLLIN for _, event in poll.poll(0))


class Transport(ABC):
    """One host's server, and the stream to it. Creating the object starts the server in the background.

    `launch.host.host.Host` uses the stream. It calls the other methods only if the server cannot answer. A subclass
    inherits the default answer of a method if it cannot find out the information locally.

    Attributes:
        name: of the host in its session; part of the names of its processes on the wire.
        directory: a local directory for small files of its user only, removed with the host server at the latest.
        large_directory: the same for large files; None if the host server is on another machine.
        is_here: the host is the notebook's machine: its ranks have the notebook's environment, directory and path.
        machine: name of the machine of the host server. A machine may have several servers, each a separate host.
        beat_s: interval of heartbeats to the host in seconds; 0 if it can check its owner's process.
        lease_s: seconds of silence after which each side declares the other lost.
    """

    name: str
    directory: str
    large_directory: str | None = None
    is_here: bool = True
    machine: str
    beat_s: float = 0.0
    lease_s: float = float("inf")

    # ---- the stream

    @abstractmethod
    def send(self, data: bytes) -> None:
        """Send all data. From one thread at a time.

        Raises:
            OSError: the stream is broken.
        """

    @abstractmethod
    def receive(self) -> bytes:
        """Wait for the next data from the server. Returns b"" if the stream has ended."""

    @abstractmethod
    def close(self) -> None:
        """Close the stream after its end."""

    @property
    def has_unread(self) -> bool:
        """True if data of the server has arrived that `receive` has not returned."""
        return False

    @property
    def silent_s(self) -> float:
        """Seconds since the last data from the host, whatever its server does.

        0.0 if the host has not connected yet, or if silence has no meaning for this transport.
        """
        return 0.0

    def again(self) -> Transport | None:
        """Return a new transport to the same host after this one has ended; None if this machine cannot make one."""
        return None

    # ---- the notebook's ports, as the host reaches them

    def reach(self, url: str) -> str:
        """Return the address at which processes of the host reach this address of the notebook.

        Raises:
            HostError: they cannot reach it.
        """
        return url

    def unreach(self) -> None:
        """Close the host's access to the notebook's ports."""
        return

    # ---- the server's process

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id of the server, on its host."""

    @property
    def is_stopped(self) -> bool:
        """True if the server is known to be stopped (SIGSTOP, a debugger). Read before each cell."""
        return False

    @property
    def why_silent(self) -> str:
        """The reason for the host's silence, with the remedy; "" if it is not known locally."""
        return ""

    @property
    def held(self) -> str:
        """The debugger that holds the server, see `processes.held`; "" if none is known."""
        return ""

    def resume(self) -> None:
        """Continue a stopped server."""
        return

    @abstractmethod
    def how_it_ended(self, given_up: str = "") -> str:
        """Describe the end of the server, with its last output.

        Args:
            given_up: the reason if the host was declared lost.
        """

    def fits(self, env: Mapping[str, str]) -> bool:
        """Return whether the server can fork ranks with this environment."""
        return True

    @abstractmethod
    def end(self, *, at_once: bool = False) -> None:
        """End the server and all processes below it. Returns after their end.

        Args:
            at_once: do not wait: the server has started no process yet, or was declared lost.
        """

    @abstractmethod
    def sweep(self, leaders: Sequence[Identity]) -> None:
        """Remove what a dead server could not: processes of these OS sessions, and the directory."""

    # ---- in place of a server that does not answer

    def signal(self, targets: Sequence[Identity], numbers: Sequence[int], value: int) -> None:
        """Send signals to processes of the host, in this order. `value` is sent with `RELEASE`."""
        return

    def look(self, targets: Mapping[int, Identity]) -> dict[int, Seen]:
        """Return the state of processes, see `Host.inspect`. Unknown processes are left out."""
        return {}

    @abstractmethod
    def files(self, directory: str, pattern: str) -> list[Path]:
        """Return files that ranks have written on the host, as local paths.

        Args:
            directory: the ranks' path of the session's directory.
            pattern: of the file names, as for `Path.glob`.
        """
