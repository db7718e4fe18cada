"""Error messages for calls whose callee has ended. torch only reports `EOF` or agent numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ddp_notebook.rank.cell.exceptions import words
from ddp_notebook.rank.remote_calls import Sent
from ddp_notebook.rank.rpc.rpc_agent import Worker
from ddp_notebook.rank.rpc.workers import words_of
from ddp_notebook.stdlib import re

# Error texts of agents for a lost connection.
_CUT = re.compile(r"^(EOF: end of file|E[A-Z]{3,}: |connection reset|.*\btensorpipe/)", re.DOTALL)
_REFUSED = "ECONNREFUSED"
_ON_NODE = re.compile(r"(?<=Error on Node )\d+")  # agent number of a failed worker
_UNKNOWN = re.compile(r"could not find destination id (\d+)|unknown destination worker (\d+)|No worker with id (\d+)")


class LostWorkers:
    """Workers that have ended.

    Args:
        call_of: returns the call that a future belongs to.
    """

    def __init__(self, call_of: Callable[[Any], Sent | None]) -> None:
        self._call_of = call_of
        self._known: dict[int, Worker] = {}  # process number -> worker, for every `init_rpc`
        self._now: dict[int, int] = {}  # session rank -> current process number
        self._cut: set[int] = set()  # numbers of processes whose connection was lost

    def learn(self, workers: Iterable[Worker]) -> None:
        """Register the workers of an `init_rpc`."""
        for one in workers:
            self._known[one.number], self._now[one.here] = one, one.number

    def find(self, number: int) -> Worker | None:
        """Return the worker with this number from its last `init_rpc`; None if there is none."""
        return self._known.get(number)

    def is_lost(self, number: int) -> bool:
        """Return whether the process is known to have ended."""
        known = self._known.get(number)
        return number in self._cut or (known is not None and self._now[known.here] != number)

    def of_reference(self, number: int) -> str:
        """Return the error message for a reference to a lost value."""
        return (
            f"the value of this reference is lost, because {self._words(number)} has ended: create it again with "
            "rpc.remote"
        )

    def of_call(self, function: str, number: int) -> str:
        """Return the error message for a call to a worker that has ended."""
        return (
            f"{self._words(number)} ended before it answered {function}: run %ddp_heal to replace a dead rank, "
            "then call rpc.init_rpc again; references to its objects are lost"
        )

    def of_refused(self, function: str, number: int) -> str:
        """Return the error message for a call whose callee rejects connections."""
        return (
            f"{self._words(number)} accepts no connection for {function}: it may have ended. %ddp_heal replaces a "
            "rank that died. Or its port received bytes from another program, and RPC in torch stopped listening: "
            "%ddp_restart starts new ranks"
        )

    def explain(self, future: Any, error: RuntimeError) -> RuntimeError | None:
        """Return the exception to raise instead of an error of torch; None to keep that error."""
        text = words(error)
        if (found := _UNKNOWN.search(text)) is not None:
            number = int(next(filter(None, found.groups())))
            return RuntimeError(self.of_reference(number)) if number in self._known else None
        shown = _ON_NODE.sub(lambda found: str(self._rank(int(found[0]))), text)
        if shown != text:
            return RuntimeError(shown)
        call = self._call_of(future)
        return None if call is None else self.explain_call(call, error)

    def _rank(self, number: int) -> int:
        known = self._known.get(number)
        return number if known is None else known.rank

    def explain_call(self, call: Sent, error: BaseException) -> RuntimeError | None:
        """Return the exception to raise for a failed send; None to keep the error.

        torch raises at the send if it already knows that the callee has failed.
        """
        if not (isinstance(error, RuntimeError) and _CUT.match(words(error))):
            return None
        self._cut.add(call.worker)
        message = self.of_refused if _REFUSED in words(error) else self.of_call
        return RuntimeError(message(call.function, call.worker))

    def is_cut(self, error: RuntimeError, number: int) -> bool:
        """Return whether this error, or an earlier one, shows that the process has ended."""
        if _CUT.match(words(error)):
            self._cut.add(number)
        return number in self._cut

    def _words(self, number: int) -> str:
        known = self._known.get(number)
        return "a worker of an earlier init_rpc" if known is None else words_of(known)
