"""The interface of a starter of tasks."""

from __future__ import annotations

import contextlib
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ddp_notebook.launch.host.host import is_loopback
from ddp_notebook.launch.transports.base import LOOPBACK
from ddp_notebook.registry import modes, private

# Reserved addresses (RFC 5737, RFC 3849) for a route lookup. IPv4 is tried first.
_BEYOND = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
SHARED = "XDG_CACHE_HOME"  # its value replaces ~/.cache
# the command as shown in a preview
OUTPOST = ("python", "-m", "ddp_notebook.launch.transports.outpost", "--file", "INVITATION")


class Starter(ABC):
    """Starts tasks: a queue, mpirun, or an ipyparallel launcher.

    Attributes:
        tasks: number of tasks that will connect; None if the tasks report it themselves.
        shares: relative numbers of ranks by task, and the actual numbers if the user gave none; (): equal.
    """

    tasks: int | None = None
    shares: Sequence[int] = ()

    @property
    @abstractmethod
    def words(self) -> str:
        """Description of the request, as in "Slurm job 42"."""

    @property
    def address(self) -> str:
        """The address of the notebook's machine for the tasks."""
        return address_towards("")

    @abstractmethod
    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the tasks, each with this command. Returns at once.

        Args:
            command: of an outpost.
            env: the invitation, as a variable, for launchers that pass on variables. It must not be on a command line.

        Raises:
            StartError: the start was rejected; the message names the reason and a fix.
        """

    def preview(self) -> str:
        """Return the script or command that a start would use. Starts nothing."""
        return f"{self.words}: the command is known only when it starts"

    def expected(self, told: int) -> int:
        """Return the number of tasks that will connect.

        Args:
            told: the number of tasks that connected tasks report; 0 if they do not know it.
        """
        return told if self.tasks is None else self.tasks

    @property
    def is_queued(self) -> bool:
        """True while the tasks wait in a queue: that time does not count towards the time limit of the start."""
        return False

    def state(self) -> str:
        """Return its current state in words, shown while the user waits; "" if there is none."""
        return ""

    def status(self) -> str:
        """Return the line for `%ddp_status`, such as the time that is left; "" if there is none."""
        return ""

    def notices(self) -> list[str]:
        """Return notices that the user has not seen yet, e.g. that the job ends soon."""
        return []

    def killed_in_s(self) -> float | None:
        """Return the seconds from a SIGTERM that has just arrived to the SIGKILL of the tasks.

        None if no SIGKILL will follow, or the time is not known.
        """
        return None

    @abstractmethod
    def trouble(self, *, now: bool = False) -> str:
        """Return a sentence about tasks that have ended or will not start; "" if all is well.

        Args:
            now: a task has ended, so an earlier result may be outdated.
        """

    @abstractmethod
    def end(self) -> None:
        """End the remaining tasks, and remove everything that the starter has created."""


def shared_folder() -> Path:
    """Return a folder for this user only, in the home directory, which most clusters share.

    Raises:
        StartError: it cannot be created.
    """
    folder = Path(os.environ.get(SHARED) or Path.home() / ".cache") / "ddp_notebook"
    with private.writing_to(folder, SHARED):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            modes.make_folder(folder)
    return folder


def address_towards(host: str) -> str:
    """Return the address of this machine on its route to a host.

    Args:
        host: a name or an address; "": the network outside this machine.

    Example:
        >>> address_towards("127.0.0.1")
        '127.0.0.1'
    """
    for family, beyond in _BEYOND:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect((host or beyond, 9))  # sends nothing
            return str(asked.getsockname()[0])
    return LOOPBACK


def address_for(hosts: Iterable[str]) -> str:
    """Return the address of this machine for tasks on these hosts; loopback if all tasks are local.

    Args:
        hosts: names or addresses. An unknown host counts as outside this machine.

    Example:
        >>> address_for(["localhost"])
        '127.0.0.1'
    """
    others = [host for host in dict.fromkeys(hosts) if host not in {"localhost", LOOPBACK, socket.gethostname()}]
    if not others:
        return LOOPBACK
    routes = (address_towards(host) for host in others)
    return next((route for route in routes if not is_loopback(route)), address_towards(""))
