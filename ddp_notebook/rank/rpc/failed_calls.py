"""Why a call has failed that its callee could not answer, in words: torch says `EOF`, or numbers of agents."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ddp_notebook.rank.cell.exceptions import words
from ddp_notebook.rank.remote_calls import Sent
from ddp_notebook.rank.rpc.agent import Worker
from ddp_notebook.rank.rpc.workers import words_of
from ddp_notebook.stdlib import re

# what agents say of a connection that has ended
_CUT = re.compile(r"^(EOF: end of file|E[A-Z]{3,}: |connection reset|.*\btensorpipe/)", re.DOTALL)
_REFUSED = "ECONNREFUSED"
_ON_NODE = re.compile(r"(?<=Error on Node )\d+")  # torch's number for a worker that has failed
_UNKNOWN = re.compile(r"could not find destination id (\d+)|unknown destination worker (\d+)|No worker with id (\d+)")


class LostWorkers:
    """Workers that have ended.

    Args:
        call_of: tells the call that a future answers.
    """

    def __init__(self, call_of: Callable[[Any], Sent | None]) -> None:
        self._call_of = call_of
        self._known: dict[int, Worker] = {}  # each worker of every `init_rpc`, by the number of its process
        self._now: dict[int, int] = {}  # numbers of the processes that have the ranks of the session
        self._cut: set[int] = set()  # numbers of processes whose connection has ended

    def learn(self, workers: Iterable[Worker]) -> None:
        """Remember the workers of an `init_rpc`."""
        for one in workers:
            self._known[one.number], self._now[one.here] = one, one.number

    def find(self, number: int) -> Worker | None:
        """The worker of this number, as the last `init_rpc` with it knew it; None if there was none."""
        return self._known.get(number)

    def is_lost(self, number: int) -> bool:
        """Whether the process has ended, as far as is known."""
        known = self._known.get(number)
        return number in self._cut or (known is not None and self._now[known.here] != number)

    def of_reference(self, number: int) -> str:
        """The message for a reference to a value there."""
        return (
            f"the value of this reference was on {self._words(number)}, a process that has ended, and is lost with it: "
            "make it again with rpc.remote"
        )

    def of_call(self, function: str, number: int) -> str:
        """The message for a call."""
        return (
            f"{self._words(number)} has ended before it answered {function}: %ddp_heal brings a rank back that died, "
            "then call rpc.init_rpc again; references to what was there are lost"
        )

    def of_refused(self, function: str, number: int) -> str:
        """The message for a call whose callee accepts no connection."""
        return (
            f"{self._words(number)} accepts no connection for {function}: it may have ended. %ddp_heal replaces a "
            "rank that died. Or its port received bytes from another program, and RPC in torch stopped listening: "
            "%ddp_restart starts new ranks"
        )

    def explain(self, future: Any, error: RuntimeError) -> RuntimeError | None:
        """What to raise in place of torch's error; None: that."""
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
        """The same for a call that has failed as it was sent: torch raises what it knows of its callee by then."""
        if not (isinstance(error, RuntimeError) and _CUT.match(words(error))):
            return None
        self._cut.add(call.worker)
        message = self.of_refused if _REFUSED in words(error) else self.of_call
        return RuntimeError(message(call.function, call.worker))

    def is_cut(self, error: RuntimeError, number: int) -> bool:
        """Whether this error says that the process has ended."""
        if _CUT.match(words(error)):
            self._cut.add(number)
        return number in self._cut

    def _words(self, number: int) -> str:
        known = self._known.get(number)
        return "a worker of an earlier init_rpc" if known is None else words_of(known)
