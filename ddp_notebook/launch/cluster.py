"""The interface of the processes of one session: ranks, store and controller, on one or more hosts.

Two implementations: `launch.direct.DirectCluster` in the notebook's process, or in a keeper's, and
`launch.keep.stand_in.KeptCluster` in a notebook, through a keeper. A process has a number that it keeps; its rank
belongs to an epoch of the group, see `forming`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ddp_notebook.launch.forming import Check
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.membership.members import Renumbered
from ddp_notebook.launch.placement import Placement
from ddp_notebook.launch.process import CONTROLLER, RANK, Process, Processes
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.hosts import Seen
from ddp_notebook.wire.memory import SealedMemory

if TYPE_CHECKING:
    from ddp_notebook.launch.sync.sync import Synced


def end_all(processes: Processes, hosts: Sequence[Host], grace_s: float) -> list[int]:
    """End them, and all below them.

    Args:
        hosts: of the ranks.
        grace_s: seconds from `END` to SIGKILL.

    Returns:
        The ids of what could not be ended, see `Host.end_all`.
    """
    left: list[int] = []

    def end(host: Host) -> None:
        those = [process for process in processes.all.values() if process.host is host]
        ranks = [process.number for process in those if process.kind == RANK]
        left.extend(host.end_all(ranks, [process.number for process in those if process.kind != RANK], grace_s))

    with_controller = [process.host for process in processes.living(CONTROLLER)]
    first, *others = dict.fromkeys([*hosts, *with_controller])
    beside = [threading.Thread(target=end, args=(host,)) for host in others]  # each may need all of the grace
    for one in beside:
        one.start()
    end(first)
    for one in beside:
        one.join()
    return left


__all__ = ["Check", "Cluster", "Hosts", "Listener", "Startup"]
HANGS_S = 5.0  # without an answer, until something that needs it is given up; a loaded machine is slow


class Listener(Protocol):
    """Who is told what the ranks say. Called in I/O threads; must not block."""

    def on_message(self, rank: int, message: Message) -> None: ...
    def on_text(self, rank: int, fd: int, data: bytes) -> None: ...
    def on_ended(self, rank: int, how: str) -> None: ...
    def on_controller_ended(self) -> None: ...
    def on_gone(self) -> None: ...


class Cluster(ABC):
    """The processes of a session.

    Args:
        mark_token: of the marks in the ranks' text.
        directory: of this machine, for the session's logs and profiles.
        hosts: by name.
    """

    def __init__(self, mark_token: str, directory: str, hosts: Mapping[str, Host]) -> None:
        self.mark_token = mark_token
        self.directory = directory
        self._hosts = dict(hosts)
        self._processes = Processes()

    # ---- starting

    @abstractmethod
    def start(
        self, deadline: float, report: Callable[[str], None] = lambda _: None, check: Check = lambda: None
    ) -> None:
        """Start all processes and wait until every rank can run a cell.

        Args:
            deadline: monotonic time by which it must be done.
            report: told the name of each stage that is done.
            check: called often while it waits; what it raises ends the wait.

        Raises:
            StartError: a process ended or could not do its part.
            StartTimeoutError: the deadline passed; names the stage and the ranks that it waits for.
        """

    @abstractmethod
    def form(self, deadline: float, check: Check = lambda: None) -> list[str]:
        """Form the group anew, in the next epoch: same ranks, same sizes, every variable kept.

        A store that is gone is replaced first. Where `check` raises, it can be tried again.

        Returns:
            What the ranks could not have again, in words.
        """

    @abstractmethod
    def replace(self, ranks: list[int], deadline: float, check: Check = lambda: None) -> list[str]:
        """New processes for ranks that have died, and then the group of all. Ranks of a host that was lost get them
        elsewhere, see `Losses.place`. Returns where they went, and what `form` does.

        Raises:
            StartError: it failed, and can be tried again: the new processes are gone.
            whatever `check` raises: the same holds.
        """

    @abstractmethod
    def place(self, stay: Sequence[int], world_size: int, *, may_share: bool) -> Placement:
        """Where ranks would be if there were as many as this, see `moving.resized`."""

    @abstractmethod
    def resize(
        self, stay: Sequence[int], placement: Placement, deadline: float, check: Check, renumbered: Renumbered
    ) -> list[str]:
        """More or fewer ranks: these stay, with other numbers, new ones come, the others end. Returns what `form` does.

        Args:
            stay: ranks, in the order of their new numbers.
            placement: what `place` gave for them.
            renumbered: called when ranks have their new numbers, before any uses one.

        Raises:
            StartError: a process did not come up, and nothing was changed; or the group did not form.
            whatever `check` raises: the same holds.
        """

    @abstractmethod
    def note_supplied(self) -> None:
        """New ranks have got what they get: nobody who comes later has to be told that they lack it."""

    # ---- the ranks

    @property
    @abstractmethod
    def placement(self) -> Placement:
        """Which rank is where now."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Number of the group: raised each time it is called to form."""

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether a host server lives, and with it ranks that have not died by themselves. Those of a host that was
        lost are gone."""

    @property
    def hosts(self) -> list[Host]:
        """Those that were not lost."""
        return [host for host in self._hosts.values() if host.is_alive]

    @property
    @abstractmethod
    def unheard(self) -> dict[int, str]:
        """Ranks whose host is not heard and may come back, each with what is said of it."""

    @abstractmethod
    def give_up(self, why: str, ranks: Sequence[int] | None = None) -> None:
        """Take unreachable hosts for lost; returns when it is known which ranks are gone. Not if no host were left.

        Args:
            why: in words: "somebody asked for it".
            ranks: only hosts of these; None: of all.
        """

    @abstractmethod
    def trouble(self) -> str:
        """Why a host server does not answer, in a sentence; "" if all do that were not lost."""

    @property
    @abstractmethod
    def is_stopped(self) -> bool:
        """Whether somebody has stopped a host server: no cell gets to its ranks then, and no text of them comes."""

    def stopped(self, ranks: Sequence[int] | None = None) -> list[Process]:
        """The processes of the session that are stopped (SIGSTOP, SIGTSTP), as their hosts have reported. Asks nobody.

        Args:
            ranks: without those of other ranks; None: all.
        """
        if not any(host.stopped for host in self.hosts):  # mostly
            return []
        processes = [process for process in self._processes.current if process.is_stopped]
        return [one for one in processes if one.kind != RANK or ranks is None or one.rank in ranks]

    @abstractmethod
    def pulse(self) -> str:
        """Why a host server does not answer, as far as is known without a wait, see `Host.pulse`; "": all do."""

    def cut_off(self, after_s: float = HANGS_S) -> str:
        """Why nothing gets to any rank, in a sentence; "" if the way to them is open.

        Args:
            after_s: seconds without an answer after which a process that is not stopped counts as hanging.
        """
        return ""

    @abstractmethod
    def tell_what_is_slow(self, say: Callable[[str], object]) -> None:
        """Have this told in a sentence what a group that forms again waits for, where that takes long."""

    @abstractmethod
    def replace_stopped_store(self) -> None:
        """End a store that is stopped, so that ranks do not wait for it: the next group gets a new one."""

    @property
    @abstractmethod
    def is_here(self) -> bool:
        """Whether all ranks are on the notebook's machine."""

    @property
    def ranks(self) -> list[int]:
        return self._processes.ranks

    def process(self, rank: int) -> Process:
        """The process that has this rank now."""
        return self._processes.by_rank[rank]

    @property
    def alive(self) -> list[int]:
        """Ranks whose process lives."""
        return self._processes.alive

    @property
    def gone(self) -> list[int]:
        """Ranks whose process has ended."""
        return self._processes.gone

    @abstractmethod
    def send(self, rank: int, message: Message) -> None:
        """Send a message to a rank, from any thread. One that is gone, or has left meanwhile, hears nothing."""

    @abstractmethod
    def put_in_inboxes(self, message: Message, ranks: list[int]) -> None:
        """Put a message into inboxes of ranks; their main threads take it in this order, see `launch.host.pipes`."""

    @abstractmethod
    def signal(self, ranks: list[int], *numbers: int, value: int = 0) -> bool:
        """Send signals to ranks, in this order. They have them when this returns, also where the host server does not
        answer, which it tells by False. `value` goes with `RELEASE`.

        Raises:
            HostError: a host server ended.
        """

    @abstractmethod
    def inspect(self, ranks: list[int]) -> dict[int, Seen]:
        """What their hosts see of ranks that do not answer: whether each is stopped, and its stack.

        Raises:
            HostError: a host server ended.
        """

    @abstractmethod
    def files(self, pattern: str) -> list[Path]:
        """Files that ranks have written into the session's directory, as files of this machine.

        Args:
            pattern: of their names, as for `Path.glob`.
        """

    @abstractmethod
    def silent_s(self, rank: int) -> float:
        """Seconds since the rank's agent was last heard."""

    @abstractmethod
    def hold_text(self, hold: bool) -> None:
        """Let text stay in the ranks' pipes, or come again."""

    @abstractmethod
    def drop(self, rank: int, transfer: int) -> None:
        """Let a rank forget bulk data that is not wanted any longer. From any thread, and never waits."""

    @abstractmethod
    def fetch(self, rank: int, transfer: int, nbytes: int, check: Check) -> bytearray:
        """Fetch bulk data that a rank holds."""

    @abstractmethod
    def put(self, rank: int, data: bytes | SealedMemory, check: Check) -> int:
        """Put bulk data into a rank. Returns the number of the transfer, for `Push` or `drop`."""

    @abstractmethod
    def client_file(self) -> tuple[str, int]:
        """The connection file for `ipp.Client`, and the controller's process id. It is started at the first call, and
        one that is gone again in its old place.

        Raises:
            ClientError: it cannot be started, or not reached by a host.
        """

    @abstractmethod
    def check_registered(self) -> None:
        """See `Engines.check_registered`."""

    def pids(self, kind: str) -> list[int]:
        """Ids of the living processes of a kind: "rank" (in their order), "store" or "controller"."""
        # without those that are just being started: a signal to "0" would reach the caller and all around it
        return [process.pid for process in self._processes.living(kind) if process.pid]

    # ---- ending

    @abstractmethod
    def stop(self, grace_s: float = 1.0) -> bool:
        """End every process and all below them. Whether that is done; if not, only the end of the host server helps."""


