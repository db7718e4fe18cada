"""The interface of a transport to a host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_notebook.launch.processes import Identity
from ddp_notebook.messages.hosts import Seen

LOOPBACK = "127.0.0.1"
# Variables by which a starter of ours tells a task its number, and of how many.
OWN_NUMBER = ("DDP_NOTEBOOK_TASK", "DDP_NOTEBOOK_TASKS")
LOCAL = "this machine"  # the name of the notebook's own host, which no other has
LEASE_S = 30.0  # without a word, until notebook and host give each other up
BEAT_S = 1.0  # between two words, where nothing else is to be said


class Transport(ABC):
    """One host's server, and the stream to it. The server starts when the object is made, in the background.

    `launch.host.host.Host` uses the stream. It calls the other methods only where the server itself cannot answer. A
    transport that cannot find something out from its machine inherits the default answer.

    Attributes:
        name: of the host in its session; part of the names of its processes on the wire.
        directory: of this machine, only for its user, for small files. It goes with the host server at the latest.
        large_directory: the same for large files; None: the host server is on another machine and keeps none here.
        is_here: the host is the notebook's machine: its ranks have the notebook's environment, directory and path.
        machine: on which the host server is. Several servers may be on one, each a host of its own.
        beat_s: the host has to hear something this often; 0: it sees its owner.
        lease_s: when nothing was heard for so long, each side gives the other up.
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
        """Send all of it. From one thread at a time.

        Raises:
            OSError: the stream is cut.
        """

    @abstractmethod
    def receive(self) -> bytes:
        """Wait for what the server says next. b"": the stream has ended."""

    @abstractmethod
    def close(self) -> None:
        """Close the stream, which has ended."""

    @property
    def silent_s(self) -> float:
        """Seconds since the host was last heard, whatever its server does. 0.0: it has not been reached yet, or its
        silence means nothing."""
        return 0.0

    def again(self) -> Transport | None:
        """Return a new transport to the same host after this one has ended; None if this machine cannot make one."""
        return None

    # ---- the notebook's ports, as the host reaches them

    def reach(self, url: str) -> str:
        """Where processes of the host reach what listens at this address of the notebook.

        Raises:
            HostError: they cannot.
        """
        return url

    def unreach(self) -> None:
        """No process of the host is to reach the notebook any more."""
        return

    # ---- the server's process

    @property
    @abstractmethod
    def pid(self) -> int:
        """The server's process, on its host."""

    @property
    def is_stopped(self) -> bool:
        """Whether the server is known to be stopped (SIGSTOP, a debugger). Asked before each cell."""
        return False

    @property
    def why_silent(self) -> str:
        """Why nothing comes from the host, in words with the remedy; "" if it is not known here."""
        return ""

    @property
    def held(self) -> str:
        """Describe the debugger that holds the server, see `processes.held`; "" if none is known."""
        return ""

    def resume(self) -> None:
        """Let a server go on that was stopped."""
        return

    @abstractmethod
    def how_it_ended(self, given_up: str = "") -> str:
        """How the server ended and what it wrote last, in words.

        Args:
            given_up: why, if it was.
        """

    def fits(self, env: Mapping[str, str]) -> bool:
        """Whether the server can fork ranks that are to have this environment."""
        return True

    @abstractmethod
    def end(self, *, at_once: bool = False) -> None:
        """End the server, and with it everything below it. Returns when it is gone.

        Args:
            at_once: without a wait: it has started nothing yet, or was given up.
        """

    @abstractmethod
    def sweep(self, leaders: Sequence[Identity]) -> None:
        """Remove what a server that is gone could not: processes of these OS sessions, and the directory."""

    # ---- in place of a server that does not answer

    def signal(self, targets: Sequence[Identity], numbers: Sequence[int], value: int) -> None:
        """Send signals to processes of the host, in this order. `value` goes with `RELEASE`."""
        return

    def look(self, targets: Mapping[int, Identity]) -> dict[int, Seen]:
        """See `Host.look`. Processes of which nothing is known are left out."""
        return {}

    @abstractmethod
    def files(self, directory: str, pattern: str) -> list[Path]:
        """Files that ranks have written on the host, as files of this machine.

        Args:
            directory: which the ranks were told.
            pattern: of their names, as for `Path.glob`.
        """
