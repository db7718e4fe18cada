"""One process of a session, the table of all processes and their ranks, and exit causes in words."""

from __future__ import annotations

import re
import signal
import threading
import time
from dataclasses import dataclass, field

from ddp_notebook.launch.host.host import Host
from ddp_notebook.wire.marks import since_last_cell
from ddp_notebook.wire.store import StoreAddress

RANK, STORE, CONTROLLER = "rank", "store", "controller"
NOTICE = "ddp_notebook: "  # prefix of a line on a store's stderr that the notebook shows
# joining and leaving ranks: their numbers are not valid yet, or no longer
COMER, LEAVER = "rank that comes", "rank that leaves"
_LAST_WORDS_BYTES = 16_000

# faulthandler lines from run_code of IPython on, and the list of extension modules
_BELOW_THE_CELL = re.compile(
    r'(  File "[^"]*interactiveshell\.py", line \d+ in run_code\n(  File .*\n|  \.\.\.\n)*)'
    r"|(Extension modules: .*\n?)"
)


@dataclass(slots=True)
class Process:
    """A process of the session."""

    number: int  # number among the processes of its host; never reused
    kind: str  # RANK, STORE or CONTROLLER; COMER before, LEAVER after
    host: Host = field(repr=False)
    rank: int = -1
    serial: int = -1  # number among all processes of the session that had a rank, from 0; -1 if it had none yet
    pid: int = 0
    port: int = 0  # TCP port of the store for the user's programs
    store: StoreAddress | None = None  # address of the store for the session's groups
    status: int | None = None  # exit status once it ended; negative: signal
    why: str = ""  # a clause about the cause of its end
    lost: str = ""  # why the connection to it was lost; it then counts as ended
    said: set[str] = field(default_factory=set)  # names of the messages of its start
    error: str = ""
    lacks_others: bool = False  # the error: other ranks did not join its group in time
    not_registered: str = ""  # reason why its engine could not register with the ipyparallel controller
    notes: list[str] = field(default_factory=list)  # its messages about the process group that it has formed
    tails: dict[int, bytes] = field(default_factory=lambda: {1: b"", 2: b""})  # the end of its output, by fd

    @property
    def name(self) -> str:
        """Its name on the wire."""
        return f"{self.host.name}/{self.number}"

    @property
    def is_alive(self) -> bool:
        return self.status is None and not self.lost

    @property
    def stopped_s(self) -> float:
        """Seconds since the process was stopped (SIGSTOP, SIGTSTP); 0.0 if it runs or has ended."""
        since_s = self.host.stopped.get(self.number)
        return 0.0 if since_s is None or not self.is_alive else max(1e-9, time.monotonic() - since_s)

    @property
    def is_stopped(self) -> bool:
        return bool(self.stopped_s)

    @property
    def stopped(self) -> str:
        """Return a sentence with the remedy that loses least if the process is stopped, else ""."""
        if not self.is_stopped:
            return ""
        where = "" if self.host.is_here else f" on {self.host.label}"
        resume = f"kill -CONT {self.pid}{where} resumes it"
        if self.kind == RANK:
            return f"rank {self.rank}: its process {self.pid} is stopped; {resume}, with all its variables"
        if self.kind == STORE:
            return (
                f"the store (process {self.pid}), with which ranks form a group, is stopped; "
                f"{resume}, or %ddp_heal replaces it, and no variable is lost"
            )
        if self.kind == CONTROLLER:
            return (
                f"ipyparallel's controller (process {self.pid}) is stopped, so session.client does not answer; "
                f"{resume}. Cells run without it"
            )
        return f"a {self.kind} (process {self.pid}) is stopped; {resume}"

    @property
    def how(self) -> str:
        """The cause of its end, in a few words."""
        return self.lost or describe_status(self.status) + (f": {self.why}" if self.why else "")

    @property
    def last_words(self) -> str:
        """Its output since its last cell, without faulthandler's lines for frames below the cell."""
        words = "\n".join(tail.decode(errors="replace").strip() for tail in self.tails.values())
        return _BELOW_THE_CELL.sub("", words).strip()

    def note_text(self, fd: int, data: bytes) -> None:
        """Keep the end of its output."""
        data, has_ended = since_last_cell(data)
        if has_ended:  # output before the end of a cell is not part of the last words
            self.tails = {1: b"", 2: b""}
        self.tails[fd] = (self.tails[fd] + data)[-_LAST_WORDS_BYTES:]

    def how_it_ended(self) -> str:
        """Return the cause of its end, with its last output."""
        words = self.last_words
        return self.how + (f"; its last words:\n{words}" if words else "")

    def tell_end(self) -> str:
        """Return `how_it_ended`, and forget the last output, so that errors of later cells do not repeat it."""
        how = self.how_it_ended()
        self.forget_words()
        return how

    def forget_words(self) -> None:
        """Forget the last output, which has been shown."""
        self.tails = {1: b"", 2: b""}


class Processes:
    """All processes of a session, and their ranks.

    Attributes:
        changed: notified when a process sends a message of its start, or ends.
        all: by name on the wire, with ended processes.
        by_rank: the current process of each rank. Renumbering replaces the dict, for threads that read it.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.all: dict[str, Process] = {}
        self.by_rank: dict[int, Process] = {}

    @property
    def ranks(self) -> list[int]:
        return sorted(self.by_rank)

    @property
    def alive(self) -> list[int]:
        """Ranks with a living process."""
        return sorted([rank for rank, process in self.by_rank.items() if process.is_alive])

    @property
    def gone(self) -> list[int]:
        """Ranks with an ended process. Read several times per cell, so it avoids the properties of each process."""
        return sorted([rank for rank, one in self.by_rank.items() if one.status is not None or one.lost])

    @property
    def current(self) -> list[Process]:
        """All processes without those that were replaced as their rank, or whose rank no longer exists."""
        return [p for p in self.all.values() if p.kind != RANK or self.by_rank.get(p.rank) is p]

    def living(self, kind: str) -> list[Process]:
        """The living processes of a kind; ranks in their order."""
        if kind == RANK:
            return [process for _, process in sorted(self.by_rank.items()) if process.is_alive]
        return [process for process in self.all.values() if process.kind == kind and process.is_alive]

    def by_host(self, ranks: list[int]) -> dict[Host, list[Process]]:
        """Return the processes of these ranks, by host."""
        found: dict[Host, list[Process]] = {}
        for rank in ranks:
            process = self.by_rank[rank]
            found.setdefault(process.host, []).append(process)
        return found


def describe_status(status: int | None) -> str:
    """Describe an exit status.

    Example:
        >>> describe_status(-9)
        'killed by SIGKILL'
    """
    if status is None:
        return "it runs"
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        return f"killed by signal {-status}"
    return f"killed by {name}"
