"""Route messages and text of ranks to their cells, in I/O threads. Text between cells is kept for the next cell."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from ddp_notebook.launch.cluster import Cluster
from ddp_notebook.launch.rank_log import RankLog
from ddp_notebook.messages.ranks import CellDone, ChildStopped, Display, InputReply, InputRequest
from ddp_notebook.run.cells.cell import STREAMS, CellRun, OutputItem
from ddp_notebook.run.message_handlers import Handlers
from ddp_notebook.run.output.rate_limiter import RateLimiter
from ddp_notebook.run.output.screen import Screen, display_id_of
from ddp_notebook.wire.marks import CellEnd
from ddp_notebook.wire.text import Ordered, Piece, Placed, TextSplitter

_BETWEEN_CELLS_CHARS = 1 << 16  # text between cells kept for the next cell, per rank and stream


class _Streams:
    """Text and displays of one process in their order, and its log."""

    def __init__(self, mark_token: str, log: RankLog) -> None:
        self.splitters = {fd: TextSplitter(mark_token) for fd in STREAMS}
        self.ordered = Ordered()
        self.log = log


class CellMessages:
    """Receives text, displays, input requests and results of cells.

    Args:
        cluster: the ranks, which need not have been started.
        took: called with each display that the notebook no longer keeps in memory.
    """

    def __init__(self, cluster: Cluster, took: Callable[[int, Display], None]) -> None:
        self.took = took
        self.runs: dict[int, CellRun] = {}  # cells that have not ended on all ranks, by number
        self._cluster = cluster
        self._between: dict[tuple[int, int], str] = {}  # text written between cells
        self._order_lock = threading.Lock()  # text and displays arrive in two threads
        self._streams: dict[int, _Streams] = {}
        self._logs = 0  # number of logs created so far
        self._is_closed = False

    # ---- for the thread that runs cells

    def log(self, rank: int) -> str:
        """Return the part of a rank's text that is kept on disk."""
        streams = self._streams.get(rank)
        return "" if streams is None else streams.log.read()

    def forget_text(self) -> None:
        """Drop text that ranks wrote during their start."""
        self._between.clear()

    def show_text_between_cells(self, screen: Screen) -> None:
        """Show text that ranks wrote since the last cell."""
        with self._order_lock:
            between, self._between = self._between, {}
        if between:
            screen.show_between_cells({(rank, STREAMS[fd]): text for (rank, fd), text in sorted(between.items())})

    def on_replaced(self, rank: int) -> None:
        """Reset the text and displays of a rank, which has a new process."""
        with self._order_lock:
            log = self._of(rank).log
            self._streams[rank] = _Streams(self._cluster.mark_token, log)

    def on_renumbered(self, stayed: Mapping[int, int]) -> None:
        """Handle a change of the number of ranks.

        Args:
            stayed: former number of each remaining rank, by its new number.
        """
        with self._order_lock:
            streams = {now: self._of(before) for now, before in stayed.items()}
            left = [one for one in self._streams.values() if one not in streams.values()]
            self._streams = streams
            between, self._between = self._between, {}
            for (rank, fd), text in between.items():
                now = next((now for now, before in stayed.items() if before == rank), None)
                if now is not None:
                    self._between[now, fd] = text
        for one in left:
            one.log.close()

    def _of(self, rank: int) -> _Streams:
        """Return the streams of a rank. The caller holds the lock."""
        if rank not in self._streams:
            log = RankLog(Path(self._cluster.directory), self._logs)
            self._logs += 1
            self._streams[rank] = _Streams(self._cluster.mark_token, log)
        return self._streams[rank]

    def end_all(self, how: str) -> None:
        """Mark all ranks as dead in all cells: nothing more will arrive."""
        for run in list(self.runs.values()):
            for rank in run.pending:
                run.on_died(rank, how)

    def close(self) -> None:
        """Ignore further text of ranks, because the session ends them."""
        with self._order_lock:
            self._is_closed = True
            for streams in self._streams.values():
                streams.log.close()

    # ---- I/O threads

    @property
    def handlers(self) -> Handlers:
        """Return the handlers that run in the wire's thread and return quickly."""
        return {InputRequest: self._on_input_request, ChildStopped: self._on_child_stopped}

    @property
    def slow_handlers(self) -> Handlers:
        """Return the handlers that take longer. They run in the order in which a rank has sent the messages."""
        return {CellDone: self._on_done, Display: self._on_display_message}

    def on_text(self, rank: int, fd: int, data: bytes) -> None:
        """Receive text of a rank."""
        with self._order_lock:
            if self._is_closed:
                return
            streams = self._of(rank)
            for piece in streams.splitters[fd].feed(data):
                for its_fd, ready in streams.ordered.add(fd, piece):
                    self._on_piece(rank, its_fd, ready)

    def on_ended(self, rank: int, how: str) -> None:
        """Handle the end of a rank's process."""
        if self._is_closed:
            return
        process = self._cluster.process(rank)
        with self._order_lock:
            for fd, piece in self._of(rank).ordered.give_up():
                self._on_piece(rank, fd, piece)
        words = process.last_words
        if any([run.on_died(rank, how, words) for run in list(self.runs.values())]):
            process.forget_words()  # the cell's error contains them

    def on_gone(self) -> None:
        """Handle the end of the host server, which ends all ranks."""
        self.end_all("the host server ended")

    def _on_done(self, rank: int, done: CellDone) -> None:
        if (run := self.runs.get(done.cell)) is not None:
            run.on_done(rank, done)

    def _on_display_message(self, rank: int, display: Display) -> None:
        with self._order_lock:
            if self._is_closed:
                return
            for fd, ready in self._of(rank).ordered.arrived(display):
                self._on_piece(rank, fd, ready)

    def _on_input_request(self, rank: int, request: InputRequest) -> None:
        if not request.place:
            self._put_request(rank, request)
            return
        with self._order_lock:
            for fd, ready in self._of(rank).ordered.arrived(request):
                self._on_piece(rank, fd, ready)

    def _put_request(self, rank: int, request: InputRequest) -> None:
        run = self.runs.get(request.cell)
        if run is not None and run.is_watched:
            run.asks = True
            run.shown.put(OutputItem(rank, ask=request))
        else:
            refusal = InputReply(request=request.request, error="the notebook does not wait for this cell any more")
            self._cluster.send(rank, refusal)

    def _on_child_stopped(self, rank: int, message: ChildStopped) -> None:
        if (run := self.runs.get(message.cell)) is not None:
            run.stopped_children[rank] = message.words

    def _on_piece(self, rank: int, fd: int, piece: Piece | Placed) -> None:
        if isinstance(piece, Display) and piece.msg_type == "error":
            self.took(rank, piece)
            fd, piece = 2, str(piece.content["text"])
        if isinstance(piece, str):
            self._of(rank).log.write(piece)
            if (run := self._cell_of(rank)) is not None:
                run.on_text(rank, fd, piece)
            if run is None or not run.is_watched:  # no thread waits for the cell any more
                self._keep(rank, fd, piece)
        elif isinstance(piece, CellEnd):
            if (ended := self.runs.get(piece.cell)) is not None:
                ended.on_text_end(rank, piece.duration_s)
        elif isinstance(piece, Display):
            self._on_display(rank, piece)
        elif isinstance(piece, InputRequest):
            self._put_request(rank, piece)

    def _on_display(self, rank: int, display: Display) -> None:
        data = display.content.get("data") or {}
        if set(data) == {"text/plain"} and display.msg_type != "update_display_data":
            self._of(rank).log.write(f"{data['text/plain']}\n")  # folded like lines of `print`
        if (run := self.runs.get(display.cell)) is not None:
            run.on_display(rank, display)
            return
        self.took(rank, display)
        if display.msg_type == "update_display_data":  # sent by a thread or widget callback after its cell
            _update(rank, display)
        elif text := data.get("text/plain"):
            self._keep(rank, 1, f"{text}\n")

    def _keep(self, rank: int, fd: int, text: str) -> None:
        """Keep text for the head of the next cell."""
        kept = self._between.get((rank, fd), "") + text
        self._between[rank, fd] = kept[-_BETWEEN_CELLS_CHARS:]

    def _cell_of(self, rank: int) -> CellRun | None:
        """Return the cell to which a rank's text belongs now.

        This is the oldest cell whose text has not ended on the rank. If there is none, it is a cell that still runs on
        other ranks, which may call this rank by RPC.
        """
        runs = [run for run in list(self.runs.values()) if rank in run.result.ranks]
        own = next((run for run in runs if run.reads(rank)), None)
        return own or next((run for run in runs if not run.is_over), None)


def _update(rank: int, display: Display) -> None:
    """Update a display of an ended cell, in this I/O thread: the main thread shows running cells only."""
    rate_limiter = RateLimiter()
    if rate_limiter.can_update:
        content = display.content
        display_id = display_id_of(rank, content["transient"]["display_id"])
        rate_limiter.update(content["data"], content.get("metadata"), display_id)
        rate_limiter.drain()
