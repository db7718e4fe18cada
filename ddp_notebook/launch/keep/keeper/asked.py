"""What a notebook may ask of the keeper, and who may ask it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from ddp_notebook.errors import HostError, SessionBrokenError
from ddp_notebook.launch.hosts import DirectHosts
from ddp_notebook.launch.keep.keeper.heard import Heard
from ddp_notebook.launch.keep.keeper.journal import Event, Journal
from ddp_notebook.launch.keep.keeper.notebooks import Notebook, Notebooks
from ddp_notebook.launch.keep.keeper.queue import Queue
from ddp_notebook.launch.keep.state import OwnCluster, Waiting
from ddp_notebook.launch.members.members import Renumbered
from ddp_notebook.launch.placement import Placement
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import Check, ClockProbe, InputReply, Probe, Pull, RunCell
from ddp_notebook.messages.survival import Resume

_QUESTIONS = (Probe, ClockProbe, Check, Pull)  # which change nothing
_OF_ALL = {"trouble", "status", "look", "fetch", "ping"}  # requests that a read-only notebook may send


class Asked:
    """Does what notebooks ask.

    Args:
        cluster, hosts, journal, queue, notebooks: of the session.
        heard: acknowledges what ranks have sent to a notebook that has gone, and tells notebooks which cells run.
        changed: tells all how things are, after something was done that may change it.
        renumbered: told the former number of each rank that has stayed, by its new one.
        end: ends the session, and waits for that.
    """

    def __init__(
        self,
        cluster: OwnCluster,
        hosts: DirectHosts,
        journal: Journal,
        queue: Queue,
        notebooks: Notebooks,
        heard: Heard,
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
        self.lacking: list[int] = []  # new ranks that have not been told what the others have

    def serve(self, notebook: Notebook) -> None:
        """Do what it asks until it is gone."""
        while (said := notebook.hear()) is not None:
            kind, *arguments = said
            if kind == "do":
                number, op, parameters = arguments
                threading.Thread(target=self._do, args=(notebook, number, op, parameters), daemon=True).start()
            elif kind == "cancel":
                notebook.cancelled.add(arguments[0])
            elif kind == "send":
                self._send(notebook, *arguments)
            elif kind == "tell":
                self._tell(notebook, *arguments)
            elif kind == "drop":  # an onlooker that pulls sends it too
                self._drop(*arguments)
            elif kind == "hold":
                self._hold(notebook, *arguments)
            else:
                with self._notebooks.lock:  # under which another one takes over, and is told how things are
                    if notebook.drives:
                        getattr(self, f"_on_{kind}")(*arguments)

    # ---- what has no answer, in the order in which it came

    def _send(self, notebook: Notebook, rank: int, message: Message) -> None:
        if rank not in self._cluster.ranks:
            return  # it has left while this was on its way
        with self._notebooks.lock:
            if not notebook.drives and not isinstance(message, _QUESTIONS):
                return
            if isinstance(message, InputReply):
                self._journal.on_answered(rank, message)
            elif isinstance(message, Resume):
                self._journal.on_resumed(rank)
        self._cluster.send(rank, message)

    def _tell(self, notebook: Notebook, message: Any, ranks: list[int]) -> None:
        ranks = [rank for rank in ranks if rank in self._cluster.ranks]
        with self._notebooks.lock:
            if not notebook.drives:
                return  # or a cell would run that the one which has taken over was not told of
            if isinstance(message, RunCell):
                self._journal.on_told(message, ranks, self._cluster.gone)
                self._queue.on_told(message)
                self._heard.tell_running()
        self._cluster.tell(message, ranks)

    def _on_queue(self, waiting: list[Waiting]) -> None:
        self._queue.waiting = waiting
        self._heard.tell_running()

    def _hold(self, notebook: Notebook, hold: bool) -> None:
        with self._holding:
            if notebook.drives:
                self._cluster.hold_text(hold)

    def let_flow(self, driver: Notebook | None) -> None:
        """The one that drove has gone or was relieved, and does not read what it has held back.

        Args:
            driver: who drives now. Nothing is done if another one does: it may hold text itself.
        """
        with self._holding:
            if self._notebooks.driver is driver:
                self._cluster.hold_text(False)
                self._heard.take_all()

    def _drop(self, rank: int, transfer: int) -> None:
        if rank in self._cluster.ranks:
            self._cluster.drop(rank, transfer)

    def _on_supplied(self) -> None:
        self.lacking = []

    def _on_shown(self, cell: int) -> None:
        self._journal.on_shown(cell)

    # ---- what has one

    def _do(self, notebook: Notebook, number: int, op: str, parameters: dict[str, Any]) -> None:
        def check() -> None:
            if number in notebook.cancelled:
                raise KeyboardInterrupt

        answer: Event
        try:
            if not notebook.drives and op not in _OF_ALL:
                raise SessionBrokenError("another notebook drives this session: %ddp_attach --take-over takes it over")
            answer = (True, getattr(self, f"_do_{op}")(check, **parameters))
        except BaseException as error:
            answer = (False, error)
        try:
            notebook.tell("reply", number, *answer)
        finally:
            notebook.cancelled.discard(number)

    def _do_form(self, check: Callable[[], None], deadline: float) -> list[str]:
        try:
            return self._cluster.form(deadline, check)
        finally:
            self._changed()

    def _do_replace(self, check: Callable[[], None], ranks: list[int], deadline: float) -> list[str]:
        try:
            return self._cluster.replace(ranks, deadline, check)
        finally:
            self._changed()

    def _do_place(self, _: Callable[[], None], stay: list[int], world_size: int, may_share: bool) -> Placement:
        return self._cluster.place(stay, world_size, may_share=may_share)

    def _do_resize(
        self, check: Callable[[], None], stay: list[int], placement: Placement, deadline: float
    ) -> list[str]:
        def renumbered(stayed: Mapping[int, int]) -> None:
            still = [now for now, was in stayed.items() if was in self.lacking]
            self.lacking = sorted({*still, *range(len(stay), placement.world_size)})
            self._renumbered(stayed)

        try:
            return self._cluster.resize(stay, placement, deadline, check, renumbered)
        finally:
            self._changed()

    def _do_signal(self, _: Callable[[], None], ranks: list[int], numbers: list[int], value: int) -> bool:
        return self._cluster.signal(ranks, *numbers, value=value)

    def _do_look(self, _: Callable[[], None], ranks: list[int]) -> Any:
        return self._cluster.look(ranks)

    def _do_fetch(self, check: Callable[[], None], rank: int, transfer: int, nbytes: int) -> bytearray:
        return self._cluster.fetch(rank, transfer, nbytes, check)

    def _do_put(self, check: Callable[[], None], rank: int, data: bytes) -> int:
        return self._cluster.put(rank, data, check)

    def _do_client_file(self, _: Callable[[], None]) -> tuple[str, int]:
        try:
            return self._cluster.client_file()
        finally:
            self._changed()

    def _do_check_registered(self, _: Callable[[], None]) -> None:
        self._cluster.check_registered()

    def _do_give_up(self, _: Callable[[], None], why: str, ranks: list[int] | None) -> None:
        self._cluster.give_up(why, ranks)
        self._changed()

    def _do_trouble(self, _: Callable[[], None]) -> str:
        try:
            return self._cluster.trouble()
        finally:
            self._changed()  # first: the notebook names stopped processes right after this answer

    def _do_ping(self, _: Callable[[], None]) -> None:
        return

    def _do_replace_stopped_store(self, _: Callable[[], None]) -> None:
        self._cluster.replace_stopped_store()
        self._changed()

    def _do_status(self, _: Callable[[], None]) -> str:
        return self._hosts.status()

    def _do_sync(self, check: Callable[[], None], **how: Any) -> Any:
        return self._hosts.sync(check=check, progress=lambda _: None, **how)

    def _do_stop(self, _: Callable[[], None]) -> bool:
        try:
            self._end()
        except HostError:
            return False
        return True
