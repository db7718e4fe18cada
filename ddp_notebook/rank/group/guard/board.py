"""Board on which the ranks of a group post the compared data of their calls, and read those of the others."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple, Protocol, TypeVar

from ddp_notebook.rank.group.guard.ledger import Ledger
from ddp_notebook.rank.group.guard.message_comparison import Messages
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

MARK_BITS = 32
Ticket = TypeVar("Ticket")


class Compared(NamedTuple):
    """Result of a comparison, when all ranks have posted their mark of a call."""

    is_same: bool  # the marks of all ranks are equal
    all_block: bool  # the caller waits for the operation on every rank


class Board(Protocol[Ticket]):
    """Interface of boards. Calls are compared in the order in which the ranks post them. Every rank of the group has
    the board."""

    rank: int  # in the group
    size: int
    messages: Messages | None  # compares sends and receives; None if they are not compared
    ledger: Ledger | None  # compares calls of libraries; None if they are not compared

    def post(self, mark: int, blocks: bool) -> Ticket:
        """Post this rank's mark of its next call, without waiting.

        Args:
            mark: hash of the call, below `2**MARK_BITS`. Equal calls have equal marks.
            blocks: the caller waits for the operation.

        Raises:
            RuntimeError: the board was cut.
        """

    def compare(self, ticket: Ticket) -> Compared:
        """Wait until all ranks have posted their marks of a call.

        Raises:
            RuntimeError: the board was cut, or not all ranks posted in time.
        """

    def swap(self, ticket: Ticket, note: bytes) -> list[bytes]:
        """Send a note to all ranks and wait for theirs. Return the notes by rank. All ranks call this after `compare`.

        Raises:
            RuntimeError: as in `compare`.
        """

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long this rank waits for the others from now on."""

    def hold_timeout(self, on: bool) -> None:
        """Let waits that begin from now on last until their caller ends them. `on=False` ends that."""

    @property
    def is_cut(self) -> bool:
        """Return whether some rank has cut the board."""

    def spoil(self) -> None:
        """Mark the board as unusable, since this rank was interrupted during a comparison, as the others will be.

        It wakes no rank: the ranks must notice their own interrupt first.
        """

    def cut(self) -> None:
        """End every wait at this board, on all ranks. It cannot be used any more. Callable from any thread."""
