"""The cluster and the hosts of a kept session in a notebook: the keeper's reports, and requests to it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ddp_notebook.errors import HostError
from ddp_notebook.launch.cluster import HANGS_S, Check, Cluster, Hosts, Listener, Startup
from ddp_notebook.launch.host.owner.requests import HostSilentError
from ddp_notebook.launch.keep.keeper_client import KeeperClient
from ddp_notebook.launch.keep.state import folder_of, update
from ddp_notebook.launch.membership.members import Renumbered
from ddp_notebook.launch.placement import Placement
from ddp_notebook.launch.process import STORE
from ddp_notebook.launch.sync.sync import Synced
from ddp_notebook.launch.transports import folders
from ddp_notebook.messages.encoding import Message, from_json, to_json
from ddp_notebook.messages.hosts import DoneReply, LookReply, Seen
from ddp_notebook.messages.keeper import (
    ClientFileReply,
    ClientFileRequest,
    ControllerEnded,
    DataReply,
    DeliveredReply,
    DropTransfer,
    FetchRequest,
    FormRequest,
    GiveUpRequest,
    HoldText,
    LackNothing,
    LookAtRanksRequest,
    NotesReply,
    PlaceReply,
    PlaceRequest,
    PutRequest,
    RankEnded,
    RankMessage,
    RanksRenumbered,
    RegisteredRequest,
    ReplaceRequest,
    ReplaceStoreRequest,
    ResizeRequest,
    RunningCells,
    SendToRank,
    SessionState,
    SignalRanksRequest,
    StateChanged,
    StatusRequest,
    StoppedReply,
    StopRequest,
    SyncReply,
    SyncRequest,
    TellRanks,
    TextReply,
    TransferReply,
    TroubleRequest,
)
from ddp_notebook.registry import entries
from ddp_notebook.wire.shared_memory import SealedMemory


class KeptCluster(Cluster):
    """A `Cluster` whose methods send requests to a keeper.

    Args:
        remote: the keeper.
        listener: receives messages and events of the ranks, from `start` on.
    """

    def __init__(self, remote: KeeperClient, listener: Listener) -> None:
        welcome = remote.welcome
        super().__init__(welcome.mark_token, folders.make(folder_of(welcome.number), welcome.folder), {})
        self._remote = remote
        self._listener = listener
        self._renumbered: Renumbered = lambda stayed: remote.renumbered(stayed)
        self._update(welcome.state)

    def _update(self, state: SessionState) -> None:
        update(state, self._hosts, self._processes)
        self._state = state
        self._placement: Placement = from_json(Placement, state.placement)

    def _on_text_of(self, rank: int, fd: int, data: bytes) -> None:
        # else a rank that joins and is not in the state yet
        if (process := self._processes.by_rank.get(rank)) is not None:
            process.note_text(fd, data)
            self._listener.on_text(rank, fd, data)

    # ---- starting

    def start(
        self, deadline: float, report: Callable[[str], None] = lambda _: None, check: Check = lambda: None
    ) -> None:
        """Start receiving messages of ranks, which the keeper has started: first all messages that were not shown."""
        self._remote.listen(
            {
                StateChanged: lambda message: self._update(message.state),
                RanksRenumbered: lambda message: self._renumbered(message.stayed),
                RunningCells: lambda message: self._remote.running(message.running, message.waiting),
                RankMessage: lambda message: self._listener.on_message(message.rank, message.message),
                RankEnded: lambda message: self._listener.on_ended(message.rank, message.how),
                ControllerEnded: lambda _: self._listener.on_controller_ended(),
            },
            self._on_text_of,
            self._listener.on_gone,
        )

    def form(self, deadline: float, check: Check = lambda: None) -> list[str]:
        return self._remote.ask(FormRequest(deadline=deadline), NotesReply, check=check).notes

    def replace(self, ranks: list[int], deadline: float, check: Check = lambda: None) -> list[str]:
        return self._remote.ask(ReplaceRequest(ranks=ranks, deadline=deadline), NotesReply, check=check).notes

    def place(self, stay: Sequence[int], world_size: int, *, may_share: bool) -> Placement:
        request = PlaceRequest(stay=list(stay), world_size=world_size, may_share=may_share)
        placement: Placement = from_json(Placement, self._remote.ask(request, PlaceReply).placement)
        return placement

    def resize(
        self, stay: Sequence[int], placement: Placement, deadline: float, check: Check, renumbered: Renumbered
    ) -> list[str]:
        before, self._renumbered = self._renumbered, renumbered  # in the order of the ranks' messages
        request = ResizeRequest(stay=list(stay), placement=to_json(placement), deadline=deadline)
        try:
            return self._remote.ask(request, NotesReply, check=check).notes
        finally:
            self._renumbered = before

    def note_supplied(self) -> None:
        self._remote.lacking = []
        self._remote.send(LackNothing())

    # ---- the ranks

    @property
    def placement(self) -> Placement:
        return self._placement

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
        self._remote.ask(GiveUpRequest(why=why, ranks=None if ranks is None else list(ranks)), DoneReply)

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
            return self._remote.ask(TroubleRequest(), TextReply).text
        except HostError as error:
            return str(error)

    @property
    def is_stopped(self) -> bool:
        """True if cells of this notebook cannot reach ranks: a host server is stopped, or another notebook drives."""
        return self._state.is_stopped or not self._remote.welcome.drives or self._remote.is_stopped

    def cut_off(self, after_s: float = HANGS_S) -> str:
        return self._remote.pulse(after_s)

    def pulse(self) -> str:
        return self._remote.pulse() or self._state.trouble

    def tell_what_is_slow(self, say: Callable[[str], object]) -> None:
        """Do nothing: the keeper sends a notice."""

    def replace_stopped_store(self) -> None:
        if any(process.kind == STORE for process in self.stopped([])):
            self._remote.ask(ReplaceStoreRequest(), DoneReply)

    @property
    def is_here(self) -> bool:
        return all(of.is_here for of in self._state.hosts)

    def send(self, rank: int, message: Message) -> None:
        self._remote.send(SendToRank(rank=rank, message=message))

    def put_in_inboxes(self, message: Message, ranks: list[int]) -> None:
        self._remote.send(TellRanks(message=message, ranks=ranks))

    def signal(self, ranks: list[int], *numbers: int, value: int = 0) -> bool:
        request = SignalRanksRequest(ranks=ranks, numbers=[int(n) for n in numbers], value=value)
        return self._remote.ask(request, DeliveredReply).by_servers

    def inspect(self, ranks: list[int]) -> dict[int, Seen]:
        return self._remote.ask(LookAtRanksRequest(ranks=ranks), LookReply).seen

    def files(self, pattern: str) -> list[Path]:
        return list(Path(self.directory).glob(pattern)) if self.is_here else []

    def silent_s(self, rank: int) -> float:
        if (heard_s := self._state.silent.get(rank)) is not None:
            return time.monotonic() - heard_s
        return self.process(rank).host.silent_s

    def hold_text(self, hold: bool) -> None:
        self._remote.send(HoldText(hold=hold))

    def drop(self, rank: int, transfer: int) -> None:
        self._remote.send(DropTransfer(rank=rank, transfer=transfer))

    def fetch(self, rank: int, transfer: int, nbytes: int, check: Check) -> bytearray:
        request = FetchRequest(rank=rank, transfer=transfer, nbytes=nbytes)
        return self._remote.ask(request, DataReply, check=check).data

    def put(self, rank: int, data: bytes | SealedMemory, check: Check) -> int:
        return self._remote.ask(PutRequest(rank=rank, data=bytes(data)), TransferReply, check=check).transfer

    def client_file(self) -> tuple[str, int]:
        reply = self._remote.ask(ClientFileRequest(), ClientFileReply)
        return reply.path, reply.pid

    def check_registered(self) -> None:
        self._remote.ask(RegisteredRequest(), DoneReply)

    # ---- ending

    def stop(self, grace_s: float = 1.0) -> bool:
        """End the session if this notebook drives it, else only leave it."""
        if self._remote.welcome.drives and not self._remote.gone:
            self._end_keeper()
        self.leave()
        return True

    def _end_keeper(self) -> None:
        if self._remote.is_stopped:
            self._remote.resume()  # so that it ends all processes in order
        try:
            self._remote.ask(StopRequest(), StoppedReply)
        except HostSilentError:
            self._remote.kill()  # host servers end their processes when their owner has ended
        except HostError:
            pass  # the keeper has ended

    def leave(self) -> None:
        """Leave the session, and keep the ranks running."""
        self._remote.close("this notebook has left the session")
        folders.remove(self.directory)


class KeptHosts(Hosts):
    """The hosts of a kept session, which the keeper owns.

    Args:
        remote: the keeper.

    Attributes:
        cluster: the proxy, once it exists.
    """

    cluster: KeptCluster

    def __init__(self, remote: KeeperClient) -> None:
        self._remote = remote

    def tell_of_warnings(self, on_warned: Callable[[str], object]) -> None:
        """Do nothing: the keeper receives warnings of the ranks' job."""

    def check_startable(self, ranks: int) -> None:
        """Check that files can be created locally, as a new keeper does."""
        entries.folder()
        folders.remove(folders.make("ddp_notebook-", is_large=True, is_guarded=False))

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
        whole = None if folder is None else os.path.abspath(folder)
        request = SyncRequest(folder=whole, overwrite=overwrite, also=list(also), is_large=is_large)
        synced: Synced = from_json(Synced, self._remote.ask(request, SyncReply, check=check).synced)
        return synced

    def status(self) -> str:
        if self._remote.gone:
            return ""  # its trouble names the cause
        kept = f"kept session {self._remote.welcome.name}: %ddp_attach {self._remote.welcome.name} in another kernel"
        try:
            of_tasks = self._remote.ask(StatusRequest(), TextReply).text
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
        """Do nothing: the keeper ends the hosts."""


class KeptStartup(Startup):
    """Startup by attaching to the ranks of a keeper.

    Args:
        remote: the keeper.
    """

    def __init__(self, remote: KeeperClient) -> None:
        self.hosts: KeptHosts
        super().__init__(KeptHosts(remote), remote.synced)
        self.remote = remote

    def make(self, listener: Listener) -> KeptCluster:
        self.hosts.cluster = cluster = KeptCluster(self.remote, listener)
        return cluster

    def start(self, cluster: Cluster) -> None:
        cluster.start(0.0)
