"""A board: where the ranks of a group leave what is to be compared, and read what the others have left."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple, Protocol, TypeVar

from ddp_notebook.rank.group.guard.messages import Messages

MARK_BITS = 32
Ticket = TypeVar("Ticket")


class Compared(NamedTuple):
    """What a rank knows of one call when all ranks have left their mark."""

    is_same: bool  # on all ranks
    all_block: bool  # every rank's caller waits for the operation


class Board(Protocol[Ticket]):
    """Calls are compared in the order in which the ranks post them. Every rank of the group has the board."""

    rank: int  # in the group
    size: int
    messages: Messages | None  # what is sent and received; None: it is not compared

    def post(self, mark: int, blocks: bool) -> Ticket:
        """Leave this rank's mark of its next call, without waiting.

        Args:
            mark: equal where the calls are; below `2**MARK_BITS`.
            blocks: whether the caller waits for the operation.

        Raises:
            RuntimeError: the board was cut.
        """

    def compare(self, ticket: Ticket) -> Compared:
        """Wait until all ranks have left their marks of a call.

        Raises:
            RuntimeError: the board was cut, or the ranks have not come in time.
        """

    def swap(self, ticket: Ticket, note: bytes) -> list[bytes]:
        """Give a note to all ranks and wait for theirs, by rank. All ranks do so, behind `compare`.

        Raises:
            RuntimeError: as `compare`.
        """

    def set_timeout(self, timeout: timedelta) -> None:
        """How long this rank waits for the others from now on."""

    @property
    def is_cut(self) -> bool:
        """Whether some rank has cut it."""

    def spoil(self) -> None:
        """This rank was interrupted while calls were compared, as the others will be: the board is of no use any more.
        Wakes nobody, or they would hear of it before their own interrupt."""

    def cut(self) -> None:
        """End every wait at this board, on the other ranks too; it cannot be used any more. From any thread."""
