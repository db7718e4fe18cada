"""Handle requests of notebooks to the keeper, with their permissions."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping

from ddp_notebook.errors import HostError, SessionBrokenError
from ddp_notebook.launch.cluster import Check
from ddp_notebook.launch.hosts import DirectHosts
from ddp_notebook.launch.keep.exception_data import failure_of
from ddp_notebook.launch.keep.keeper.journal import Journal
from ddp_notebook.launch.keep.keeper.notebooks import Notebook, Notebooks
from ddp_notebook.launch.keep.keeper.queue import Queue
from ddp_notebook.launch.keep.keeper.rank_events import RankEvents
from ddp_notebook.launch.keep.state import OwnCluster
from ddp_notebook.launch.membership.members import Renumbered
from ddp_notebook.launch.placement import Placement
from ddp_notebook.messages.dispatch import Table
from ddp_notebook.messages.encoding import Message, from_json, to_json
from ddp_notebook.messages.hosts import DoneReply, LookReply, PingRequest
from ddp_notebook.messages.keeper import (
    CancelRequest,
    CellShown,
    ClientFileReply,
    ClientFileRequest,
    DataReply,
    DeliveredReply,
    DropTransfer,
    FailureReply,
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
    RegisteredRequest,
    ReplaceRequest,
    ReplaceStoreRequest,
    ResizeRequest,
    SendToRank,
    SignalRanksRequest,
    StatusRequest,
    StoppedReply,
    StopRequest,
    SyncReply,
    SyncRequest,
    TellRanks,
    TextReply,
    TransferReply,
    TroubleRequest,
    WaitingJobs,
)
from ddp_notebook.messages.ranks import Check as CheckVariables
from ddp_notebook.messages.ranks import ClockProbe, InputReply, Probe, Pull, RunCell
from ddp_notebook.messages.survive_messages import Resume

_QUESTIONS = (Probe, ClockProbe, CheckVariables, Pull)  # messages without side effects
# Requests that a read-only notebook may send.
_OF_ALL = (TroubleRequest, StatusRequest, LookAtRanksRequest, FetchRequest, PingRequest)


class RequestHandler:
    """Handles requests of notebooks.

    Args:
        cluster, hosts, journal, queue, notebooks: of the session.
        heard: acknowledges messages of ranks for a notebook that has left, and sends notebooks the running cells.
        changed: sends the session state to all notebooks, after an operation that may change it.
        renumbered: called with the former number of each kept rank, by its new one.
        end: ends the session, and returns after its end.
    """

    def __init__(
        self,
        cluster: OwnCluster,
        hosts: DirectHosts,
        journal: Journal,
        queue: Queue,
        notebooks: Notebooks,
        heard: RankEvents,
        changed: Callable[[], None],
        renumbered: Renumbered,
        end: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._hosts = hosts
        self._journal = journal
        self._queue = queue
        self._notebooks = notebooks
        self._heard = heard
        self._changed = changed
        self._renumbered = renumbered
        self._end = end
        self._holding = threading.Lock()
        self.lacking: list[int] = []  # new ranks that were not initialised like the others
        self._notes: Table[None] = Table(  # messages without a reply; handlers get the notebook and the message
            {
                CancelRequest: lambda notebook, message: notebook.cancelled.add(message.number),
                SendToRank: self._send,
                TellRanks: self._put_in_inboxes,
                DropTransfer: lambda _, message: self._drop(message),  # a read-only notebook that pulls sends this too
                HoldText: self._hold,
            }
        )
        self._of_driver: Table[None] = Table(  # like `_notes`, but only from the driving notebook and under the lock
            {WaitingJobs: self._on_waiting, LackNothing: self._on_supplied, CellShown: self._on_shown}
        )
        # handlers get a check that the request was not cancelled, and the message
        self._requests: Table[Message] = Table(
            {
                FormRequest: self._form,
                ReplaceRequest: self._replace,
                PlaceRequest: self._place,
                ResizeRequest: self._resize,
                SignalRanksRequest: self._signal,
                LookAtRanksRequest: self._inspect,
                FetchRequest: self._fetch,
                PutRequest: self._put,
                ClientFileRequest: self._client_file,
                RegisteredRequest: self._check_registered,
                GiveUpRequest: self._give_up,
                TroubleRequest: self._trouble,
                PingRequest: lambda *_: DoneReply(),
                ReplaceStoreRequest: self._replace_stopped_store,
                StatusRequest: lambda *_: TextReply(text=self._hosts.status()),
                SyncRequest: self._sync,
                StopRequest: self._stop,
            }
        )

    def serve(self, notebook: Notebook) -> None:
        """Handle messages of a notebook until it leaves."""
        while (came := notebook.hear()) is not None:
            kind = type(came.message)
            if kind in self._requests:
                threading.Thread(target=self._do, args=(notebook, *came), daemon=True).start()
            elif kind in self._notes:
                self._notes.handle(notebook, came.message)
            elif kind in self._of_driver:
                with self._notebooks.lock:  # a takeover uses the same lock
                    if notebook.drives:
                        self._of_driver.handle(came.message)

    # ---- what has no answer, in the order in which it came

    def _send(self, notebook: Notebook, what: SendToRank) -> None:
        rank, message = what.rank, what.message
        if rank not in self._cluster.ranks:
            return  # the rank has left in the meantime
        with self._notebooks.lock:
            if not notebook.drives and not isinstance(message, _QUESTIONS):
                return
            if isinstance(message, InputReply):
                self._journal.on_answered(rank, message)
            elif isinstance(message, Resume):
                self._journal.on_resumed(rank)
        self._cluster.send(rank, message)

    def _put_in_inboxes(self, notebook: Notebook, what: TellRanks) -> None:
        message, ranks = what.message, [rank for rank in what.ranks if rank in self._cluster.ranks]
        with self._notebooks.lock:
            if not notebook.drives:
                return  # otherwise a cell would run that the new driver does not know
            if isinstance(message, RunCell):
                self._journal.on_told(message, ranks, self._cluster.gone)
                self._queue.on_told(message)
                self._heard.tell_running()
        self._cluster.put_in_inboxes(message, ranks)

    def _on_waiting(self, message: WaitingJobs) -> None:
        self._queue.waiting = message.waiting
        self._heard.tell_running()

    def _hold(self, notebook: Notebook, message: HoldText) -> None:
        with self._holding:
            if notebook.drives:
                self._cluster.hold_text(message.hold)

    def let_flow(self, driver: Notebook | None) -> None:
        """Resume the ranks' output after the former driver has left: it may have paused it.

        Args:
            driver: the current driver. Does nothing if another notebook drives, which may have paused the output
                itself.
        """
        with self._holding:
            if self._notebooks.driver is driver:
                self._cluster.hold_text(False)
                self._heard.take_all()

    def _drop(self, message: DropTransfer) -> None:
        if message.rank in self._cluster.ranks:
            self._cluster.drop(message.rank, message.transfer)

    def _on_supplied(self, _: LackNothing) -> None:
        self.lacking = []

    def _on_shown(self, message: CellShown) -> None:
        self._journal.on_shown(message.cell)

    # ---- what has one

    def _do(self, notebook: Notebook, message: Message, number: int) -> None:
        def check() -> None:
            if number in notebook.cancelled:
                raise KeyboardInterrupt

        reply: Message
        try:
            if not notebook.drives and not isinstance(message, _OF_ALL):
                raise SessionBrokenError("another notebook drives this session: %ddp_attach --take-over takes it over")
            reply = self._requests.handle(check, message)
        except BaseException as error:
            reply = FailureReply(failure=failure_of(error))
        try:
            notebook.send(reply, number)
        finally:
            notebook.cancelled.discard(number)

    def _form(self, check: Check, request: FormRequest) -> NotesReply:
        try:
            return NotesReply(notes=self._cluster.form(request.deadline, check))
        finally:
            self._changed()

    def _replace(self, check: Check, request: ReplaceRequest) -> NotesReply:
        try:
            return NotesReply(notes=self._cluster.replace(request.ranks, request.deadline, check))
        finally:
            self._changed()

    def _place(self, _: Check, request: PlaceRequest) -> PlaceReply:
        placement = self._cluster.place(request.stay, request.world_size, may_share=request.may_share)
        return PlaceReply(placement=to_json(placement))

    def _resize(self, check: Check, request: ResizeRequest) -> NotesReply:
        placement: Placement = from_json(Placement, request.placement)

        def renumbered(stayed: Mapping[int, int]) -> None:
            still = [now for now, was in stayed.items() if was in self.lacking]
            self.lacking = sorted({*still, *range(len(request.stay), placement.world_size)})
            self._renumbered(stayed)

        try:
            notes = self._cluster.resize(request.stay, placement, request.deadline, check, renumbered)
            return NotesReply(notes=notes)
        finally:
            self._changed()

    def _signal(self, _: Check, request: SignalRanksRequest) -> DeliveredReply:
        by_servers = self._cluster.signal(request.ranks, *request.numbers, value=request.value)
        return DeliveredReply(by_servers=by_servers)

    def _inspect(self, _: Check, request: LookAtRanksRequest) -> LookReply:
        return LookReply(seen=self._cluster.inspect(request.ranks))

    def _fetch(self, check: Check, request: FetchRequest) -> DataReply:
        return DataReply(data=self._cluster.fetch(request.rank, request.transfer, request.nbytes, check))

    def _put(self, check: Check, request: PutRequest) -> TransferReply:
        return TransferReply(transfer=self._cluster.put(request.rank, request.data, check))

    def _client_file(self, _: Check, request: ClientFileRequest) -> ClientFileReply:
        try:
            path, pid = self._cluster.client_file()
            return ClientFileReply(path=path, pid=pid)
        finally:
            self._changed()

    def _check_registered(self, _: Check, request: RegisteredRequest) -> DoneReply:
        self._cluster.check_registered()
        return DoneReply()

    def _give_up(self, _: Check, request: GiveUpRequest) -> DoneReply:
        self._cluster.give_up(request.why, request.ranks)
        self._changed()
        return DoneReply()

    def _trouble(self, _: Check, request: TroubleRequest) -> TextReply:
        try:
            return TextReply(text=self._cluster.trouble())
        finally:
            self._changed()  # first: the notebook names stopped processes right after this reply

    def _replace_stopped_store(self, _: Check, request: ReplaceStoreRequest) -> DoneReply:
        self._cluster.replace_stopped_store()
        self._changed()
        return DoneReply()

    def _sync(self, check: Check, request: SyncRequest) -> SyncReply:
        synced = self._hosts.sync(
            request.folder,
            overwrite=request.overwrite,
            also=request.also,
            is_large=request.is_large,
            check=check,
            progress=lambda _: None,
        )
        return SyncReply(synced=to_json(synced))

    def _stop(self, _: Check, request: StopRequest) -> StoppedReply:
        with contextlib.suppress(HostError):
            self._end()
        return StoppedReply()
