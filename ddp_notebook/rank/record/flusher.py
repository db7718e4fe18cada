"""The recorder's thread: makes batches of the event buffer's records, and sends them.

It sleeps while nothing is recorded, but reads memory and load once a second. It does so less often if many ranks share
a core, or if no cell runs and no notebook is attached. If the receiver is too slow, records stay in the event buffer,
which drops the oldest and counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp_notebook.rank import gpu
from ddp_notebook.rank.group.sequences import name_modules
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.record.batches import BatchMaker
from ddp_notebook.rank.record.event_buffer import OFF, EventBuffer
from ddp_notebook.rank.record.resources import Resources, cores, idle_s
from ddp_notebook.rank.record.training.repeated_buckets import rows_of
from ddp_notebook.records.codec import encode
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import logging, os, threading, time

# Each batch has a fixed cost: 2 ms of the rank and the notebook together if caches are cold. So records that follow
# soon are sent in the same batch. If the notebook keeps up, logged values must arrive within 0.1 s.
_SOON_S = 0.08
_CALM_S = 0.2  # if no values are logged
_STEADY_S = 1.0  # in a long training loop: five batches a second would use all the time that recording may take
_RESOURCES_S = 1.0
_ALONE_S = 15.0  # without requests of a notebook, which compares clocks every 5 s: none is attached
_ALONE_LOOK_S = 10.0
_MOST_RECORDS = 2000  # maximum size of a batch
_MANY_RECORDS = 5 * _MOST_RECORDS  # this number fills several batches: do not wait for more
_LOOK_S = 0.005
_BROKEN_S = 0.2

_log = logging.getLogger(__name__)


class Flusher:
    """Flusher of one event buffer.

    Args:
        event_buffer: the buffer.
        maker: makes batches.
        send: sends an encoded batch. Callable from any thread.
        is_busy: returns whether the receiver has not yet taken earlier batches.
    """

    def __init__(
        self, event_buffer: EventBuffer, maker: BatchMaker, send: Callable[[bytes], None], is_busy: Callable[[], bool]
    ) -> None:
        self._event_buffer = event_buffer
        self._maker = maker
        self._send = send
        self._is_busy = is_busy
        self._lock = threading.Lock()
        self._resources: Resources | None = None
        self._looked_s = 0.0
        # Read memory and load with the next batch. Set when a cell starts or ends, so that each reading covers the time
        # of one cell.
        self.looks_again = True
        self._awaited: Any = None
        self._asked_s = time.monotonic()
        self.is_in_cell = False
        self._cores = cores()
        self._pid = os.getpid()
        self._closed = threading.Event()

    def start(self) -> None:
        os.register_at_fork(after_in_child=self._event_buffer.leave)
        threading.Thread(target=self._run, name="ddp-record", daemon=True).start()

    def tell_again(self) -> None:
        """Prepare for a new receiver, which has no earlier data. Callable from any thread."""
        with self._lock:
            self._maker.tell_again()

    def flush(self, deadline_s: float = 1.0) -> None:
        """Send all records of the event buffer, and those that wait for a GPU while it is working. Callable from any
        thread.

        Args:
            deadline_s: time limit in seconds.
        """
        until = time.monotonic() + deadline_s
        self._pass_on()  # this also waits for a batch that the thread is making
        while time.monotonic() < until:
            waiting, late = len(self._event_buffer), self._maker.late
            if not waiting and (late is None or late is self._awaited):
                return
            self._pass_on()
            if len(self._event_buffer) >= waiting:  # no progress: the GPU is not ready, or a graph is captured
                time.sleep(_LOOK_S)
        self._awaited = self._maker.late  # timed out: do not wait for this record again

    def on_asked(self, *, flush: bool) -> None:
        """Note that a notebook is attached, since it has requested the time. Callable from any thread.

        Args:
            flush: send all records of the event buffer first.
        """
        was_alone, self._asked_s = self._is_alone, time.monotonic()
        if was_alone:
            self._event_buffer.filled.set()  # return to the normal interval of resource readings
        if flush:
            self.flush()

    def close(self) -> None:
        """Send the remaining records, including those that arrive from a GPU soon. Then stop."""
        if os.getpid() == self._pid:  # otherwise it is a child that the user has forked
            self.flush()
        self._closed.set()
        self._event_buffer.hurries.set()
        self._event_buffer.level = OFF

    def _run(self) -> None:
        while not self._closed.is_set():
            self._event_buffer.filled.wait(self._idle_s())
            try:
                self._event_buffer.collect()
                # An interrupt may keep a caller of `put` from setting the event.
                if self._event_buffer.filled.is_set() or len(self._event_buffer):
                    is_early = (
                        self._event_buffer.hurries.wait(self._pause_s()) and len(self._event_buffer) < _MANY_RECORDS
                    )
                    if is_early and self._closed.wait(_SOON_S):
                        return
                    self._event_buffer.hurries.clear()
                    self._event_buffer.filled.clear()
                    self._event_buffer.is_filled = False  # last: records added in between are taken below
                # Without the records that arrive during the pass: in a loop there are always some.
                if self._is_busy() or self._pass_on():
                    self._event_buffer.filled.set()
                    self._event_buffer.hurries.set()
            except Exception:  # an error must not end the thread
                self._note_loss()

    def _note_loss(self) -> None:
        try:
            _log.info("a part of the recording was lost", exc_info=True)  # not in the user's cell
        except Exception:  # a cell has replaced a function that logging needs, until the cell ends
            self._closed.wait(_BROKEN_S)

    def _pause_s(self) -> float:
        """Return the time in seconds to wait for further records after the first one.

        In a long training loop, all ranks of a machine flush at the next full second. A delayed rank delays all others,
        so the ranks should be delayed at the same time.
        """
        return _STEADY_S - time.time() % _STEADY_S if self._event_buffer.is_steady else _CALM_S

    def _pass_on(self) -> bool:
        """Send the records of the event buffer. Return whether there were more than a batch contains."""
        with self._lock, gpu.asking() as may_ask:
            event_buffer = self._event_buffer
            if not may_ask:
                return False
            event_buffer.collect()
            dropped, event_buffer.dropped = event_buffer.dropped, 0
            records = event_buffer.pop(_MOST_RECORDS)
            try:
                name_modules(records)
                batch = unseen(self._maker.batch, records, dropped, self._look_at_resources(bool(records)))
            except Exception:
                event_buffer.dropped += dropped + rows_of(records)
                raise
            # Even without rows: later rows may need the texts of a failed record.
            if batch.tables or batch.dropped or batch.texts:
                self._send(encode(batch))
        if self._maker.late is not None:
            event_buffer.filled.set()
        return len(records) == _MOST_RECORDS

    def _look_at_resources(self, records: bool) -> dict[str, Any] | None:
        """Return a reading of memory and load, or None.

        With records, which are sent anyway, there is one reading a second. Otherwise `idle_s` determines the interval.
        """
        now = time.monotonic()
        if self._event_buffer.level == OFF or self._maker.rank < 0:
            return None
        pause_s = 0.0 if self.looks_again else 0.9 * (_RESOURCES_S if records else self._idle_s())
        if now - self._looked_s < pause_s:
            return None
        self._looked_s, self.looks_again = now, False
        try:
            if self._resources is None:
                self._resources = Resources()
            return self._resources.row(self._maker.rank)
        except Exception:  # for example a failed GPU: the current records must not be lost
            _log.info("memory and load are not known", exc_info=True)
            return None

    @property
    def _is_alone(self) -> bool:
        return not self.is_in_cell and time.monotonic() - self._asked_s > _ALONE_S

    def _idle_s(self) -> float:
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # read again: the number of ranks may have changed
        often = idle_s(int(ranks) if ranks.isdecimal() else 1, self._cores)
        return max(often, _ALONE_LOOK_S) if self._is_alone else often
