"""What ranks say, as the keeper hears it: it is kept, and told to the notebooks that are there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ddp_notebook.launch.keep.keeper.journal import Journal
from ddp_notebook.launch.keep.keeper.notebooks import Notebooks
from ddp_notebook.launch.keep.recorded import Recorded as RecordedFiles
from ddp_notebook.launch.keep.state import OwnCluster
from ddp_notebook.run.output.log import RankLog
from ddp_notebook.run.output.text import TextSplitter
from ddp_notebook.wire.events import Message, Recorded


class Heard:
    """The keeper's `launch.cluster.Listener`.

    Args:
        notebooks: who is told.
        on_gone: told that all ranks have ended.
    """

    def __init__(self, notebooks: Notebooks, on_gone: Callable[[], None]) -> None:
        self._notebooks = notebooks
        self.on_gone = on_gone
        self._told = ""  # what was not kept, the last time that this was said

    def begin(
        self, cluster: OwnCluster, journal: Journal, recorded: RecordedFiles, folder: str, changed: Callable[[], None]
    ) -> None:
        """Ranks are about to start. Nothing is heard before.

        Args:
            cluster: theirs.
            journal, recorded: what is kept of them.
            folder: for the logs of their text.
            changed: tells notebooks how things are.
        """
        self._cluster = cluster
        self._journal = journal
        self._recorded = recorded
        self._changed = changed
        ranks = range(cluster.placement.world_size)
        self._logs = [RankLog(Path(folder), rank) for rank in ranks]
        self._splitters = {(rank, fd): TextSplitter(cluster.mark_token) for rank in ranks for fd in (1, 2)}

    def notices(self) -> list[str]:
        """What a notebook should know and was not told."""
        if self._recorded.trouble == self._told:
            return []
        self._told = self._recorded.trouble
        return [f"a part of the recording is not kept, since it cannot be written: {self._told}; make room there"]

    # ---- I/O threads

    def on_message(self, rank: int, message: Message) -> None:
        with self._notebooks.lock:
            if isinstance(message, Recorded):
                self._recorded.put(rank, message.data)
            else:
                self._journal.on_message(rank, message)
            self._notebooks.tell("message", rank, message)

    def on_text(self, rank: int, fd: int, data: bytes) -> None:
        process = self._cluster.process(rank).name
        with self._notebooks.lock:
            self._journal.on_text(rank, process, fd, data)
            self._notebooks.tell("text", process, fd, data)
        for piece in self._splitters[rank, fd].feed(data):
            if isinstance(piece, str):
                self._logs[rank].write(piece)

    def on_ended(self, rank: int, how: str) -> None:
        self._changed()
        with self._notebooks.lock:
            self._journal.on_ended(rank, ("ended rank", rank, how))
            self._notebooks.tell("ended rank", rank, how)

    def on_controller_ended(self) -> None:
        self._changed()
        self._notebooks.tell("controller ended")
