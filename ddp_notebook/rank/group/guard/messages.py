"""Is what a rank takes what the other one sends? Compared message by message, in memory that the ranks share.

Without a check, gloo ends the process whose buffer is shorter than the message, leaves the rest of a longer one as it
was, and makes garbage of another type, both in silence.

The k-th send from one rank to another with a tag belongs to the k-th receive there. Each side writes down what its
message is, then looks at what the other side has written, and only then begins: whoever comes later sees both. It does
not raise there, since the other side may be under way. Where the two differ, the sender sends an empty message, which
fits into every buffer, and the receiver takes what comes into memory of its own; both raise when they have waited. So
each message is received, the user's tensors stay as they were, and the group can be used.

What is written is one word, which a processor reads and writes as a whole: number, tag, type and elements. A message
that does not fit into it, or whose word was overwritten, is not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import Work

from ddp_notebook.stdlib import threading

_DEPTH = 256  # messages from one rank to another that may be under way on one side, and are compared nevertheless
_NUMEL_BITS, _DTYPE_BITS, _TAG_BITS = 33, 5, 8
_TAG_SHIFT = _NUMEL_BITS + _DTYPE_BITS
_NUMBER_SHIFT = _TAG_SHIFT + _TAG_BITS
_WORD = (1 << 64) - 1
_WHAT = (1 << _TAG_SHIFT) - 1
_DTYPES = (  # its code is its place; 0: another one, which is not compared
    *(None, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(getattr(torch, name, None) for name in ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")),
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}
# For each pair of ranks and direction, and for each of its two sides: words, answers at the same places, their count.
_AT_ANSWERS, _AT_COUNT, _SIDE_WORDS = _DEPTH, 2 * _DEPTH, 2 * _DEPTH + 8


class MessageMismatchError(RuntimeError):
    """A rank takes another number or type of elements than it is sent. Both tensors are as they were; the group can be
    used."""


class _Side:
    """What this rank sends to another one, or takes from it, and what that one has written of the same.

    Args:
        kind: "send" or "recv".
        peer: the other rank, of the group.
        mine, theirs: where the words of each begin.
    """

    __slots__ = ("count", "kind", "known", "mine", "numbers", "peer", "read", "theirs")

    def __init__(self, kind: str, peer: int, mine: int, theirs: int) -> None:
        self.kind, self.peer = kind, peer
        self.mine, self.theirs = mine, theirs
        self.count = self.read = 0  # words written here, and read there
        self.numbers: dict[int, int] = {}  # of the last message with each tag
        self.known: dict[int, tuple[int, int]] = {}  # by number and tag: their word and its place, as read

    def next_number(self, tag: int) -> int:
        """Count one more with this tag."""
        number = self.numbers[tag] = self.numbers.get(tag, 0) + 1
        return number


class Posted(NamedTuple):
    """A message of this rank's that is written down."""

    side: _Side
    word: int
    at: int  # where it is written


