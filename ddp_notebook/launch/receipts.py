"""Acknowledge displays and widget messages to the ranks, which send only a few ahead, see `rank.cell.outgoing`."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ddp_notebook.messages.ranks import TAKEN_EVERY, Comm, Display, Taken
from ddp_notebook.records.units import bundle_chars

_EVERY_BYTES = 64 << 10
_ALL = 1 << 62


class Receipts:
    """Sends `Taken` to ranks.

    Args:
        send: sends a message to a rank, from any thread.
    """

    def __init__(self, send: Callable[[int, Taken], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._since: dict[tuple[int, str], tuple[int, int]] = {}  # messages and bytes since the last `Taken`

    def took(self, rank: int, message: Comm | Display) -> None:
        """Count a message of this rank that was shown or dropped."""
        kind, number, nbytes = type(message).__name__, 0, 0
        if isinstance(message, Display):
            number, nbytes = message.place, bundle_chars(message.content.get("data") or {})
        else:
            number, nbytes = message.number, sum(map(len, message.buffers))
        with self._lock:
            count, waiting = self._since.get((rank, kind), (0, 0))
            count, waiting = count + 1, waiting + nbytes
            is_due = count >= TAKEN_EVERY or waiting >= _EVERY_BYTES
            self._since[rank, kind] = (0, 0) if is_due else (count, waiting)
        if is_due:
            self._send(rank, Taken(kind=kind, number=number))

    def took_all(self, rank: int) -> None:
        """Acknowledge all messages of this rank so far that nothing else will acknowledge."""
        for kind in (Comm, Display):
            self._send(rank, Taken(kind=kind.__name__, number=_ALL))
