"""Compare sends with receives, message by message, in memory that the ranks share.

Without a check, gloo ends the process if its buffer is shorter than the message. It leaves the rest of a longer buffer
unchanged, and interprets the bytes of another dtype wrongly, both without an error.

The k-th send from one rank to another with a tag belongs to the k-th receive on that rank. Each side posts its message,
then reads what the other side has posted, and only then starts. So the later side sees both. It cannot raise at this
point, since the other side may have started. If the two differ, the sender sends an empty message, which fits into
every buffer, and the receiver uses its own memory. Both raise after their wait. So each message is received, the user's
tensors stay unchanged, and the group remains usable.

A post is one word with number, tag, dtype and number of elements, which a processor reads and writes atomically. A
message that does not fit into a word, or whose word was overwritten, is not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import Work

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import threading

_DEPTH = 256  # messages from one rank to another that may be in progress on one side and are still compared
_NUMEL_BITS, _DTYPE_BITS, _TAG_BITS = 33, 5, 8
_TAG_SHIFT = _NUMEL_BITS + _DTYPE_BITS
_NUMBER_SHIFT = _TAG_SHIFT + _TAG_BITS
_WORD = (1 << 64) - 1
_WHAT = (1 << _TAG_SHIFT) - 1
_DTYPES = (  # the code is the index; 0 for other dtypes, which are not compared
    *(None, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(getattr(torch, name, None) for name in ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")),
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}
# For each pair of ranks and direction, and each of its two sides: words, answers at the same offsets, their count.
_AT_ANSWERS, _AT_COUNT, _SIDE_WORDS = _DEPTH, 2 * _DEPTH, 2 * _DEPTH + 8


class MessageMismatchError(RuntimeError):
    """The sender and the receiver of a message use another dtype or number of elements.

    Both tensors are unchanged; the group remains usable.
    """


class _Side:
    """Messages of one direction between this rank and another one: this rank's words and those of the other rank.

    Args:
        kind: "send" or "recv".
        peer: the other rank, in the group.
        mine, theirs: offsets of the words of each side.
    """

    __slots__ = ("count", "kind", "known", "mine", "numbers", "peer", "read", "theirs")

    def __init__(self, kind: str, peer: int, mine: int, theirs: int) -> None:
        self.kind, self.peer = kind, peer
        self.mine, self.theirs = mine, theirs
        self.count = self.read = 0  # words written by this rank, and read from the other
        self.numbers: dict[int, int] = {}  # number of the last message, by tag
        self.known: dict[int, tuple[int, int]] = {}  # the other's word and its offset, by number and tag

    def next_number(self, tag: int) -> int:
        """Return the number of the next message with this tag."""
        number = self.numbers[tag] = self.numbers.get(tag, 0) + 1
        return number


class Posted(NamedTuple):
    """A posted message of this rank."""

    side: _Side
    word: int
    at: int  # its offset


class Messages:
    """Sends and receives of a group's ranks.

    Args:
        words: (count_words(size),) shared by the ranks, initially zeros.
        rank, size: in the group.
    """

    def __init__(self, words: memoryview, rank: int, size: int) -> None:
        self._words = words
        self._rank, self._size = rank, size
        self._sides: dict[tuple[str, int], _Side] = {}
        self._from_any: Counter[int] = Counter()  # receives from any rank in progress, by tag
        self._uncounted: set[int] = set()  # tags for which this rank's receives cannot be counted any more
        # Orders the accesses of several threads. Each end of a block is also a memory barrier for the other ranks.
        self._lock = threading.Lock()

    def post(self, kind: str, peer: int, tag: int, tensor: torch.Tensor) -> Posted | None:
        """Post a message that this rank is about to send or receive. Returns None if it cannot be compared.

        Args:
            kind: "send" or "recv".
            peer: the other rank, in the group.
        """
        if kind == "recv" and self._from_any[tag]:  # the order of the two receives is not known
            self._uncounted.add(tag)
        if not 0 <= tag < 1 << _TAG_BITS or (kind == "recv" and tag in self._uncounted):
            return None
        side, words = self._side(kind, peer), self._words
        word = _word(side.next_number(tag), tag, what_of(tensor))
        if not word >> _NUMBER_SHIFT:  # numbers restart: the remaining words belong to other messages
            side.known.clear()
        side.count += 1
        at = side.mine + side.count % _DEPTH
        with self._lock:
            words[at + _AT_ANSWERS] = 0
            words[at] = word
        with self._lock:  # a rank that reads the count finds the word
            words[side.mine + _AT_COUNT] = side.count
        return Posted(side, word, at)

    def _side(self, kind: str, peer: int) -> _Side:
        side = self._sides.get((kind, peer))
        if side is None:
            src, dst = (self._rank, peer) if kind == "send" else (peer, self._rank)
            first = (src * self._size + dst) * 2 * _SIDE_WORDS
            places = first, first + _SIDE_WORDS  # offsets of the sender and of the receiver
            made = _Side(kind, peer, *(places if kind == "send" else places[::-1]))
            side = self._sides.setdefault((kind, peer), made)  # the first thread's object wins
        return side

    def begin_from_any(self, tag: int) -> None:
        """Note that this rank starts a receive from any rank."""
        self._from_any[tag] += 1

    def end_from_any(self, tag: int, what: int, ranks: Sequence[int], title: str, work: Work) -> None:
        """Compare a message from any rank after it was received, when its source is known. Raises as `compare` does.

        Unlike there, the tensor contains the received data.

        Args:
            what: dtype and number of elements of this rank's tensor, see `what_of`.
            ranks, title: see `compare`.
        """
        source = getattr(work, "_source_rank", None)
        if source is None:  # this torch does not report the source
            self._uncounted.add(tag)
            return
        side = self._side("recv", source())
        word = _word(side.next_number(tag), tag, what)
        self._from_any[tag] -= 1  # last: another thread may start to count
        if tag in self._uncounted or not 0 <= tag < 1 << _TAG_BITS:
            return
        sent, _ = self._unlike(side, word)
        side.known.pop(word >> _TAG_SHIFT, None)
        if sent:
            raise MessageMismatchError(
                f"{self._difference(side, word, sent, ranks, title)}. The tensor was filled anyway; a longer message "
                "would have crashed the process. Pass src= to recv"
            )

    def look(self, posted: Posted) -> int:
        """Return the other side's word if its message differs, and notify that side. Returns 0 if it is equal or not
        known."""
        word, at = self._unlike(posted.side, posted.word)
        if word:
            self._words[at + _AT_ANSWERS] = posted.word
        return word

    def _unlike(self, side: _Side, mine: int) -> tuple[int, int]:
        """Return the other side's word for this message, and its offset, if the two differ; otherwise zeros."""
        words, known = self._words, side.known
        with self._lock:
            count = words[side.theirs + _AT_COUNT]
        with self._lock:
            for number in range(max(side.read, count - _DEPTH) + 1, count + 1):
                at = side.theirs + number % _DEPTH
                word = words[at]
                known[word >> _TAG_SHIFT] = word, at
                if len(known) > _DEPTH:  # drop messages that were not compared
                    del known[next(iter(known))]
            side.read = max(side.read, count)  # another thread may have read further
        word, at = known.get(mine >> _TAG_SHIFT, (mine, 0))
        return (word, at) if word != mine and _code(word) and _code(mine) else (0, 0)

    def compare(self, posted: Posted, ranks: Sequence[int], title: str, _: Work) -> None:
        """Raise an error if the other side's message differs.

        Args:
            ranks: ranks of the session, by rank of the group.
            title: of the group.
        """
        which, word = posted.word >> _TAG_SHIFT, self._words[posted.at + _AT_ANSWERS]
        if word >> _TAG_SHIFT != which:  # otherwise the other side has seen it, and may have written much since
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
            f"message #{number} from rank {src} to rank {dst}{with_tag}{where} does not match: rank {src} sends "
            f"{_words(sends)}, rank {dst} receives {_words(takes)}"
        )


def count_words(size: int) -> int:
    """Return the number of words for the messages of a group with `size` ranks."""
    return size * size * 2 * _SIDE_WORDS


def what_of(tensor: torch.Tensor) -> int:
    """Return the dtype and the number of elements as a part of a word."""
    numel = tensor.numel()
    return _CODES.get(tensor.dtype, 0) << _NUMEL_BITS | numel if numel < 1 << _NUMEL_BITS else 0


def _word(number: int, tag: int, what: int) -> int:
    return (number << _NUMBER_SHIFT | tag << _TAG_SHIFT | what) & _WORD


def _code(word: int) -> int:
    return (word & _WHAT) >> _NUMEL_BITS


def _numel(word: int) -> int:
    return word & (1 << _NUMEL_BITS) - 1


def nbytes_of(word: int) -> int:
    """Return the size in bytes of the message that a word describes."""
    dtype = _DTYPES[_code(word)]
    return 0 if dtype is None else dtype.itemsize * _numel(word)


def _words(word: int) -> str:
    return f"{_numel(word)} {str(_DTYPES[_code(word)]).removeprefix('torch.')} ({nbytes_of(word)} bytes)"
