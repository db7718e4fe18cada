"""Transfer data between the notebook and a rank: in a message, in shared memory, or in pieces on the wire.

A transfer ends when the rank dies or stop is pressed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ddp_notebook.errors import DDPNotebookError
from ddp_notebook.launch.cluster import Cluster
from ddp_notebook.messages.ranks import Pulled, Push, Pushed
from ddp_notebook.run.cells.interrupt import Interrupts, uninterrupted
from ddp_notebook.run.rank_requests import Questions
from ddp_notebook.wire.bulk import INLINE_BYTES
from ddp_notebook.wire.shared_memory import SealedMemory, new_name, open_at


class Transfers:
    """Transfers data, one transfer at a time.

    Args:
        cluster: the ranks.
        questions: sends requests to the ranks.
        check_rank: raises an error if this rank cannot answer.
    """

    def __init__(self, cluster: Cluster, questions: Questions, check_rank: Callable[[int], None]) -> None:
        self._cluster = cluster
        self._questions = questions
        self._check_rank = check_rank
        self.memory_name = new_name()  # name of the ranks' shared memory for this notebook

    def fetch(self, rank: int, answer: Pulled) -> bytearray | memoryview:
        """Return the data of an answer, which is in the answer itself, in shared memory, or still on the rank.

        Raises:
            SessionBrokenError: the rank died.
            DDPNotebookError: the rank sent invalid data, or the notebook has not enough memory.
            KeyboardInterrupt: stop was pressed. The rank has dropped the data.
        """
        if not answer.transfer:
            return bytearray(answer.data)
        if (mapped := open_at(answer.memory, self.memory_name, answer.nbytes)) is not None:
            self.drop(rank, answer.transfer)
            return mapped
        try:
            with self._interruptible(rank) as check:
                return self._cluster.fetch(rank, answer.transfer, answer.nbytes, check)
        except MemoryError as error:
            self.drop(rank, answer.transfer)
            raise DDPNotebookError(f"rank {rank}: the notebook could not allocate {answer.nbytes:,} bytes") from error
        except ConnectionAbortedError:
            raise
        except ConnectionError as error:
            raise DDPNotebookError(f"rank {rank}: {error}") from error

    def push(
        self,
        outgoing: Mapping[int, PushedData],
        *,
        of_rank: int = -1,
        check: Callable[[], None] = lambda: None,
    ) -> dict[int, Pushed]:
        """Set variables on ranks, and wait for their answers. Data goes through shared memory if possible, else over
        the wire.

        Args:
            outgoing: data by rank.
            of_rank: see `Push`.
            check: see `Questions.wait_for`.

        Raises:
            SessionBrokenError, KeyboardInterrupt: as for `fetch`.
        """
        with uninterrupted():
            asked = {rank: self._ask(rank, one.message(of_rank)) for rank, one in outgoing.items()}
        answers: dict[int, Pushed] = {rank: self._questions.wait_for(rank, one, check) for rank, one in asked.items()}
        transfers: dict[int, int] = {}
        try:
            for rank in [rank for rank, answer in answers.items() if answer.lacks_memory]:
                with self._interruptible(rank) as check_rank:
                    transfers[rank] = self._cluster.put(rank, outgoing[rank].whole, check_rank)
            with uninterrupted():
                again = {
                    rank: self._ask(rank, Push(request=0, transfer=transfer, of_rank=of_rank))
                    for rank, transfer in transfers.items()
                }
            return answers | {rank: self._questions.wait_for(rank, one, check) for rank, one in again.items()}
        except BaseException:
            for rank, transfer in transfers.items():
                self.drop(rank, transfer)
            raise

    def _ask(self, rank: int, message: Push) -> Future[Pushed]:
        return self._questions.ask(rank, lambda number: replace(message, request=number))

    def drop(self, rank: int, transfer: int) -> None:
        """Let a rank drop the data of a transfer. Returns immediately."""
        self._cluster.drop(rank, transfer)

    def drop_answer(self, rank: int, answer: Future[Pulled]) -> None:
        """Let a rank drop the data of an answer that is no longer needed, after the answer has arrived."""
        if transfer := answer.result().transfer:
            self.drop(rank, transfer)

    @contextmanager
    def _interruptible(self, rank: int) -> Iterator[Callable[[], None]]:
        """Yield a check that raises an interrupt between two messages of a transfer.

        An interrupt inside a message would leave the rest of that message in the socket, for the next transfer.
        """
        with Interrupts(lambda: None) as interrupts:

            def check() -> None:
                self._check_rank(rank)
                if interrupts.count:
                    raise KeyboardInterrupt

            yield check
        if interrupts.count:  # after the last piece
            raise KeyboardInterrupt


class PushedData:
    """Data for ranks, written once for all of them.

    Args:
        chunks: the data, in order.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.whole: bytes | SealedMemory
        nbytes = sum(map(len, chunks))
        try:
            self.whole = b"".join(chunks) if nbytes <= INLINE_BYTES else SealedMemory(new_name(), chunks)
        except OSError:  # the system has no shared memory left
            self.whole = b"".join(chunks)

    def message(self, of_rank: int) -> Push:
        """Return the message to a rank, without its number. The rank answers a message without data with a request for
        it.
        """
        if isinstance(self.whole, SealedMemory):
            return Push(request=0, memory=self.whole.place, nbytes=len(self.whole), of_rank=of_rank)
        if len(self.whole) <= INLINE_BYTES:
            return Push(request=0, data=self.whole, of_rank=of_rank)
        return Push(request=0, of_rank=of_rank)

    def close(self) -> None:
        """Free the memory. Ranks that have mapped it keep it."""
        if isinstance(self.whole, SealedMemory):
            self.whole.close()
