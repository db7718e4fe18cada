"""Large values between the notebook and a rank. A transfer ends when the rank dies, and at the stop button."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from ddp_notebook.launch.cluster import Cluster
from ddp_notebook.run.cells.interrupt import Interrupts
from ddp_notebook.wire.events import Pulled


class Transfers:
    """Moves pickles in pieces, one at a time.

    Args:
        cluster: the ranks.
        check_rank: raises when this rank cannot answer.
    """

    def __init__(self, cluster: Cluster, check_rank: Callable[[int], None]) -> None:
        self._cluster = cluster
        self._check_rank = check_rank

    def fetch(self, rank: int, answer: Pulled) -> bytes | bytearray:
        """The pickle of an answer, which holds it itself or tells where the rank does.

        Raises:
            SessionBrokenError: the rank died.
            KeyboardInterrupt: the stop button was pressed. The rank has forgotten the transfer.
        """
        if not answer.transfer:
            return answer.pickle
        with self._interruptible(rank) as check:
            return self._cluster.fetch(rank, answer.transfer, answer.nbytes, check)

    def put(self, rank: int, data: bytes) -> int:
        """Put a pickle into a rank. Returns the number of the transfer, for `Push` or `drop`.

        Raises:
            SessionBrokenError, KeyboardInterrupt: as for `fetch`.
        """
        with self._interruptible(rank) as check:
            return self._cluster.put(rank, data, check)

    def drop(self, rank: int, transfer: int) -> None:
        """Let a rank forget what is not wanted any longer. Never waits."""
        self._cluster.drop(rank, transfer)

    def drop_answer(self, rank: int, answer: Future[Pulled]) -> None:
        """Have a rank forget what an answer tells of, once it has come: for one that nobody waits for any more."""
        if transfer := answer.result().transfer:
            self.drop(rank, transfer)

    @contextmanager
    def _interruptible(self, rank: int) -> Iterator[Callable[[], None]]:
        """Yields a check that raises an interrupt between two messages of a transfer. Inside a message, it would leave
        the rest of that message in the socket, for the next transfer."""
        with Interrupts(lambda: None) as interrupts:

            def check() -> None:
                self._check_rank(rank)
                if interrupts.count:
                    raise KeyboardInterrupt

            yield check
        if interrupts.count:  # behind the last piece
            raise KeyboardInterrupt