class Hosts(ABC):
    """The hosts of a session."""

    @abstractmethod
    def check_startable(self, ranks: int) -> None:
        """Try whether the ranks of this session could be started again now, without ending any.

        Args:
            ranks: how many.

        Raises:
            StartError: they could not.
        """

    @abstractmethod
    def sync(
        self,
        folder: str | None,
        *,
        overwrite: bool,
        also: Sequence[str],
        is_large: bool,
        check: Callable[[], None],
        progress: Callable[[str], None],
    ) -> Synced:
        """Send a folder, None: the one of the start, or the notebook's. See `Session.sync`."""

    @abstractmethod
    def status(self) -> str:
        """What `%ddp_status` says of what has started them; "" if nothing."""

    @abstractmethod
    def notices(self) -> list[str]:
        """What their user should know by now and was not told yet, such as that their time is nearly over."""

    @abstractmethod
    def tell_of_warnings(self, on_warned: Callable[[str], object]) -> None:
        """Have this called, from any thread, when the job that the ranks are in says that its time is nearly over."""

    @property
    @abstractmethod
    def are_alive(self) -> bool:
        """Whether one is: the others were lost."""

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """Of the servers, each on its host."""

    @property
    @abstractmethod
    def words(self) -> str:
        """Their names, once the ranks were placed."""

    @abstractmethod
    def end(self, *, healthy: bool = True) -> None:
        """Give the servers back to the next session, or end them.

        Args:
            healthy: they have ended all that they had started.
        """


class Startup(ABC):
    """How a session comes to have its ranks.

    Args:
        hosts: of the ranks. The caller ends them.
        synced: what was sent to the hosts; None: nothing was to be.
    """

    def __init__(self, hosts: Hosts, synced: Synced | None = None) -> None:
        self.hosts = hosts
        self.synced = synced

    @abstractmethod
    def make(self, listener: Listener) -> Cluster:
        """Return the cluster, which reports nothing yet.

        Args:
            listener: who is told what the ranks say.
        """

    @abstractmethod
    def start(self, cluster: Cluster) -> None:
        """Start its ranks, or report what those say that run.

        Raises:
            what `Cluster.start` raises.
        """
