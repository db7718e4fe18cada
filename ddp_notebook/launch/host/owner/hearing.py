"""Whether a host is heard: both sides say something all the time, and silence has a limit."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from ddp_notebook.launch.ways.base import Way

_UNHEARD_S = 3.0  # without a word of a host that speaks each second, until it counts as unreachable
_LOOKS = 4  # whether it is heard, between two words to it


class Hearing:
    """Of one host. One that sees its owner has no silence, and costs no thread.

    Args:
        way: to the host.
        gone: set once its server has ended.
        speak: lets the host hear something, or leaves it out where somebody else speaks.
        give_up: told why, when the host was silent for its lease.
    """

    def __init__(
        self, way: Way, gone: threading.Event, speak: Callable[[], None], give_up: Callable[[str], None]
    ) -> None:
        self._unheard_s = 0.0  # at the last look
        self._way = way
        self._gone = gone
        self._speak = speak
        self._give_up = give_up
        if way.beat_s:
            threading.Thread(target=self._beat, name="ddp-host-beat", daemon=True).start()

    @property
    def silent_s(self) -> float:
        """Seconds since the host was last heard, whatever its server does."""
        return min(self._unheard_s, self._way.silent_s)

    @property
    def is_unreachable(self) -> bool:
        """Whether the host is not heard any more, and may come back."""
        return self.silent_s > _UNHEARD_S and not self._gone.is_set()

    @property
    def unheard(self) -> str:
        """That it is unreachable, and for how long it may be, in a sentence; "" if it is heard."""
        return self.words if self.is_unreachable else ""

    @property
    def words(self) -> str:
        """A sentence with the seconds since the last message, and the seconds that are left."""
        left_s = max(0.0, self._way.lease_s - self.silent_s)
        because = f": {why}" if (why := self._way.why_silent) else ""
        return (
            f"{self._way.name} has sent nothing for {self.silent_s:.0f} s{because}. Nothing is lost if it sends again "
            f"within {left_s:.0f} s"
        )

    def _beat(self) -> None:
        tick_s, looked_s = self._way.beat_s / _LOOKS, time.monotonic()
        for look in itertools.count():
            if self._gone.wait(tick_s):
                return
            # Time in which this thread could not run does not count: then the one that reads could not either.
            passed_s = min(time.monotonic() - looked_s, 2 * tick_s)
            looked_s = time.monotonic()
            self._unheard_s = min(self._way.silent_s, self._unheard_s + passed_s)
            if self._unheard_s > self._way.lease_s:
                self._give_up(f"nothing was heard of it for {self._way.lease_s:g} s")
            elif look % _LOOKS == 0:
                self._speak()
