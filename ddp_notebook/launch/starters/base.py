"""What a starter of tasks must be able to do."""

from __future__ import annotations

import contextlib
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ddp_notebook.launch.host.host import is_loopback
from ddp_notebook.launch.transports.base import LOOPBACK
from ddp_notebook.registry import modes

# Addresses that nobody has (RFC 5737, RFC 3849). What has both versions of IP is reached by the first.
_BEYOND = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
OUTPOST = ("python", "-m", "ddp_notebook.launch.transports.outpost", "--file", "INVITATION")  # as a preview shows it


class Starter(ABC):
    """Something that starts tasks: a queue, mpirun, a launcher of ipyparallel's.

    Attributes:
        tasks: how many will call in; None: they tell it themselves.
        shares: by task, in proportion to what each is to have ranks, and how many where nobody has said; (): the same.
    """

    tasks: int | None = None
    shares: Sequence[int] = ()

    @property
    @abstractmethod
    def words(self) -> str:
        """What was asked for, as in "Slurm job 42"."""

    @property
    def address(self) -> str:
        """The address of the notebook's machine by which the tasks reach it."""
        return address_towards("")

    @abstractmethod
    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Have this command run as each task. Returns at once.

        Args:
            command: of an outpost.
            env: the invitation, as a variable, for launchers that hand variables on. Not for a command line.

        Raises:
            StartError: it is refused; says why and what to do.
        """

    def preview(self) -> str:
        """What would be sent, for those who check before they start: a script, a command. Starts nothing."""
        return f"{self.words}: what it would send is known only when it starts"

    def expected(self, told: int) -> int:
        """How many tasks are to call in.

        Args:
            told: how many there are, as those say that have called; 0: they do not know.
        """
        return told if self.tasks is None else self.tasks

    @property
    def is_queued(self) -> bool:
        """Whether the tasks wait for their turn: that time does not count as the start's."""
        return False

    def state(self) -> str:
        """What it does now, in words that its user waits behind; "" if there is nothing to say."""
        return ""

    def status(self) -> str:
        """What `%ddp_status` says of it, such as the time that is left; "" if nothing."""
        return ""

    def notices(self) -> list[str]:
        """What its user should know by now and was not told yet, such as that its time is nearly over."""
        return []

    def killed_in_s(self) -> float | None:
        """Seconds that its tasks have from the SIGTERM that came just now to their SIGKILL; None: none is to follow, or
        nobody knows when."""
        return None

    @abstractmethod
    def trouble(self, *, now: bool = False) -> str:
        """Why its tasks have ended, or will not come, in a sentence; "" while all is well.

        Args:
            now: a task has ended, so that what was found a while ago may not be true any more.
        """

    @abstractmethod
    def end(self) -> None:
        """End what is left of it, with everything that it has made."""


def shared_folder() -> Path:
    """A folder for this user only, in the home directory: most clusters share it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddp_notebook"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        modes.make_folder(folder)
    return folder


def address_towards(host: str) -> str:
    """The address of this machine on its route to a host.

    Args:
        host: a name or an address; "": the network beyond this machine.

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
    """The address of this machine by which tasks on these hosts reach it: its own stay on loopback.

    Args:
        hosts: names or addresses. One that nothing knows is taken to be in the network beyond this machine.

    Example:
        >>> address_for(["localhost"])
        '127.0.0.1'
    """
    others = [host for host in dict.fromkeys(hosts) if host not in {"localhost", LOOPBACK, socket.gethostname()}]
    if not others:
        return LOOPBACK
    routes = (address_towards(host) for host in others)
    return next((route for route in routes if not is_loopback(route)), address_towards(""))
