"""The outlet to the front end: text in pieces, displays, and no more of either than Jupyter accepts.

Jupyter drops all output above 1 MB a second (averaged over 3 s) or 1000 messages a second, and says so in the user's
cell. So text leaves at most 20 times a second, and after the first 2 MB at 0.8 MB a second.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddp_notebook.run.output.pace import FRONT_END
from ddp_notebook.run.output.sink import Here, Sink

FLUSH_S = 0.05
_BURST_BYTES = 2_000_000
_BYTES_PER_S = 800_000
_FRAMING_BYTES = 600  # of a message on iopub, measured
_MOST_GATHERED_CHARS = 100_000
_MOST_DISPLAYS = 200  # limit of waiting displays; as many are kept after a press of stop
_PROCESS = secrets.token_hex(4)  # a notebook keeps outputs across restarts of its kernel
_ids = itertools.count(1)


@dataclass(slots=True)
class _Text:
    stream: str
    text: str

    @property
    def cost(self) -> int:
        """Bytes on iopub, where a newline takes two and an escape six."""
        return len(self.text.encode("utf-8", "replace")) + self.text.count("\n") + 5 * self.text.count("\x1b")


@dataclass(slots=True)
class _Data:
    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str | None
    update: bool

    @property
    def cost(self) -> int:
        return _FRAMING_BYTES + sum(len(str(value)) for value in self.data.values())


@dataclass(slots=True)
class _Clear:
    wait: bool
    cost = _FRAMING_BYTES


def new_id() -> str:
    """An id that no display has."""
    return f"ddp-{_PROCESS}-{next(_ids)}"


class Outlet:
    """Shows text and displays in order. For one thread alone.

    Args:
        sink: where they go; None: where the output of the thread goes.
    """

    def __init__(self, sink: Sink | None = None) -> None:
        self.sink = Here() if sink is None else sink
        self.can_update = self.sink.can_update
        self.can_change_text = self.can_update and not self.sink.is_captured  # text can be shown as a display
        self.is_live = self.sink.is_live
        self.has_shown = False  # since it was cleared
        self._waiting: deque[_Text | _Data | _Clear] = deque()
        self._allowed = float(_BURST_BYTES)
        self._refilled_s = time.monotonic()
        self._flushed_s = 0.0

    def write(self, stream: str, text: str) -> None:
        """Show text. `flush` brings it to the front end."""
        self._begin()
        last = self._waiting[-1] if self._waiting else None
        if isinstance(last, _Text) and last.stream == stream and len(last.text) < 100_000:
            last.text += text
        else:
            self._waiting.append(_Text(stream, text))

    def show(self, data: dict[str, Any], metadata: dict[str, Any] | None = None, display_id: str | None = None) -> None:
        """Display a MIME bundle; with an id it can be updated later. Only where `can_update`."""
        self._begin()
        self._waiting.append(_Data(data, metadata or {}, display_id, update=False))

    def update(self, data: dict[str, Any], metadata: dict[str, Any] | None, display_id: str) -> None:
        """Change the display with this id. An earlier change that still waits is replaced."""
        for part in self._waiting:
            if isinstance(part, _Data) and part.update and part.display_id == display_id:
                part.data, part.metadata = data, metadata or {}
                return
        self._waiting.append(_Data(data, metadata or {}, display_id, update=True))

    def clear(self, wait: bool) -> None:
        """Remove all that is shown.

        Args:
            wait: only when something else comes.
        """
        if not wait:
            self._drop()
        self._waiting.append(_Clear(wait))
        self.has_shown = False

    def _begin(self) -> None:
        """Something is shown: what waits and would be cleared by it need not be."""
        if self._waiting and isinstance(last := self._waiting[-1], _Clear):
            self._drop()
            self._waiting.append(last)
        self.has_shown = True

    def _drop(self) -> None:
        """Give up what waits, but for changes of displays, which may be an earlier cell's."""
        self._waiting = deque(part for part in self._waiting if isinstance(part, _Data) and part.update)

    def flush(self, now: float) -> float | None:
        """Send what may go now. Returns seconds until the rest may go; None: nothing is left."""
        if not self._waiting:
            return None
        if (wait_s := self._flushed_s + FLUSH_S - now) > 0:
            return wait_s
        self._flush_allowed(now)
        return FLUSH_S if self._waiting else None

    def hurry(self) -> None:
        """Keep only the end of what waits, and let it go at once."""
        chars = displays = 0
        for number in range(len(self._waiting) - 1, -1, -1):
            chars += self._waiting[number].cost
            displays += not isinstance(self._waiting[number], _Text)
            if chars > _BURST_BYTES or displays > _MOST_DISPLAYS:
                dropped = [self._waiting.popleft() for _ in range(number + 1)]
                self._waiting.appendleft(_Text("stderr", "... output left out after the interrupt ...\n"))
                # changes of displays that are shown: the last value of each is wanted
                self._waiting.extendleft(part for part in dropped if isinstance(part, _Data) and part.update)
                break
        self._allowed = float(_BURST_BYTES)

    @property
    def is_full(self) -> bool:
        """Return whether so many displays wait that the notebook should accept no more."""
        if len(self._waiting) <= _MOST_DISPLAYS:
            return False
        return sum(not isinstance(part, _Text) for part in self._waiting) > _MOST_DISPLAYS

    def drain(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Send everything, or only its end once somebody has pressed stop."""
        while self._waiting:
            if is_stopped():
                self.hurry()
            self._flush_allowed(time.monotonic())
            if self._waiting:
                time.sleep(FLUSH_S)

    def _flush_allowed(self, now: float) -> None:
        self._allowed = min(_BURST_BYTES, self._allowed + (now - self._refilled_s) * _BYTES_PER_S)
        self._refilled_s = self._flushed_s = now
        written: dict[str, None] = {}  # streams that were not flushed since, in order
        while self._waiting and (self._allowed > 0 or not self.can_update):
            if self.can_update and not isinstance(self._waiting[0], _Text):
                if FRONT_END.wait_s("displays"):
                    break
                FRONT_END.add(1)
            if self._changes_stream(written):
                if self.can_update and FRONT_END.wait_s("changes"):
                    self._gather()
                else:  # Jupyter keeps a buffer for each stream, and would put one text before the other
                    self._flush_streams(written)
            part = self._waiting.popleft()
            self._allowed -= part.cost
            if isinstance(part, _Text):
                self.sink.write(part.stream, part.text)
                written[part.stream] = None
            elif isinstance(part, _Clear):
                self._flush_streams(written)
                self.sink.clear(part.wait)
            else:
                self.sink.publish(part.data, part.metadata, part.display_id, part.update)
        self._flush_streams(written)

    def _changes_stream(self, written: Mapping[str, None]) -> bool:
        """Return whether the next part is text of another stream than what was written."""
        part = self._waiting[0]
        return bool(written) and isinstance(part, _Text) and part.stream not in written

    def _flush_streams(self, written: dict[str, None]) -> None:
        self._allowed -= _FRAMING_BYTES * len(written)
        FRONT_END.add(len(written))
        for stream in written:
            self.sink.flush(stream)
        written.clear()

    def _gather(self) -> None:
        """Put waiting text into one piece for each stream, where the stream changes more often than Jupyter takes."""
        texts: dict[str, list[str]] = {}
        chars = 0
        while self._waiting and isinstance(part := self._waiting[0], _Text) and chars < _MOST_GATHERED_CHARS:
            self._waiting.popleft()
            texts.setdefault(part.stream, []).append(part.text)
            chars += len(part.text)
        self._waiting.extendleft(reversed([_Text(stream, "".join(its)) for stream, its in texts.items()]))
