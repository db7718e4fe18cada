"""The cluster and the hosts of a kept session, as a notebook has them: what the keeper has told, and asking it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_notebook.errors import HostError
from ddp_notebook.launch.cluster import HANGS_S, Beginning, Check, Cluster, Hosts, Listener
from ddp_notebook.launch.host.owner.requests import HostSilentError
from ddp_notebook.launch.keep.remote import Remote
from ddp_notebook.launch.keep.state import State, folder_of, take
from ddp_notebook.launch.members.members import Renumbered
from ddp_notebook.launch.placement import Placement
from ddp_notebook.launch.process import STORE
from ddp_notebook.launch.sync.sync import Synced
from ddp_notebook.launch.ways import folders
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.hosts import Seen
from ddp_notebook.registry import entries
from ddp_notebook.wire.memory import Memory


class KeptCluster(Cluster):
    """Does by a keeper what a `Cluster` does itself.

    Args:
        remote: the keeper.
        listener: who is told what ranks say, from `start` on.
    """

    def __init__(self, remote: Remote, listener: Listener) -> None:
        welcome = remote.welcome
        super().__init__(welcome.mark_token, folders.make(folder_of(welcome.number), welcome.folder), {})
        self._remote = remote
        self._listener = listener
        self._renumbered: Renumbered = lambda stayed: remote.renumbered(stayed)
        self._take(welcome.state)

    def _take(self, state: State) -> None:
        take(state, self._hosts, self._processes)
        self._state = state

    def _on_text_of(self, rank: int, fd: int, data: bytes) -> None:
        if (process := self._processes.by_rank.get(rank)) is not None:  # else it comes, and nobody has told of it
            process.note_text(fd, data)
            self._listener.on_text(rank, fd, data)

    # ---- starting

    def start(
        self, deadline: float, report: Callable[[str], None] = lambda _: None, check: Check = lambda: None
    ) -> None:
        """The keeper has started them. From now on what they say is heard: first all that was not shown."""
        self._remote.listen(
            {
                "state": self._take,
                "renumbered": self._on_renumbered,
                "running": lambda *told: self._remote.running(*told),
                "message": self._listener.on_message,
                "text": self._on_text_of,
                "ended rank": self._listener.on_ended,
                "controller ended": self._listener.on_controller_ended,
            },
            self._listener.on_gone,
        )

    def form(self, deadline: float, check: Check = lambda: None) -> list[str]:
        notes: list[str] = self._remote.ask("form", check=check, deadline=deadline)
        return notes

    def replace(self, ranks: list[int], deadline: float, check: Check = lambda: None) -> list[str]:
        notes: list[str] = self._remote.ask("replace", check=check, ranks=ranks, deadline=deadline)
        return notes

    def place(self, stay: Sequence[int], world_size: int, *, may_share: bool) -> Placement:
        placement: Placement = self._remote.ask("place", stay=stay, world_size=world_size, may_share=may_share)
        return placement

    def resize(
        self, stay: Sequence[int], placement: Placement, deadline: float, check: Check, renumbered: Renumbered
    ) -> list[str]:
        before, self._renumbered = self._renumbered, renumbered  # which is told in the order of what ranks say
        try:
            notes: list[str] = self._remote.ask(
                "resize", check=check, stay=stay, placement=placement, deadline=deadline
            )
        finally:
            self._renumbered = before
        return notes

    def note_supplied(self) -> None:
        self._remote.lacking = []
        self._remote.tell("supplied")

    def _on_renumbered(self, stayed: Mapping[int, int]) -> None:
        self._renumbered(stayed)

    # ---- the ranks

    @property
    def placement(self) -> Placement:
        return self._state.placement

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def is_running(self) -> bool:
        return not self._remote.gone and self._state.is_running

    @property
    def unheard(self) -> dict[int, str]:
        return self._state.unheard

    def give_up(self, why: str, ranks: Sequence[int] | None = None) -> None:
        self._remote.ask("give_up", why=why, ranks=ranks)

    def trouble(self) -> str:
        if self._remote.gone:
            return self._remote.gone
        if why := self._remote.pulse():
            return why
        if not self._remote.welcome.drives:
            told = self._remote.welcome
            return (
                f"{told.driver or 'no notebook'} drives this session. This notebook has the monitor, the recording and "
                f"%ddp_status. %ddp_attach {told.name} --take-over lets it run cells"
            )
        try:
            return str(self._remote.ask("trouble"))
        except HostError as error:
            return str(error)

    @property
    def is_stopped(self) -> bool:
        """Whether no cell of this notebook gets to the ranks: a host server is stopped, or another notebook drives."""
        return self._state.is_stopped or not self._remote.welcome.drives or self._remote.is_stopped

    def cut_off(self, after_s: float = HANGS_S) -> str:
        return self._remote.pulse(after_s)

    def pulse(self) -> str:
        return self._remote.pulse() or self._state.trouble

    def tell_what_is_slow(self, say: Callable[[str], object]) -> None:
        """Do nothing: the keeper sends a notice."""

    def replace_stopped_store(self) -> None:
        if any(process.kind == STORE for process in self.stopped([])):
            self._remote.ask("replace_stopped_store")

    @property
    def is_here(self) -> bool:
        return all(of.is_here for of in self._state.hosts)

    def send(self, rank: int, message: Message) -> None:
        self._remote.tell("send", rank, message)

    def tell(self, message: Message, ranks: list[int]) -> None:
        self._remote.tell("tell", message, ranks)

    def signal(self, ranks: list[int], *numbers: int, value: int = 0) -> bool:
        return bool(self._remote.ask("signal", ranks=ranks, numbers=[int(n) for n in numbers], value=value))

    def look(self, ranks: list[int]) -> dict[int, Seen]:
        seen: dict[int, Seen] = self._remote.ask("look", ranks=ranks)
        return seen

    def files(self, pattern: str) -> list[Path]:
        return list(Path(self.directory).glob(pattern)) if self.is_here else []

    def silent_s(self, rank: int) -> float:
        if (heard_s := self._state.silent.get(rank)) is not None:
            return time.monotonic() - heard_s
        return self.process(rank).host.silent_s

    def hold_text(self, hold: bool) -> None:
        self._remote.tell("hold", hold)

    def drop(self, rank: int, transfer: int) -> None:
        self._remote.tell("drop", rank, transfer)

    def fetch(self, rank: int, transfer: int, nbytes: int, check: Check) -> bytearray:
        data: bytearray = self._remote.ask("fetch", check=check, rank=rank, transfer=transfer, nbytes=nbytes)
        return data

    def put(self, rank: int, data: bytes | Memory, check: Check) -> int:
        return int(self._remote.ask("put", check=check, rank=rank, data=bytes(data)))

    def client_file(self) -> tuple[str, int]:
        path, pid = self._remote.ask("client_file")
        return path, pid

    def check_registered(self) -> None:
        self._remote.ask("check_registered")

    # ---- ending

    def stop(self, grace_s: float = 1.0) -> bool:
        """End the session, if this notebook drives it; else only leave it."""
        if self._remote.welcome.drives and not self._remote.gone:
            self._end_keeper()
        self.leave()
        return True

    def _end_keeper(self) -> None:
        if self._remote.is_stopped:
            self._remote.resume()  # so that it ends everything in order
        try:
            self._remote.ask("stop")
        except HostSilentError:
            self._remote.kill()  # the host servers end all that they have started when their owner is gone
        except HostError:
            pass  # it has ended

    def leave(self) -> None:
        """Go, and let the ranks live."""
        self._remote.close("this notebook has left the session")
        folders.remove(self.directory)


class KeptHosts(Hosts):
    """The hosts of a kept session: the keeper has them.

    Args:
        remote: the keeper.

    Attributes:
        cluster: the stand-in, once there is one.
    """

    cluster: KeptCluster

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def tell_of_warnings(self, on_warned: Callable[[str], object]) -> None:
        """Do nothing: the keeper hears the job of the ranks."""

    def check_startable(self, ranks: int) -> None:
        """Try whether files could be made here, as another keeper would."""
        entries.folder()
        folders.remove(folders.make("ddp_notebook-", is_large=True, is_guarded=False))

    def sync(self, folder: str | None, **how: Any) -> Synced:
        how.pop("progress")
        whole = None if folder is None else os.path.abspath(folder)
        synced: Synced = self._remote.ask("sync", check=how.pop("check"), folder=whole, **how)
        return synced

    def status(self) -> str:
        if self._remote.gone:
            return ""  # its trouble says what became of it
        kept = f"kept session {self._remote.welcome.name}: %ddp_attach {self._remote.welcome.name} in another kernel"
        try:
            of_tasks = str(self._remote.ask("status"))
        except HostSilentError:  # `trouble` returns the reason
            of_tasks = ""
        return "\n".join(filter(None, [of_tasks, kept]))

    def notices(self) -> list[str]:
        notices, self._remote.notices = self._remote.notices, []
        return notices

    @property
    def are_alive(self) -> bool:
        return self.cluster.is_running

    @property
    def pids(self) -> list[int]:
        return [host.pid for host in self.cluster.hosts]

    @property
    def words(self) -> str:
        return ", ".join(dict.fromkeys(host.label for host in self.cluster.hosts))

    def end(self, *, healthy: bool = True) -> None:
        """The keeper ends them."""


class Attached(Beginning):
    """Attaching to ranks that a keeper has.

    Args:
        remote: the keeper.
    """

    def __init__(self, remote: Remote) -> None:
        self.hosts: KeptHosts
        super().__init__(KeptHosts(remote), remote.welcome.synced)
        self.remote = remote

    def make(self, listener: Listener) -> KeptCluster:
        self.hosts.cluster = cluster = KeptCluster(self.remote, listener)
        return cluster

    def start(self, cluster: Cluster) -> None:
        cluster.start(0.0)
