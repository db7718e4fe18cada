"""Messages and events of ranks in the keeper: store them, and send them to attached notebooks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddp_notebook.launch.keep.keeper.journal import Journal
from ddp_notebook.launch.keep.keeper.notebooks import Notebooks
from ddp_notebook.launch.keep.keeper.queue import Queue
from ddp_notebook.launch.keep.recording_store import KeptRecording as RecordedFiles
from ddp_notebook.launch.keep.state import OwnCluster
from ddp_notebook.launch.rank_log import RankLog
from ddp_notebook.launch.receipts import Receipts
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.framing import ProcessText
from ddp_notebook.messages.keeper import (
    ControllerEnded,
    RankEnded,
    RankMessage,
    RanksRenumbered,
    RunningCell,
    RunningCells,
    Waiting,
)
from ddp_notebook.messages.ranks import Comm, Display, Recorded
from ddp_notebook.wire.text import TextSplitter


class _Text:
    """The text of a rank on disk, without marks."""

    def __init__(self, log: RankLog, mark_token: str) -> None:
        self.log = log
        self._splitters = {fd: TextSplitter(mark_token) for fd in (1, 2)}

    def add(self, fd: int, data: bytes) -> None:
        for piece in self._splitters[fd].feed(data):
            if isinstance(piece, str):
                self.log.write(piece)


class RankEvents:
    """The keeper's `launch.cluster.Listener`.

    Args:
        notebooks: the attached notebooks.
        on_gone: called when all ranks have ended.
    """

    def __init__(self, notebooks: Notebooks, on_gone: Callable[[], None]) -> None:
        self._notebooks = notebooks
        self.on_gone = on_gone
        self._texts: dict[int, _Text] = {}
        self._lock = threading.Lock()  # guards `_texts`
        self._running: tuple[list[Any], list[Waiting]] = [], []  # running and waiting cells, as last sent to notebooks
        self._told = ""  # the last reported trouble of the recording

    def begin(
        self,
        cluster: OwnCluster,
        journal: Journal,
        queue: Queue,
        recorded: RecordedFiles,
        folder: str,
        changed: Callable[[], None],
    ) -> None:
        """Set up before ranks start. No event arrives earlier.

        Args:
            cluster: of the ranks.
            journal, recorded: store messages and batches.
            queue: of waiting cells.
            folder: for the logs of the ranks' text.
            changed: sends the session state to notebooks.
        """
        self._cluster = cluster
        self._receipts = Receipts(cluster.send)
        self._journal = journal
        self._queue = queue
        self._recorded = recorded
        self._changed = changed
        self._folder = Path(folder)
        self._most = cluster.placement.world_size  # highest number of ranks so far
        for rank in range(self._most):
            self._text_of(rank)

    def _text_of(self, rank: int) -> _Text:
        with self._lock:
            if rank not in self._texts:
                self._texts[rank] = _Text(RankLog(self._folder, rank), self._cluster.mark_token)
            return self._texts[rank]

    def restore(self) -> None:
        """Write the logs again if a cleanup has removed them."""
        with self._lock:
            texts = list(self._texts.values())
        for text in texts:
            text.log.restore()

    def notices(self) -> list[str]:
        """Return notices that notebooks have not received yet."""
        if self._recorded.trouble == self._told:
            return []
        self._told = self._recorded.trouble
        return [f"a part of the recording is lost, because it cannot be written: {self._told}; free space there"]

    def on_renumbered(self, stayed: Mapping[int, int]) -> None:
        """Handle a change of the number of ranks.

        Args:
            stayed: the former number of each kept rank, by its new one. A former number is never lower than the new
                one.
        """
        with self._notebooks.lock:
            with self._lock:
                before, self._texts = self._texts, {now: self._texts[before] for now, before in stayed.items()}
                for rank in before.keys() - set(stayed.values()):
                    before[rank].log.remove()
                for rank, text in self._texts.items():
                    text.log.renumber(rank)
            self._most = max(self._most, self._cluster.placement.world_size)
            self._journal.on_renumbered(stayed)
            self._recorded.renumber(stayed, self._most)
            self._changed()
            self._notebooks.broadcast(RanksRenumbered(stayed=dict(stayed)))

    # ---- I/O threads

    def on_message(self, rank: int, message: Message) -> None:
        with self._notebooks.lock:
            if isinstance(message, Recorded):
                self._recorded.put(rank, message.data)
            else:
                self._journal.on_message(rank, message)
                self.tell_running()
            self._notebooks.broadcast(RankMessage(rank=rank, message=message))
            if isinstance(message, Comm | Display) and not self._notebooks.may_come:
                # no driving notebook will show it: acknowledge it, so that ranks do not wait
                self._receipts.took(rank, message)

    def tell_running(self) -> None:
        """Send the running and waiting cells to notebooks if they have changed. Call it with the lock."""
        now = time.monotonic()
        running = self._journal.running
        key = [(cell.told.cell, sorted(cell.open)) for cell in running], self._queue.waiting
        if key != self._running:
            self._running = key[0], list(key[1])
            self._notebooks.broadcast(self.running(now))

    def running(self, now: float) -> RunningCells:
        """Return the message about running and waiting cells."""
        cells = [
            RunningCell(told=cell.told, ranks=cell.ranks, pending=sorted(cell.open), for_s=now - cell.began_s)
            for cell in self._journal.running
        ]
        return RunningCells(running=cells, waiting=list(self._queue.waiting))

    def take_all(self) -> None:
        """Acknowledge all messages of the ranks, because the former driver will not."""
        for rank in self._cluster.ranks:
            self._receipts.took_all(rank)

    def on_text(self, rank: int, fd: int, data: bytes) -> None:
        with self._notebooks.lock:
            self._journal.on_text(rank, fd, data)
            self._notebooks.broadcast(ProcessText(rank, fd, data))
            self.tell_running()
        self._text_of(rank).add(fd, data)

    def on_ended(self, rank: int, how: str) -> None:
        self._changed()
        with self._notebooks.lock:
            self._journal.on_ended(rank, ended := RankEnded(rank=rank, how=how))
            self._notebooks.broadcast(ended)
            self.tell_running()

    def on_controller_ended(self) -> None:
        self._changed()
        self._notebooks.broadcast(ControllerEnded())
