"""Record a session: receive batches of the ranks, and compare clocks repeatedly."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import ClockProbe, ClockReply, Recorded
from ddp_notebook.observe.intake import Intake
from ddp_notebook.observe.recording import Recording
from ddp_notebook.records.clocks import boot_id
from ddp_notebook.records.renumbering import Renumbered

_FIRST_LOOKS = 8  # in quick succession at the start, so that at least one round trip is short
_FIRST_PAUSE_S = 0.02
_PAUSE_S = 5.0
_BATCHES_AT_ONCE = 200  # batches recorded earlier that are read at a time
_FLUSH_S = 5.0
_log = logging.getLogger(__name__)


class Observer:
    """Feeds the recording of one session.

    Args:
        world_size: number of ranks.
        ask: sends a message to a rank.
        alive: returns the ranks that are alive.
        hosts: returns the machine of each rank; (): all ranks are on the same machine.
    """

    def __init__(
        self,
        world_size: int,
        ask: Callable[[int, Message], None],
        alive: Callable[[], Sequence[int]],
        hosts: Callable[[], tuple[str, ...]],
    ) -> None:
        self.recording = Recording(world_size)
        self._intake = Intake(self.recording)
        self._ask = ask
        self._alive = alive
        self._hosts = hosts
        self.recording.hosts = hosts()
        self._boot = boot_id()
        self._closing = threading.Event()
        self._earlier: threading.Thread | None = None  # reads batches that were recorded before this notebook attached
        self._behind: deque[tuple[int, bytes]] | None = None  # batches that arrived during that
        self._order = threading.Lock()
        self._thread = threading.Thread(target=self._compare_clocks, name="ddp-clocks", daemon=True)

    def start(self) -> None:
        """Start to compare clocks, after the ranks can answer."""
        self._thread.start()

    @property
    def handlers(self) -> Mapping[type[Message], Callable[[int, Any], object]]:
        """Return the handlers of messages about the recording."""
        return {Recorded: self.on_recorded, ClockReply: self.on_clock}

    def on_recorded(self, rank: int, message: Recorded) -> None:
        """Queue a rank's batch. Called in the wire's thread."""
        with self._order:
            if self._behind is None:
                self._intake.put(rank, message.data)
            else:
                self._behind.append((rank, message.data))

    def read_earlier(self, batches: Iterable[tuple[int, bytes] | Renumbered]) -> None:
        """Read batches that were recorded before this notebook attached, in a thread.

        New batches wait until these are read, because their rows refer to texts in earlier batches. Call it before any
        message arrives.

        Args:
            batches: batches with their rank, and entries where ranks were renumbered.
        """
        self._behind = deque()
        self._earlier = threading.Thread(target=self._read_earlier, args=(batches,), name="ddp-earlier", daemon=True)
        self._earlier.start()

    def _read_earlier(self, batches: Iterable[tuple[int, bytes] | Renumbered]) -> None:
        try:
            for number, one in enumerate(batches, 1):
                if isinstance(one, Renumbered):
                    self._intake.flush()
                    self._renumber(one)
                else:
                    self._intake.put(*one)
                if number % _BATCHES_AT_ONCE == 0:
                    self._intake.flush()
        except Exception:
            _log.exception("earlier recorded data could not be read completely")
        with self._order:
            behind, self._behind = self._behind or deque(), None
            for rank, data in behind:
                self._intake.put(rank, data)

    def on_clock(self, rank: int, message: ClockReply) -> None:
        """Add a round trip of a rank's clock. Called in the wire's thread."""
        same = bool(self._boot) and message.boot == self._boot
        self.recording.clock.add(rank, message.sent_ns, message.rank_ns, time.monotonic_ns(), same_clock=same)

    def on_moved(self, rank: int) -> None:
        """Handle a rank's move to another host, which has another clock."""
        self.recording.hosts = self._hosts()
        self.flush()
        self.recording._part_from_clock(rank)
        self._ask(rank, ClockProbe(request=0, sent_ns=time.monotonic_ns()))

    def on_renumbered(self, stayed: Mapping[int, int], world_size: int) -> None:
        """Handle a change of the number of ranks. Earlier rows keep the rank numbers of their time.

        Args:
            stayed: former number of each remaining rank, by its new number.
            world_size: new number of ranks.
        """
        self.flush()
        recording = self.recording
        self._renumber(Renumbered(stayed, world_size))
        recording.hosts = self._hosts()
        for rank in [rank for rank in recording.clock.shifted() if stayed.get(rank) != rank]:
            recording._part_from_clock(rank)

    def _renumber(self, told: Renumbered) -> None:
        recording = self.recording
        recording.store.renumber(told.stayed)
        # rows may come from all ranks that ever existed
        recording.world_size = max(recording.world_size, told.world_size)
        recording.present = told.world_size

    def flush(self) -> None:
        """Wait until all received batches are in the recording."""
        if self._earlier is not None:
            self._earlier.join(_FLUSH_S)
        self._intake.flush(_FLUSH_S)

    def close(self) -> None:
        """End the threads. The recording stays available."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(1.0)
        self._intake.close()

    def _compare_clocks(self) -> None:
        looks = 0
        while not self._closing.wait(_FIRST_PAUSE_S if looks < _FIRST_LOOKS else _PAUSE_S):
            looks += 1
            for rank in self._alive():
                self._ask(rank, ClockProbe(request=0, sent_ns=time.monotonic_ns()))
