"""The bookkeeping of one peer: messages sent and not yet acknowledged, and messages received in order.

ZeroMQ loses what was sent between a cut of the connection and its detection. So every message carries a
sequence number and the last number received in order. Unacknowledged messages are kept and sent again
(go-back-N: after a gap the receiver drops later messages and asks for the missing one).

    header of a frame      version  kind  seq  ack  epoch
    DATA                   a message of `events` follows; seq counts from 1
    BEAT                   no message: acknowledges, and says that its sender lives
    RESEND                 no message: send again from ack + 1

Pure bookkeeping: no socket, no clock, no thread. `endpoint` drives it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ddp_notebook.messages.encoding import VERSION
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import struct

DATA, BEAT, RESEND = 1, 2, 3
RESEND_S = 1.0  # then an unacknowledged message is sent again, next after twice as long, and so on
_LONGEST_RESEND_S = 30.0
_CUT_S = 2.5  # both sides say something each second: after a longer silence the connection was cut
_SHORT_S = 10.0  # a message is lost if memory for it was missing for this long
_HEADER = struct.Struct("!BBQQI")
HEADER_BYTES = _HEADER.size


class VersionError(ValueError):
    """The other side speaks another version of the wire."""


@dataclass(frozen=True, slots=True)
class Header:
    """The beginning of the first frame on the control socket; a frame of its own would cost another encryption."""

    kind: int
    seq: int
    ack: int
    epoch: int

    def pack(self) -> bytes:
        return _HEADER.pack(VERSION, self.kind, self.seq, self.ack, self.epoch)

    @classmethod
    def unpack(cls, frame: bytes) -> Header:
        """The header of a frame.

        Raises:
            VersionError: the frame is from another version, or no header at all.
        """
        if len(frame) < HEADER_BYTES or frame[0] != VERSION:
            theirs = frame[0] if frame else None
            raise VersionError(f"this side speaks version {VERSION} of the wire, the other one {theirs}")
        _, kind, seq, ack, epoch = _HEADER.unpack_from(frame)
        return cls(kind, seq, ack, epoch)


@dataclass(slots=True)
class Link:
    """The state of one peer. Times are monotonic seconds, given by the caller."""

    sent: int = 0  # number of the last message sent
    received: int = 0  # number of the last message received in order
    owes_ack: int = 0  # messages since the last acknowledgement, with repeated ones: the peer has missed one
    last_sent_s: float = 0.0
    last_heard_s: float = 0.0
    last_progress_s: float = 0.0  # when the oldest unacknowledged message was sent, or last acknowledged
    asked: tuple[int, float] = (0, 0.0)  # the message that was asked for after a gap, and when
    short: tuple[int, float] = (0, 0.0)  # a message without memory for it, and the time of the first attempt
    patience_s: float = RESEND_S
    unacknowledged: deque[tuple[int, Sequence[bytes]]] = field(default_factory=deque)

    def data(self, message: Sequence[bytes], epoch: int, now: float) -> list[bytes]:
        """The frames of a new message, which is kept until it is acknowledged."""
        number = self.sent + 1
        frames = [Header(DATA, number, self.received, epoch).pack() + message[0], *message[1:]]
        is_first = not self.unacknowledged
        self.unacknowledged.append((number, frames))  # a MemoryError up to here leaves the link as it was
        self.sent, self.owes_ack = number, 0
        if is_first:
            self.last_progress_s = now
        self.last_sent_s = now
        return frames

    def beat(self, now: float, kind: int = BEAT) -> list[bytes]:
        """A frame that acknowledges and shows life; with `RESEND` it asks for missing messages."""
        self.last_sent_s = now
        return [Header(kind, 0, self._ack(), 0).pack()]

    def is_overdue(self, now: float) -> bool:
        """Whether the oldest message has waited too long for its acknowledgement. A slow peer gets more and more time,
        since repeated messages would make it slower."""
        if not self.unacknowledged or now - self.last_progress_s <= self.patience_s:
            return False
        self.patience_s = min(2 * self.patience_s, _LONGEST_RESEND_S)
        return True

    def again(self, now: float) -> list[Sequence[bytes]]:
        """All unacknowledged messages, oldest first."""
        self.last_sent_s = self.last_progress_s = now
        return [frames for _, frames in self.unacknowledged]

    def heard(self, header: Header, now: float) -> bool:
        """Note a header. Returns whether its message is the next in order, to be delivered."""
        if now - self.last_heard_s > _CUT_S:
            self.patience_s = RESEND_S  # what was sent into the cut is not waited for any longer
        self.last_heard_s = now
        while self.unacknowledged and self.unacknowledged[0][0] <= header.ack:
            self.unacknowledged.popleft()
            self.last_progress_s = now
            self.patience_s = RESEND_S
        if header.kind != DATA:
            return False
        self.owes_ack += 1
        if header.seq != self.received + 1:
            return False
        self.received = header.seq
        return True

    def unhear(self, now: float) -> bool:
        """Take back the last `heard` for lack of memory; the peer sends the message again. Returns False after 10 s of
        such attempts: then the message is lost, and later messages are delivered."""
        if self.short[0] != self.received:
            self.short = self.received, now
        if now - self.short[1] > _SHORT_S:
            return False
        self.received -= 1
        return True

    def is_gap(self, header: Header) -> bool:
        """Whether messages before this one are missing."""
        return header.kind == DATA and header.seq > self.received + 1

    def may_ask(self, now: float) -> bool:
        """Whether to ask for missing messages: once, and again if they do not come. All messages after a gap show the
        gap too, but each request makes the peer send everything again."""
        missing, when = self.asked
        if missing == self.received + 1 and now - when < RESEND_S:
            return False
        self.asked = self.received + 1, now
        return True

    def _ack(self) -> int:
        self.owes_ack = 0
        return self.received
