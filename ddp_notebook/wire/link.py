"""State of the connection with one peer: unacknowledged sent messages, and the number of messages received in order.

ZeroMQ loses messages between the loss of a connection and its detection. So every message carries a sequence number and
the last number received in order. Unacknowledged messages are kept and sent again (go-back-N): after a gap the receiver
drops later messages and requests the missing one.

    header of a frame      version  kind  seq  ack  epoch
    DATA                   a message of `messages` follows; seq counts from 1
    BEAT                   no message: acknowledgement and heartbeat
    RESEND                 no message: requests all messages from ack + 1

This module has no socket, no clock and no thread. `endpoint` calls it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ddp_notebook.messages.encoding import VERSION
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import struct

DATA, BEAT, RESEND = 1, 2, 3
RESEND_S = 1.0  # first retransmission timeout; it doubles at each retransmission
_LONGEST_RESEND_S = 30.0
_CUT_S = 2.5  # heartbeats arrive each second, so a longer silence means that the connection was lost
_SHORT_S = 10.0  # a message is dropped if memory for it is missing for this long
_HEADER = struct.Struct("!BBQQI")
HEADER_BYTES = _HEADER.size


class VersionError(ValueError):
    """The peer uses another version of the protocol."""


@dataclass(frozen=True, slots=True)
class Header:
    """Header at the start of a message's first frame. A separate frame would cost another encryption."""

    kind: int
    seq: int
    ack: int
    epoch: int

    def pack(self) -> bytes:
        return _HEADER.pack(VERSION, self.kind, self.seq, self.ack, self.epoch)

    @classmethod
    def unpack(cls, frame: bytes) -> Header:
        """Parse the header of a frame.

        Raises:
            VersionError: the frame has another version or is too short.
        """
        if len(frame) < HEADER_BYTES or frame[0] != VERSION:
            theirs = frame[0] if frame else None
            raise VersionError(f"the version of the wire protocol must be {VERSION}, got {theirs}")
        _, kind, seq, ack, epoch = _HEADER.unpack_from(frame)
        return cls(kind, seq, ack, epoch)


@dataclass(slots=True)
class Link:
    """Sequence numbers and unacknowledged messages of one peer. Times are monotonic seconds, passed by the caller."""

    sent: int = 0  # number of the last message sent
    received: int = 0  # number of the last message received in order
    owes_ack: int = 0  # messages received since the last acknowledgement, including duplicates
    last_sent_s: float = 0.0
    last_heard_s: float = 0.0
    last_progress_s: float = 0.0  # time when the oldest unacknowledged message was sent, or of the last acknowledgement
    asked: tuple[int, float] = (0, 0.0)  # number of the missing message that was requested, and the time
    short: tuple[int, float] = (0, 0.0)  # number of a message that did not fit into memory, and time of the first try
    patience_s: float = RESEND_S
    unacknowledged: deque[tuple[int, Sequence[bytes]]] = field(default_factory=deque)

    def data(self, message: Sequence[bytes], epoch: int, now: float) -> list[bytes]:
        """Return the frames of a new message. The link keeps them until they are acknowledged."""
        number = self.sent + 1
        frames = [Header(DATA, number, self.received, epoch).pack() + message[0], *message[1:]]
        is_first = not self.unacknowledged
        self.unacknowledged.append((number, frames))  # a MemoryError up to here leaves the link unchanged
        self.sent, self.owes_ack = number, 0
        if is_first:
            self.last_progress_s = now
        self.last_sent_s = now
        return frames

    def beat(self, now: float, kind: int = BEAT) -> list[bytes]:
        """Return a heartbeat frame that acknowledges messages; with `RESEND` it also requests missing messages."""
        self.last_sent_s = now
        return [Header(kind, 0, self._ack(), 0).pack()]

    def is_overdue(self, now: float) -> bool:
        """Return whether the oldest unacknowledged message must be sent again.

        The timeout doubles each time, since duplicates make a slow peer slower.
        """
        if not self.unacknowledged or now - self.last_progress_s <= self.patience_s:
            return False
        self.patience_s = min(2 * self.patience_s, _LONGEST_RESEND_S)
        return True

    def again(self, now: float) -> list[Sequence[bytes]]:
        """Return the frames of all unacknowledged messages, oldest first."""
        self.last_sent_s = self.last_progress_s = now
        return [frames for _, frames in self.unacknowledged]

    def heard(self, header: Header, now: float) -> bool:
        """Process a received header. Return whether its message is the next in order and must be delivered."""
        if now - self.last_heard_s > _CUT_S:
            self.patience_s = RESEND_S  # the connection was lost: reset the retransmission timeout
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
        """Undo the last `heard` because memory is missing, so that the peer sends the message again.

        Return False after 10 s of such tries: then the message is lost, and later messages are delivered.
        """
        if self.short[0] != self.received:
            self.short = self.received, now
        if now - self.short[1] > _SHORT_S:
            return False
        self.received -= 1
        return True

    def is_gap(self, header: Header) -> bool:
        """Return whether messages before this one are missing."""
        return header.kind == DATA and header.seq > self.received + 1

    def may_ask(self, now: float) -> bool:
        """Return whether to request the missing messages: once, and again after `RESEND_S`.

        Each later message shows the gap again, but each request makes the peer send everything again.
        """
        missing, when = self.asked
        if missing == self.received + 1 and now - when < RESEND_S:
            return False
        self.asked = self.received + 1, now
        return True

    def _ack(self) -> int:
        self.owes_ack = 0
        return self.received
