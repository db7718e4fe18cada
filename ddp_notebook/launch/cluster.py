"""Interface of the processes of one session: ranks, store and controller, on one or more hosts.

There are two implementations. `launch.direct.DirectCluster` runs in the process of the notebook or of a keeper.
`launch.keep.proxy.KeptCluster` runs in a notebook and calls a keeper. A process keeps its number; its rank belongs to
an epoch of the group, see `forming`.
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
from ddp_notebook.wire.shared_memory import SealedMemory

if TYPE_CHECKING:
    from ddp_notebook.launch.sync.sync import Synced


def end_all(processes: Processes, hosts: Sequence[Host], grace_s: float) -> list[int]:
    """End all processes and their descendants.

    Args:
        processes: of the session.
        hosts: the hosts of the ranks.
        grace_s: seconds from `END` to SIGKILL.

    Returns:
        The ids of processes that could not be ended, see `Host.end_all`.
    """
    left: list[int] = []

    def end(host: Host) -> None:
        those = [process for process in processes.all.values() if process.host is host]
        ranks = [process.number for process in those if process.kind == RANK]
        left.extend(host.end_all(ranks, [process.number for process in those if process.kind != RANK], grace_s))

    with_controller = [process.host for process in processes.living(CONTROLLER)]
    first, *others = dict.fromkeys([*hosts, *with_controller])
    beside = [threading.Thread(target=end, args=(host,)) for host in others]  # a host may need the whole grace period
    for one in beside:
        one.start()
    end(first)
    for one in beside:
        one.join()
    return left


__all__ = ["Check", "Cluster", "Hosts", "Listener", "Startup"]
HANGS_S = 5.0  # seconds without an answer until a process counts as hanging; generous for loaded machines


class Listener(Protocol):
    """Receiver of messages and events of the ranks. Called in I/O threads; must not block."""

    def on_message(self, rank: int, message: Message) -> None: ...
    def on_text(self, rank: int, fd: int, data: bytes) -> None: ...
    def on_ended(self, rank: int, how: str) -> None: ...
    def on_controller_ended(self) -> None: ...
    def on_gone(self) -> None: ...


class Cluster(ABC):
    """The processes of a session.

    Args:
        mark_token: token of the marks in the ranks' text.
        directory: local directory for the session's logs and profiles.
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
            deadline: monotonic time limit.
            report: called with the name of each completed stage.
            check: called often during the wait; an exception from it ends the wait.

        Raises:
            StartError: a process ended or could not do its part.
            StartTimeoutError: the deadline passed; the error names the stage and the missing ranks.
        """

    @abstractmethod
    def form(self, deadline: float, check: Check = lambda: None) -> list[str]:
        """Form the group again, in the next epoch, with the same ranks and sizes. Variables are kept.

        A dead store is replaced first. If `check` raises, the call can be repeated.

        Returns:
            Descriptions of state that the ranks could not restore.
        """

    @abstractmethod
    def replace(self, ranks: list[int], deadline: float, check: Check = lambda: None) -> list[str]:
        """Start new processes for dead ranks, then form the group of all ranks.

        Ranks of a lost host move to other hosts, see `LostRanks.place`.

        Returns:
            Sentences that name the new hosts of moved ranks, then the result of `form`.

        Raises:
            StartError: it failed and can be repeated; the new processes have been ended.
            any exception of `check`: the same holds.
        """

    @abstractmethod
    def place(self, stay: Sequence[int], world_size: int, *, may_share: bool) -> Placement:
        """Return the placement for a different number of ranks, see `rank_placement.resized`."""

    @abstractmethod
    def resize(
        self, stay: Sequence[int], placement: Placement, deadline: float, check: Check, renumbered: Renumbered
    ) -> list[str]:
        """Change the number of ranks: keep and renumber some, start new ones, and end the others. Returns the result of
        `form`.

        Args:
            stay: ranks to keep, in the order of their new numbers.
            placement: the result of `place` for these ranks.
            deadline: monotonic time limit.
            check: called often during the wait; an exception from it ends the wait.
            renumbered: called after the renumbering, before any new number is used.

        Raises:
            StartError: a process did not start, and nothing was changed; or the group did not form.
            any exception of `check`: the same holds.
        """

    @abstractmethod
    def note_supplied(self) -> None:
        """Mark new ranks as initialised, so that notebooks attaching later do not warn."""

    # ---- the ranks

    @property
    @abstractmethod
    def placement(self) -> Placement:
        """The current host and device of each rank."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Number of the group, raised by each call to form."""

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """True if a host server is alive. Its ranks may have died by themselves; ranks of a lost host are dead."""

    @property
    def hosts(self) -> list[Host]:
        """Hosts that were not lost."""
        return [host for host in self._hosts.values() if host.is_alive]

    @property
    @abstractmethod
    def unheard(self) -> dict[int, str]:
        """Ranks on unreachable hosts that may come back, with a description for each."""

    @abstractmethod
    def give_up(self, why: str, ranks: Sequence[int] | None = None) -> None:
        """Declare unreachable hosts lost, and return when their ranks are known to be dead.

        Does nothing if no host would be left.

        Args:
            why: the reason in words, e.g. "somebody asked for it".
            ranks: only hosts of these ranks; None: all hosts, except those whose silence the user can end, because
                their ssh is stopped.
        """

    @abstractmethod
    def trouble(self) -> str:
        """Return a sentence about a host server that does not answer; "" if all answer. Ignores lost hosts."""

    @property
    @abstractmethod
    def is_stopped(self) -> bool:
        """True if a host server is stopped (SIGSTOP). Its ranks then receive no cells, and their text is held back."""

    def stopped(self, ranks: Sequence[int] | None = None) -> list[Process]:
        """Return the stopped processes (SIGSTOP, SIGTSTP) of the session from reports of the hosts, without a request.

        Args:
            ranks: leave out other ranks; None: include all.
        """
        if not any(host.stopped for host in self.hosts):  # the usual case
            return []
        processes = [process for process in self._processes.current if process.is_stopped]
        return [one for one in processes if one.kind != RANK or ranks is None or one.rank in ranks]

    @abstractmethod
    def pulse(self) -> str:
        """Return why a host server does not answer, without a wait, see `Host.pulse`; "" if all answer."""

    def cut_off(self, after_s: float = HANGS_S) -> str:
        """Return a sentence about why messages cannot reach the ranks; "" if they can.

        Args:
            after_s: seconds without an answer after which a process that is not stopped counts as hanging.
        """
        return ""

    @abstractmethod
    def tell_what_is_slow(self, say: Callable[[str], object]) -> None:
        """Set the callback for a sentence that names the cause when forming the group again takes long."""

    @abstractmethod
    def replace_stopped_store(self) -> None:
        """End a stopped store, so that ranks do not wait for it. The next group gets a new store."""

    @property
    @abstractmethod
    def is_here(self) -> bool:
        """True if all ranks are on the notebook's machine."""

    @property
    def ranks(self) -> list[int]:
        return self._processes.ranks

    def process(self, rank: int) -> Process:
        """Return the current process of a rank."""
        return self._processes.by_rank[rank]

    @property
    def alive(self) -> list[int]:
        """Ranks with a living process."""
        return self._processes.alive

    @property
    def gone(self) -> list[int]:
        """Ranks with an ended process."""
        return self._processes.gone

    @abstractmethod
    def send(self, rank: int, message: Message) -> None:
        """Send a message to a rank, from any thread. A message to a dead or removed rank is dropped."""

    @abstractmethod
    def put_in_inboxes(self, message: Message, ranks: list[int]) -> None:
        """Put a message into inboxes of ranks. Their main threads read messages in order, see `launch.host.pipes`."""

    @abstractmethod
    def signal(self, ranks: list[int], *numbers: int, value: int = 0) -> bool:
        """Send signals to ranks, in this order.

        The signals are delivered when this returns, even if the host server does not answer.

        Args:
            ranks: the receivers.
            numbers: of the signals.
            value: sent with `RELEASE`.

        Returns:
            False if a host server does not answer.

        Raises:
            HostError: a host server ended.
        """

    @abstractmethod
    def inspect(self, ranks: list[int]) -> dict[int, Seen]:
        """Return the hosts' view of ranks that do not answer: whether each is stopped, and its stack.

        Raises:
            HostError: a host server ended.
        """

    @abstractmethod
    def files(self, pattern: str) -> list[Path]:
        """Return files that ranks have written into the session's directory, as local paths.

        Args:
            pattern: of the file names, as for `Path.glob`.
        """

    @abstractmethod
    def silent_s(self, rank: int) -> float:
        """Return the seconds since the last message of the rank's agent."""

    @abstractmethod
    def hold_text(self, hold: bool) -> None:
        """Leave text in the ranks' pipes (True), or read it again (False)."""

    @abstractmethod
    def drop(self, rank: int, transfer: int) -> None:
        """Make a rank drop bulk data that is no longer needed. From any thread; does not block."""

    @abstractmethod
    def fetch(self, rank: int, transfer: int, nbytes: int, check: Check) -> bytearray:
        """Fetch bulk data from a rank."""

    @abstractmethod
    def put(self, rank: int, data: bytes | SealedMemory, check: Check) -> int:
        """Send bulk data to a rank. Returns the number of the transfer, for `Push` or `drop`."""

    @abstractmethod
    def client_file(self) -> tuple[str, int]:
        """Return the connection file for `ipp.Client` and the controller's process id.

        The first call starts the controller. A controller that ended is started again with the same connection file.

        Raises:
            ClientError: it cannot be started, or a host cannot reach it.
        """

    @abstractmethod
    def check_registered(self) -> None:
        """See `Engines.check_registered`."""

    def pids(self, kind: str) -> list[int]:
        """Return the ids of the living processes of a kind: "rank" (in rank order), "store" or "controller"."""
        # Processes that are just being started have pid 0: a signal to 0 would reach the caller's process group.
        return [process.pid for process in self._processes.living(kind) if process.pid]

    # ---- ending

    @abstractmethod
    def stop(self, grace_s: float = 1.0) -> bool:
        """End all processes and their descendants.

        Returns:
            False if some could not be ended; then only the end of the host server ends them.
        """