class Messages:
    """What the ranks of a group send and take.

    Args:
        words: (count_words(size),) shared by the ranks; zeros at first.
        rank, size: of the group.
    """

    def __init__(self, words: memoryview, rank: int, size: int) -> None:
        self._words = words
        self._rank, self._size = rank, size
        self._sides: dict[tuple[str, int], _Side] = {}
        self._from_any: Counter[int] = Counter()  # receives from any rank that are under way, by tag
        self._uncounted: set[int] = set()  # tags with which this rank's receives cannot be counted any more
        # It orders what several threads do here, and what the ranks see of it: each end of a block is a barrier.
        self._lock = threading.Lock()

    def post(self, kind: str, peer: int, tag: int, tensor: torch.Tensor) -> Posted | None:
        """Write down what this rank is about to send or to take; None: it cannot be compared.

        Args:
            kind: "send" or "recv".
            peer: the other rank, of the group.
        """
        if kind == "recv" and self._from_any[tag]:  # which of the two comes first is not known
            self._uncounted.add(tag)
        if not 0 <= tag < 1 << _TAG_BITS or (kind == "recv" and tag in self._uncounted):
            return None
        side, words = self._side(kind, peer), self._words
        word = _word(side.next_number(tag), tag, what_of(tensor))
        if not word >> _NUMBER_SHIFT:  # numbers begin again: whatever was not looked for is another message's
            side.known.clear()
        side.count += 1
        at = side.mine + side.count % _DEPTH
        with self._lock:
            words[at + _AT_ANSWERS] = 0
            words[at] = word
        with self._lock:  # who reads the count finds the word
            words[side.mine + _AT_COUNT] = side.count
        return Posted(side, word, at)

    def _side(self, kind: str, peer: int) -> _Side:
        side = self._sides.get((kind, peer))
        if side is None:
            src, dst = (self._rank, peer) if kind == "send" else (peer, self._rank)
            first = (src * self._size + dst) * 2 * _SIDE_WORDS
            places = first, first + _SIDE_WORDS  # of the sender, and of the receiver
            made = _Side(kind, peer, *(places if kind == "send" else places[::-1]))
            side = self._sides.setdefault((kind, peer), made)  # of two threads the first one's
        return side

    def begin_from_any(self, tag: int) -> None:
        """This rank begins to take a message of whoever sends one."""
        self._from_any[tag] += 1

    def end_from_any(self, tag: int, what: int, ranks: Sequence[int], title: str, work: Work) -> None:
        """Such a message has come: now it is known which one it is. Raises as `compare`, but for the tensor.

        Args:
            what: of this rank's tensor, see `_what`.
            ranks, title: see `compare`.
        """
        source = getattr(work, "_source_rank", None)
        if source is None:  # torch does not tell
            self._uncounted.add(tag)
            return
        side = self._side("recv", source())
        word = _word(side.next_number(tag), tag, what)
        self._from_any[tag] -= 1  # last: another thread may begin to count
        if tag in self._uncounted or not 0 <= tag < 1 << _TAG_BITS:
            return
        sent, _ = self._unlike(side, word)
        side.known.pop(word >> _TAG_SHIFT, None)
        if sent:
            raise MessageMismatchError(
                f"{self._difference(side, word, sent, ranks, title)}. Its tensor holds what came, and a longer message "
                "would have ended it: take messages with src=..."
            )

    def look(self, posted: Posted) -> int:
        """The other side's word where it is another message; 0: it is the same, or not known. That side is told."""
        word, at = self._unlike(posted.side, posted.word)
        if word:
            self._words[at + _AT_ANSWERS] = posted.word
        return word

    def _unlike(self, side: _Side, mine: int) -> tuple[int, int]:
        """The other side's word for the message of this one, and its place, where the two differ; else 0."""
        words, known = self._words, side.known
        with self._lock:
            count = words[side.theirs + _AT_COUNT]
        with self._lock:
            for number in range(max(side.read, count - _DEPTH) + 1, count + 1):
                at = side.theirs + number % _DEPTH
                word = words[at]
                known[word >> _TAG_SHIFT] = word, at
                if len(known) > _DEPTH:  # of messages that were not looked for
                    del known[next(iter(known))]
            side.read = max(side.read, count)  # another thread may have read further
        word, at = known.get(mine >> _TAG_SHIFT, (mine, 0))
        return (word, at) if word != mine and _code(word) and _code(mine) else (0, 0)

    def compare(self, posted: Posted, ranks: Sequence[int], title: str, _: Work) -> None:
        """Raise where the other side's message is another one.

        Args:
            ranks: of the session, by rank of the group.
            title: of the group.
        """
        which, word = posted.word >> _TAG_SHIFT, self._words[posted.at + _AT_ANSWERS]
        if word >> _TAG_SHIFT != which:  # else that side has seen it, and perhaps written much since
            word = self.look(posted)
        posted.side.known.pop(which, None)
        if not word:
            return
        difference = self._difference(posted.side, posted.word, word, ranks, title)
        raise MessageMismatchError(f"{difference}. No tensor was changed, and the group can be used")

    def _difference(self, side: _Side, mine: int, theirs: int, ranks: Sequence[int], title: str) -> str:
        number, tag = mine >> _NUMBER_SHIFT, mine >> _TAG_SHIFT & (1 << _TAG_BITS) - 1
        me, other = ranks[self._rank], ranks[side.peer]
        (src, sends), (dst, takes) = (me, mine), (other, theirs)
        if side.kind == "recv":
            (src, sends), (dst, takes) = (dst, takes), (src, sends)
        with_tag = f" with tag {tag}" if tag else ""
        where = "" if title == "default" else f" in group {title}"
        return (
            f"message #{number} from rank {src} to rank {dst}{with_tag}{where} does not fit: rank {src} sends "
            f"{_words(sends)}, rank {dst} takes {_words(takes)}"
        )


def count_words(size: int) -> int:
    """How many words the messages of a group of so many ranks need."""
    return size * size * 2 * _SIDE_WORDS


def what_of(tensor: torch.Tensor) -> int:
    """Return the type and the number of elements as a part of a word."""
    numel = tensor.numel()
    return _CODES.get(tensor.dtype, 0) << _NUMEL_BITS | numel if numel < 1 << _NUMEL_BITS else 0


def _word(number: int, tag: int, what: int) -> int:
    return (number << _NUMBER_SHIFT | tag << _TAG_SHIFT | what) & _WORD


def _code(word: int) -> int:
    return (word & _WHAT) >> _NUMEL_BITS


def _numel(word: int) -> int:
    return word & (1 << _NUMEL_BITS) - 1


def nbytes_of(word: int) -> int:
    """Return the size of the message that a word describes."""
    dtype = _DTYPES[_code(word)]
    return 0 if dtype is None else dtype.itemsize * _numel(word)


def _words(word: int) -> str:
    return f"{_numel(word)} {str(_DTYPES[_code(word)]).removeprefix('torch.')} ({nbytes_of(word)} bytes)"
