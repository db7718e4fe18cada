"""Limit the output to the front end to the rate that Jupyter accepts: text in pieces, and displays.

Jupyter Server drops all output above 1 MB of text or 1000 messages per second, averaged over 3 s, and shows a message
in the cell. So text is sent at most 20 times per second, and after the first 0.3 MB at 0.7 MB per second. The bytes of
displays are limited to protect the browser.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddp_notebook.run.output.display_target import DisplayTarget, ThreadTarget
from ddp_notebook.run.output.message_rate import FRONT_END

FLUSH_S = 0.05
_TEXT_BYTES = 300_000  # text above the rate: 2.4 MB in any 3 s, because a busy server counts the text of more than 3 s
_DISPLAY_BYTES = 2_000_000  # bytes of displays above the rate
_BYTES_PER_S = 700_000
_PIECE_CHARS = 50_000  # longer text is split, so that a piece exceeds the limit only slightly
_BYTES_AFTER_STOP = 200_000  # waiting text that is kept after a press of stop; it is sent within 0.3 s
_FRAMING_BYTES = 600  # overhead of an iopub message, measured
_MOST_DISPLAYS = 200  # limit of waiting displays; the same number is kept after a press of stop
_PROCESS = secrets.token_hex(4)  # part of display ids: a notebook keeps outputs across kernel restarts
_ids = itertools.count(1)


@dataclass(slots=True)
class _Text:
    stream: str
    text: str

    @property
    def cost(self) -> int:
        """Return the bytes on iopub, where a newline takes two and an escape six."""
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
    """Return a new display id."""
    return f"ddp-{_PROCESS}-{next(_ids)}"


class RateLimiter:
    """Shows text and displays in order. Not thread-safe.

    Args:
        target: destination; None: the destination of the thread's output.
        holds: returns whether `flush` must keep waiting output. Its arguments are the seconds since the first waiting
            output arrived, and the seconds without output before that.
    """

    def __init__(
        self, target: DisplayTarget | None = None, holds: Callable[[float, float], bool] = lambda *_: False
    ) -> None:
        self.target = ThreadTarget() if target is None else target
        self.can_update = self.target.can_update
        self.can_change_text = self.can_update and not self.target.is_captured  # text can be shown as a display
        self.is_live = self.target.is_live
        self.has_shown = False  # since the last clear
        self._waiting: deque[_Text | _Data | _Clear] = deque()
        self._allowed_text, self._allowed_displays = float(_TEXT_BYTES), float(_DISPLAY_BYTES)
        self._refilled_s = time.monotonic()
        self._flushed_s = 0.0
        self._holds = holds
        self._waits_since_s = 0.0
        self._has_sent = False  # since the last clear

    def write(self, stream: str, text: str) -> None:
        """Show text. `flush` sends it to the front end."""
        self._begin()
        last = self._waiting[-1] if self._waiting else None
        if isinstance(last, _Text) and last.stream == stream and len(last.text) < _PIECE_CHARS:
            room = _PIECE_CHARS - len(last.text)
            last.text, text = last.text + text[:room], text[room:]
        for at in range(0, len(text), _PIECE_CHARS):
            self._waiting.append(_Text(stream, text[at : at + _PIECE_CHARS]))

    def show(self, data: dict[str, Any], metadata: dict[str, Any] | None = None, display_id: str | None = None) -> None:
        """Display a MIME bundle, which can be updated if it has an id. Requires `can_update`."""
        self._begin()
        self._waiting.append(_Data(data, metadata or {}, display_id, update=False))

    def update(self, data: dict[str, Any], metadata: dict[str, Any] | None, display_id: str) -> None:
        """Update the display with this id. An earlier waiting update is replaced."""
        self._note_waiting()
        for part in self._waiting:
            if isinstance(part, _Data) and part.update and part.display_id == display_id:
                part.data, part.metadata = data, metadata or {}
                return
        self._waiting.append(_Data(data, metadata or {}, display_id, update=True))

    def clear(self, wait: bool) -> None:
        """Remove all output.

        Args:
            wait: only when new output arrives.
        """
        if not wait:
            self._drop()
        self._note_waiting()
        self._waiting.append(_Clear(wait))
        self.has_shown = False

    def _begin(self) -> None:
        """Drop waiting output that the next output would clear."""
        if self._waiting and isinstance(last := self._waiting[-1], _Clear):
            self._drop()
            self._waiting.append(last)
        self._note_waiting()
        self.has_shown = True

    def _note_waiting(self) -> None:
        if not self._waiting:
            self._waits_since_s = time.monotonic()

    def _drop(self) -> None:
        """Drop waiting output, except updates of displays, which may belong to an earlier cell."""
        self._waiting = deque(part for part in self._waiting if isinstance(part, _Data) and part.update)

    def flush(self, now: float) -> float | None:
        """Send output within the limits. Return the seconds until the next call; None: nothing waits."""
        if not self._waiting:
            return None
        if (wait_s := self._flushed_s + FLUSH_S - now) > 0:
            return wait_s
        if self._is_held(now):
            return FLUSH_S
        self._flush_allowed(now)
        return FLUSH_S if self._waiting else None

    def _is_held(self, now: float) -> bool:
        if self.is_full or (self._has_sent and any(isinstance(part, _Clear) for part in self._waiting)):
            return False  # a clear that is sent later would also remove the view
        since_s = self._waits_since_s
        return self._holds(now - since_s, since_s - self._flushed_s)

    def hurry(self) -> None:
        """Drop waiting output except its end."""
        text_bytes = display_bytes = displays = 0
        for number in range(len(self._waiting) - 1, -1, -1):
            part = self._waiting[number]
            if isinstance(part, _Text):
                text_bytes += part.cost
            else:
                display_bytes, displays = display_bytes + part.cost, displays + 1
            if text_bytes > _BYTES_AFTER_STOP or display_bytes > _DISPLAY_BYTES or displays > _MOST_DISPLAYS:
                dropped = [self._waiting.popleft() for _ in range(number + 1)]
                self._waiting.appendleft(_Text("stderr", "... output left out after the interrupt ...\n"))
                # keep updates of shown displays, because the last value of each is needed
                self._waiting.extendleft(part for part in dropped if isinstance(part, _Data) and part.update)
                break
        self._allowed_displays = float(_DISPLAY_BYTES)  # text keeps its rate, because Jupyter would drop it

    @property
    def is_full(self) -> bool:
        """Return whether so many displays wait that the notebook must accept no more."""
        if len(self._waiting) <= _MOST_DISPLAYS:
            return False
        return sum(not isinstance(part, _Text) for part in self._waiting) > _MOST_DISPLAYS

    def drain(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Send all output, or only its end after a press of stop."""
        while self._waiting:
            if is_stopped():
                self.hurry()
            self._flush_allowed(time.monotonic())
            if self._waiting:
                time.sleep(FLUSH_S)

    def _flush_allowed(self, now: float) -> None:
        refilled = (now - self._refilled_s) * _BYTES_PER_S
        self._allowed_text = min(_TEXT_BYTES, self._allowed_text + refilled)
        self._allowed_displays = min(_DISPLAY_BYTES, self._allowed_displays + refilled)
        self._refilled_s = self._flushed_s = now
        written: dict[str, None] = {}  # streams written since the last flush, in order
        while self._waiting and (self._may_leave(self._waiting[0]) or not self.can_update):
            if self._changes_stream(written):
                if self.can_update and FRONT_END.wait_s("changes"):
                    self._gather()
                else:  # Jupyter buffers each stream separately, and would change the order of the texts
                    self._flush_streams(written)
            part = self._waiting.popleft()
            if isinstance(part, _Text):
                self._allowed_text -= part.cost
                self.target.write(part.stream, part.text)
                written[part.stream] = None
                self._has_sent = True
                continue
            self._allowed_displays -= part.cost
            if self.can_update:
                FRONT_END.add(1)
            if not isinstance(part, _Clear):
                self.target.publish(part.data, part.metadata, part.display_id, part.update)
            elif self._has_sent:
                self._flush_streams(written)
                self.target.clear(part.wait)
            self._has_sent = not isinstance(part, _Clear)
        self._flush_streams(written)

    def _may_leave(self, part: _Text | _Data | _Clear) -> bool:
        """Return whether the limits allow to send a part now."""
        if isinstance(part, _Text):
            return self._allowed_text > 0
        return self._allowed_displays > 0 and not FRONT_END.wait_s("displays")

    def _changes_stream(self, written: Mapping[str, None]) -> bool:
        """Return whether the next part is text of a stream that is not in `written`."""
        part = self._waiting[0]
        return bool(written) and isinstance(part, _Text) and part.stream not in written

    def _flush_streams(self, written: dict[str, None]) -> None:
        self._allowed_text -= _FRAMING_BYTES * len(written)
        FRONT_END.add(len(written))
        for stream in written:
            self.target.flush(stream)
        written.clear()

    def _gather(self) -> None:
        """Combine waiting text into one piece per stream, if the stream changes more often than Jupyter accepts."""
        texts: dict[str, list[str]] = {}
        chars = 0
        while self._waiting and isinstance(part := self._waiting[0], _Text) and chars < _PIECE_CHARS:
            self._waiting.popleft()
            texts.setdefault(part.stream, []).append(part.text)
            chars += len(part.text)
        self._waiting.extendleft(reversed([_Text(stream, "".join(its)) for stream, its in texts.items()]))
