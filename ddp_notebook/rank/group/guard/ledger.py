"""Ledger: one word for each collective of a group, in memory that the ranks of one machine share.

The guard lets the callers of the user's collectives wait until they are compared. Calls of DDP, FSDP and other
libraries must not wait, since they overlap with computation. So each rank posts a word of its call before it starts the
operation, and then reads the words that two other ranks have posted for the call with the same number. The later rank
sees a difference before it has started anything. A group needs no more: collectives have the same order on all ranks.

| bits of a word | content |
|---|---|
| 0 to 16 | number of the call in its group |
| 17 to 28 | slot of the description |
| 29 | another thread than the main thread calls it |
| 30 | two threads of this rank use the group |
| 31 | the guard compares this call |
| 32 to 47 | hash of operation, dtype and number of elements |
| 48 to 63 | hash of the meaning; 0 if it is unknown |

A different meaning alone is no error: a program may create equal models in two branches, or another model on one rank.
It is one if both ranks have the same objects in this group, and use different ones. So each rank also publishes
checksums of its objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType
from typing import Any, NamedTuple

from ddp_notebook.rank.group.collective_owners import HASHES, Meaning, hash_of
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import threading, zlib

_DEPTH = 512  # calls that a rank may be ahead of another one and are still compared
NUMBER = 0x1FFFF
_SLOT_SHIFT, _THREAD_SHIFT, _OPERATION_SHIFT, _MEANING_SHIFT = 17, 29, 32, 48
_OF_THREAD, _HAS_THREADS, _IS_GUARDED = 1 << 29, 1 << 30, 1 << 31
SLOTS = 4096  # descriptions; a model of several hundred modules has one for each operation of each module
_TEXT_BYTES = 256
_REASON_BYTES = 1024
_KINDS = 2  # number of kinds of meanings: objects, and modules of tensor parallel
_CLAIMS = 1024  # objects whose parameters are compared; of two with the same place only the later one
_CLAIM_SHIFT, _SORTED_SHIFT, _ORDERED_SHIFT = 48, 32, 16  # bits of a claim


class CallDifference(NamedTuple):
    """Another rank has posted another call with the same number."""

    rank: int  # the other rank, in the group
    mine: str  # descriptions of the two calls, as they were posted
    theirs: str
    is_operation: bool  # the operations or sizes differ, or the guard compares only one of the two calls
    is_guarded: bool  # the guard compares both calls
    is_meaning: bool  # the calls belong to different objects, and both ranks have the same objects
    has_threads: bool  # two threads of one of the two ranks use the group
    is_thread: bool  # the main thread calls one of the two, and two threads of both ranks use the group


class Ledger:
    """Ledger of one group. Ranks are those of the group.

    Args:
        memory: `count_bytes(size)` bytes shared by the ranks, initially zeros.
        rank, size: in the group.
    """

    def __init__(self, memory: memoryview, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        at_reasons = size * _DEPTH * 8
        at_checksums = at_reasons + size * (8 + _REASON_BYTES)
        at_claims = at_checksums + size * _KINDS * 8
        at_texts = at_claims + size * _CLAIMS * 8
        self.words = memory[:at_reasons].cast("Q")  # (size, _DEPTH)
        self._lengths = memory[at_reasons : at_reasons + size * 8].cast("Q")  # (size,) checksum | length of reasons
        self._reasons = memory[at_reasons + size * 8 : at_checksums]
        self._checksums = memory[at_checksums:at_claims].cast("Q")  # (size, _KINDS)
        self._claims = memory[at_claims:at_texts].cast("Q")  # (size, _CLAIMS)
        # (size, SLOTS + _CLAIMS): descriptions of calls, then of claims.
        self._texts = memory[at_texts : count_bytes(size)]
        self.at = rank * _DEPTH
        beside = {(rank + 1) % size, (rank - 1) % size}  # all words are equal if those of neighbours are
        self.beside = tuple(one * _DEPTH for one in sorted(beside))
        # Entry of calls, and the code that the key refers to by its id.
        self.entries: dict[Any, tuple[int, CodeType | None]] = {}
        self._slot = 0
        self._adding = threading.Lock()

    # ---- calls

    def entry(
        self, text: str, operation: str, meaning: Meaning, *, is_guarded: bool, of_thread: bool, has_threads: bool
    ) -> int:
        """Publish the description of calls. Return the bits of their words without the number.

        Args:
            text: description for the user.
            operation: text that is equal on all ranks.
            meaning: of these calls.
            is_guarded: the guard compares these calls.
            of_thread: another thread than the main thread calls them.
            has_threads: two threads of this rank use the group.
        """
        slot = self._add_text(text)
        if meaning.bits:
            self._checksums[self._rank * _KINDS + meaning.bits % _KINDS] = meaning.checksum
        flags = _IS_GUARDED * is_guarded | _OF_THREAD * of_thread | _HAS_THREADS * has_threads
        return slot << _SLOT_SHIFT | flags | hash_of(operation) << _OPERATION_SHIFT | meaning.bits << _MEANING_SHIFT

    def _add_text(self, text: str) -> int:
        """Publish a description. Return its slot."""
        with self._adding:
            slot = self._slot = (self._slot + 1) % SLOTS
            self._put_text(slot, text)
        return slot

    def _put_text(self, slot: int, text: str) -> None:
        at = (self._rank * (SLOTS + _CLAIMS) + slot) * _TEXT_BYTES
        data = text.encode()[: _TEXT_BYTES - 1]
        self._texts[at + 1 : at + 1 + len(data)] = data
        self._texts[at] = len(data)

    def post(self, number: int, entry: int) -> CallDifference | None:
        """Post a call that is about to start. Return how it differs from the call of a rank that was earlier.

        Args:
            number: of the call in its group.
            entry: from `entry`.
        """
        words, at = self.words, number % _DEPTH
        words[self.at + at] = word = entry | number & NUMBER
        for other in self.beside:
            theirs = words[other + at]
            # Calls of other numbers are not compared: the other rank is behind, or far ahead.
            if (difference := theirs ^ word) >> _THREAD_SHIFT and not difference & NUMBER:
                found = self._difference(word, theirs, other // _DEPTH)
                if found is not None:
                    return found
        return None

    def _difference(self, mine: int, theirs: int, rank: int) -> CallDifference | None:
        of_mine, of_theirs = mine >> _MEANING_SHIFT, theirs >> _MEANING_SHIFT
        difference = mine ^ theirs
        is_operation = bool(difference & (_IS_GUARDED | HASHES << _OPERATION_SHIFT))
        is_thread = bool(difference & _OF_THREAD and mine & theirs & _HAS_THREADS)
        is_meaning = bool(of_mine and of_theirs and of_mine != of_theirs) and all(
            self._has_same_objects(rank, meaning % _KINDS) for meaning in (of_mine, of_theirs)
        )
        if not (is_operation or is_thread or is_meaning):
            return None
        return CallDifference(
            rank=rank,
            mine=self._text(self._rank, mine),
            theirs=self._text(rank, theirs),
            is_operation=is_operation,
            is_guarded=bool(mine & theirs & _IS_GUARDED),
            is_meaning=is_meaning,
            has_threads=bool((mine | theirs) & _HAS_THREADS),
            is_thread=is_thread,
        )

    def _text(self, rank: int, word: int) -> str:
        return self._slot_text(rank, word >> _SLOT_SHIFT & SLOTS - 1)

    def _slot_text(self, rank: int, slot: int) -> str:
        at = (rank * (SLOTS + _CLAIMS) + slot) * _TEXT_BYTES
        return bytes(self._texts[at + 1 : at + 1 + self._texts[at]]).decode(errors="ignore")

    # ---- objects

    def _has_same_objects(self, rank: int, kind: int) -> bool:
        """Return whether a rank has the same objects of a kind as this one."""
        return self._checksums[rank * _KINDS + kind] == self._checksums[self._rank * _KINDS + kind]

    def claim(self, meaning: int, names: Sequence[str], text: str) -> tuple[int, str] | None:
        """Publish the names of an object's parameters, in their order.

        Return another rank that has the same names in another order, with its description; None if there is none.

        Args:
            meaning: bits of the object's meaning.
            names: names of its parameters.
            text: description for the user.
        """
        ordered, any_order = hash_of("\n".join(names)), hash_of("\n".join(sorted(names)))
        word = meaning << _CLAIM_SHIFT | any_order << _SORTED_SHIFT | ordered << _ORDERED_SHIFT
        place = meaning // _KINDS % _CLAIMS
        self._put_text(SLOTS + place, text)
        self._claims[self._rank * _CLAIMS + place] = word
        for rank in range(self._size):
            theirs = self._claims[rank * _CLAIMS + place]
            if theirs >> _SORTED_SHIFT == word >> _SORTED_SHIFT and (theirs ^ word) >> _ORDERED_SHIFT:
                return rank, self._slot_text(rank, SLOTS + place)
        return None

    # ---- the end

    def end(self, reason: str) -> None:
        """Publish the reason why the operations of the group end on all ranks. The first reason stays."""
        if self.reason:
            return
        data = reason.encode()[:_REASON_BYTES]
        at = self._rank * _REASON_BYTES
        self._reasons[at : at + len(data)] = data
        self._lengths[self._rank] = zlib.crc32(data) << 32 | len(data)

    @property
    def reason(self) -> str:
        """Return the reason that a rank has published; "" if there is none."""
        for rank in range(self._size):
            if state := self._lengths[rank]:
                at = rank * _REASON_BYTES
                data = bytes(self._reasons[at : at + (state & 0xFFFFFFFF)])
                if zlib.crc32(data) == state >> 32:
                    return data.decode(errors="ignore")
        return ""


def count_bytes(size: int) -> int:
    """Return the size of the memory for a group of this many ranks. Pages are allocated at first use."""
    return size * (_DEPTH * 8 + 8 + _REASON_BYTES + _KINDS * 8 + _CLAIMS * 8 + (SLOTS + _CLAIMS) * _TEXT_BYTES)
