"""A session's recording as it grows: takes in what ranks send, and keeps their clocks compared."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddp_notebook.observe.intake import Intake
from ddp_notebook.observe.recording import Recording
from ddp_notebook.records.clocks import boot_id
from ddp_notebook.wire.events import ClockProbe, ClockReply, Message, Recorded

_FIRST_LOOKS = 8  # at the start, in quick succession: of many round trips one is short
_FIRST_PAUSE_S = 0.02
_PAUSE_S = 5.0


class Observer:
    """One session's.

    Args:
        world_size: number of ranks.
        ask: sends a message to a rank.
        alive: tells the living ranks.
    """

    def __init__(
        self, world_size: int, ask: Callable[[int, Message], None], alive: Callable[[], Sequence[int]]
    ) -> None:
        self.recording = Recording(world_size)
        self._intake = Intake(self.recording)
        self._ask = ask
        self._alive = alive
        self._boot = boot_id()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._compare_clocks, name="ddp-clocks", daemon=True)

    def start(self) -> None:
        """The ranks can answer."""
        self._thread.start()

    @property
    def handlers(self) -> Mapping[type[Message], Callable[[int, Any], object]]:
        """What takes each message about what was recorded."""
        return {Recorded: self.on_recorded, ClockReply: self.on_clock}

    def on_recorded(self, rank: int, message: Recorded) -> None:
        """A batch of a rank. In the wire's thread."""
        self._intake.put(rank, message.data)

    def on_clock(self, rank: int, message: ClockReply) -> None:
        """What a rank's clock says. In the wire's thread."""
        same = bool(self._boot) and message.boot == self._boot
        self.recording.clock.add(rank, message.sent_ns, message.rank_ns, time.monotonic_ns(), same_clock=same)

    def flush(self) -> None:
        """Wait until all is in the recording that has arrived."""
        self._intake.flush(5.0)

    def close(self) -> None:
        """The session has ended; the recording stays."""
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
