"""Feed batches from the wire into the recording, in a separate thread, because the wire's thread must never wait."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from typing import NamedTuple

from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.records.codec import Batch, CodecError, decode, skim

_MOST_BYTES = 32 << 20
# batches of this time are fed together: for 256 ranks with 5 batches per second this takes half the time
_GATHER_S = 0.05
_MANY_RANKS = 64  # with fewer ranks, batches are fed on arrival, so that logged values are available within 0.1 s
_CLOSE_S = 5.0
_log = logging.getLogger(__name__)


class _Waiting(NamedTuple):
    number: int  # count of all received batches, from 1
    rank: int
    data: bytes


class Intake:
    """Decodes batches and feeds them in the order of arrival.

    If more than `most_bytes` wait, the oldest batch is dropped. Its rows are counted; its texts are kept, because later
    rows need them. A damaged batch is counted, and the first one of each rank is logged.

    Args:
        recording: receives the batches.
        most_bytes: limit of waiting bytes. A single larger batch is accepted anyway.

    Example:
        >>> from ddp_notebook import Recording
        >>> from ddp_notebook.records.codec import Batch, encode
        >>> recording = Recording(world_size=1)
        >>> intake = Intake(recording)
        >>> intake.put(0, encode(Batch(rank=0, stream=1, dropped=3)))
        >>> intake.flush(timeout_s=5), recording.dropped
        (True, {0: 3})
        >>> intake.close()
    """

    def __init__(self, recording: RecordedTables, most_bytes: int = _MOST_BYTES) -> None:
        self.recording = recording
        self.most_bytes = most_bytes
        self.damaged: Counter[int] = Counter()  # damaged batches by rank
        self._waiting: deque[_Waiting] = deque()
        self._nbytes = 0
        self._skimmed: dict[tuple[int, int], Batch] = {}  # remains of dropped batches, by rank and stream
        self._put = 0
        self._flushing = 0  # number of waiting callers
        self._busy_with = 0  # number of the batch that is being fed; 1 for remains of dropped batches; 0: none
        self._is_closed = False
        lock = threading.Lock()
        self._came = threading.Condition(lock)
        self._went = threading.Condition(lock)
        self._thread = threading.Thread(target=self._run, name="ddp_notebook-intake", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Intake: {len(self._waiting)} batches of {self._nbytes} bytes wait>"

    def put(self, rank: int, data: bytes) -> None:
        """Queue an encoded batch of a rank, and return immediately. Does nothing after `close`."""
        with self._came:
            if self._is_closed:
                return
            self._put += 1
            self._waiting.append(_Waiting(self._put, rank, data))
            self._nbytes += len(data)
            while self._nbytes > self.most_bytes and len(self._waiting) > 1:
                self._drop(self._waiting.popleft())
            if len(self._waiting) == 1 or self._is_urgent():
                self._came.notify()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all batches that were put before are in the recording. Return whether they are.

        Args:
            timeout_s: longest wait in seconds; None: no limit.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._went:
            last = self._put
            self._flushing += 1
            self._came.notify()
            try:
                while self._oldest() <= last:
                    left = None if until is None else until - time.monotonic()
                    if (left is not None and left <= 0) or not self._thread.is_alive():
                        return False
                    self._went.wait(left)
            finally:
                self._flushing -= 1
        return True

    def close(self) -> None:
        """Feed the waiting batches, and end the thread."""
        with self._came:
            self._is_closed = True
            self._came.notify()
        self._thread.join(_CLOSE_S)

    def _is_urgent(self) -> bool:
        """Return whether waiting batches must be fed now, without waiting for more."""
        is_one_of_few = self.recording.world_size < _MANY_RANKS
        return is_one_of_few or self._flushing > 0 or self._is_closed or self._nbytes > self.most_bytes // 4

    def _oldest(self) -> int:
        """Return the number of the oldest batch that was not fed yet. A dropped batch counts until its texts
        are fed.
        """
        if self._skimmed:
            return 0
        return self._busy_with or (self._waiting[0].number if self._waiting else self._put + 1)

    def _drop(self, oldest: _Waiting) -> None:
        self._nbytes -= len(oldest.data)
        try:
            new = skim(oldest.data)
        except CodecError as error:
            self._tell_damaged(oldest.rank, error)
            return
        key = (new.rank, new.stream)
        # Merge into one batch per process, so that the remains stay small.
        before = self._skimmed.pop(key, Batch(rank=new.rank, stream=new.stream))
        before.texts.update(new.texts)
        dropped = before.dropped + new.dropped
        self._skimmed[key] = Batch(rank=new.rank, stream=new.stream, dropped=dropped, texts=before.texts)

    def _run(self) -> None:
        while True:
            with self._came:
                if not (self._waiting or self._skimmed or self._is_closed):
                    self._came.wait_for(lambda: self._waiting or self._is_closed)
                    self._came.wait_for(self._is_urgent, _GATHER_S)
                skimmed, self._skimmed = self._skimmed, {}
                waiting = self._waiting.popleft() if self._waiting else None
                if waiting is None and not skimmed:
                    return
                self._busy_with = waiting.number if waiting is not None and not skimmed else 1
                if waiting is not None:
                    self._nbytes -= len(waiting.data)
            for batch in skimmed.values():  # they are older than all waiting batches
                self._feed(batch.rank, batch)
            if waiting is not None:
                self._feed(waiting.rank, waiting.data)
            with self._went:
                self._busy_with = 0
                self._went.notify_all()

    def _feed(self, rank: int, what: bytes | Batch) -> None:
        try:
            if isinstance(what, Batch):
                self.recording._feed_dropped(what)
            else:
                self.recording._feed(decode(what))
        except Exception as error:  # a damaged batch of one rank must not affect other ranks
            self._tell_damaged(rank, error)

    def _tell_damaged(self, rank: int, error: Exception) -> None:
        self.damaged[rank] += 1
        if self.damaged[rank] == 1:
            _log.warning("a batch of recorded rows of rank %d was left out: %s", rank, error)
