"""The recorder's own thread: takes what the event buffer holds, makes batches of it, and passes them on.

It sleeps as long as nothing is recorded, except for a look at memory and load once a second, more rarely where many
ranks share a core, or where no cell runs and no notebook is there. If the receiver cannot keep up, records stay on the
event buffer, which drops and counts the oldest.
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

# Each batch costs the same, 2 ms of the rank and the notebook together where caches are cold, so what comes after a
# record travels with it. Where the notebook keeps up, what the user logs is to be there within 0.1 s.
_SOON_S = 0.08
_CALM_S = 0.2  # where nobody logs
_STEADY_S = 1.0  # in a training loop that goes on and on: five batches a second would take all that recording may
_RESOURCES_S = 1.0
_ALONE_S = 15.0  # without a question of a notebook's, which compares clocks every 5 s: none is there
_ALONE_LOOK_S = 10.0
_MOST_RECORDS = 2000  # of a batch
_MANY_RECORDS = 5 * _MOST_RECORDS  # so many that wait fill batches: nothing more is to be waited for
_LOOK_S = 0.005
_BROKEN_S = 0.2

_log = logging.getLogger(__name__)


class Flusher:
    """Empties one event buffer.

    Args:
        event_buffer: that fills.
        maker: makes batches.
        send: takes an encoded batch. From any thread.
        is_busy: whether the receiver has not taken what it was sent.
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
        # Read memory and load with the next batch. Set when a cell begins or ends, so that each reading covers the time
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
        """What is passed on goes to somebody from now on who has got nothing before. From any thread."""
        with self._lock:
            self._maker.tell_again()

    def flush(self, deadline_s: float = 1.0) -> None:
        """Pass on all records of the event buffer, and those that wait for a GPU as long as it works. Any thread may
        call this."""
        until = time.monotonic() + deadline_s
        self._pass_on()  # also waits for a batch that the thread is making of records that it has taken
        while time.monotonic() < until:
            waiting, late = len(self._event_buffer), self._maker.late
            if not waiting and (late is None or late is self._awaited):
                return
            self._pass_on()
            if len(self._event_buffer) >= waiting:  # nothing has gone: the GPU is not there yet, or a graph is captured
                time.sleep(_LOOK_S)
        self._awaited = self._maker.late  # in vain, and not once more

    def on_asked(self, *, flush: bool) -> None:
        """A notebook has asked for the time, so one is there. From any thread.

        Args:
            flush: all that is in the event buffer is to be passed on first.
        """
        was_alone, self._asked_s = self._is_alone, time.monotonic()
        if was_alone:
            self._event_buffer.filled.set()  # it looks again as often as ever
        if flush:
            self.flush()

    def close(self) -> None:
        """Pass on the rest, also what is on its way from a GPU and comes soon, and nothing more."""
        if os.getpid() == self._pid:  # else a child that the user has forked
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
                    self._event_buffer.is_filled = False  # second: records that are put in between are taken below
                # Not what has come meanwhile: in a loop something always has.
                if self._is_busy() or self._pass_on():
                    self._event_buffer.filled.set()
                    self._event_buffer.hurries.set()
            except Exception:  # must not end the thread
                self._note_loss()

    def _note_loss(self) -> None:
        try:
            _log.info("a part of the recording was lost", exc_info=True)  # not in the user's cell
        except Exception:  # a cell has replaced a function that logging needs, which lasts until the cell ends
            self._closed.wait(_BROKEN_S)

    def _pause_s(self) -> float:
        """How long the first record waits for others. In a steady loop until the next full second, so that the ranks of
        a machine do it together: a rank that is held up holds up all, and each would be at another moment."""
        return _STEADY_S - time.time() % _STEADY_S if self._event_buffer.is_steady else _CALM_S

    def _pass_on(self) -> bool:
        """Pass on what is in the event buffer. Returns whether that was more than a batch holds."""
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
            # Even without rows: later ones may need the texts of a record that has failed.
            if batch.tables or batch.dropped or batch.texts:
                self._send(encode(batch))
        if self._maker.late is not None:
            event_buffer.filled.set()
        return len(records) == _MOST_RECORDS

    def _look_at_resources(self, records: bool) -> dict[str, Any] | None:
        """Memory and load: once a second with records, which are sent anyway, and else as often as `idle_s` says."""
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
        except Exception:  # such as of a GPU that has failed: the records of just then are not to be lost
            _log.info("memory and load are not known", exc_info=True)
            return None

    @property
    def _is_alone(self) -> bool:
        return not self.is_in_cell and time.monotonic() - self._asked_s > _ALONE_S

    def _idle_s(self) -> float:
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # asked again: there may be more ranks or fewer by now
        often = idle_s(int(ranks) if ranks.isdecimal() else 1, self._cores)
        return max(often, _ALONE_LOOK_S) if self._is_alone else often