class Hosts(ABC):
    """The hosts of a session."""

    @abstractmethod
    def check_startable(self, ranks: int) -> None:
        """Check that the ranks of this session could be started again now, without ending any.

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
        """Send a folder; None: the folder of the start, or else the notebook's folder. See `Session.sync`."""

    @abstractmethod
    def status(self) -> str:
        """Return the lines of `%ddp_status` about the launcher of the hosts; "" if there are none."""

    @abstractmethod
    def notices(self) -> list[str]:
        """Return notices that the user has not seen yet, e.g. that the job ends soon."""

    @abstractmethod
    def tell_of_warnings(self, on_warned: Callable[[str], object]) -> None:
        """Set a callback for the warning that the job of the ranks ends soon. It is called from any thread."""

    @property
    @abstractmethod
    def are_alive(self) -> bool:
        """True if any host is alive; the others were lost."""

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """Process ids of the host servers, each on its host."""

    @property
    @abstractmethod
    def words(self) -> str:
        """The names of the hosts, after the ranks were placed."""

    @abstractmethod
    def end(self, *, healthy: bool = True) -> None:
        """Return the servers to the pool for the next session, or end them.

        Args:
            healthy: the servers have ended everything that they had started.
        """


class Startup(ABC):
    """Startup of a session: creates its cluster and starts its ranks.

    Args:
        hosts: of the ranks. The caller ends them.
        synced: result of the upload to the hosts; None if nothing was to be sent.
    """

    def __init__(self, hosts: Hosts, synced: Synced | None = None) -> None:
        self.hosts = hosts
        self.synced = synced

    @abstractmethod
    def make(self, listener: Listener) -> Cluster:
        """Return the cluster, which reports nothing yet.

        Args:
            listener: receives messages and events of the ranks.
        """

    @abstractmethod
    def start(self, cluster: Cluster) -> None:
        """Start the ranks, or report the messages of ranks that already run.

        Raises:
            any error of `Cluster.start`.
        """
