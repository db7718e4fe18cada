"""Why a call has failed that its callee could not answer, in words: torch says `EOF`, or numbers of agents."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from ddp_notebook.rank.record.remote import Sent
from ddp_notebook.rank.rpc.agent import Worker

# what agents say of a connection that has ended
_CUT = re.compile(r"^(EOF: end of file|E[A-Z]{3,}: |connection reset|.*\btensorpipe/)", re.DOTALL)
_UNKNOWN = re.compile(r"could not find destination id (\d+)|unknown destination worker (\d+)|No worker with id (\d+)")


class Losses:
    """Workers that have ended.

    Args:
        call_of: tells the call that a future answers.
    """

    def __init__(self, call_of: Callable[[Any], Sent | None]) -> None:
        self._call_of = call_of
        self._known: dict[str, Worker] = {}  # every one that there was, by its agent's name
        self._now: dict[int, str] = {}  # its agent, by rank in the session
        self._cut: set[str] = set()  # agents whose connection has ended

    def learn(self, workers: Iterable[Worker]) -> None:
        """These are there."""
        for one in workers:
            self._known[one.agent], self._now[one.here] = one, one.agent

    def is_lost(self, agent: str) -> bool:
        """Whether the process has ended, as far as is known."""
        known = self._known.get(agent)
        return agent in self._cut or (known is not None and self._now[known.here] != agent)

    def of_reference(self, agent: str) -> str:
        """What is said of a reference to a value there."""
        return (
            f"the value of this reference was on {self._words(agent)}, a process that has ended, and is lost with it: "
            "make it again with rpc.remote"
        )

    def of_call(self, function: str, agent: str) -> str:
        """What is said of a call."""
        return (
            f"{self._words(agent)} has ended before it answered {function}: %ddp_heal brings a rank back that died, "
            "then call rpc.init_rpc again; references to what was there are lost"
        )

    def explain(self, future: Any, error: RuntimeError) -> RuntimeError | None:
        """What to raise in place of torch's error; None: that."""
        text = str(error)
        if (found := _UNKNOWN.search(text)) is not None:
            number = int(next(filter(None, found.groups())))
            agent = next((one.agent for one in self._known.values() if one.number == number), None)
            return None if agent is None else RuntimeError(self.of_reference(agent))
        call = self._call_of(future)
        return None if call is None else self.explain_call(call, error)

    def explain_call(self, call: Sent, error: BaseException) -> RuntimeError | None:
        """The same for a call that has failed as it was sent: torch raises what it knows of its callee by then."""
        if not (isinstance(error, RuntimeError) and _CUT.match(str(error))):
            return None
        self._cut.add(call.agent)
        return RuntimeError(self.of_call(call.function, call.agent))

    def is_cut(self, error: RuntimeError, agent: str) -> bool:
        """Whether this error says that the process has ended."""
        if _CUT.match(str(error)):
            self._cut.add(agent)
        return agent in self._cut

    def _words(self, agent: str) -> str:
        known = self._known.get(agent)
        return agent if known is None else f"{known.name} (rank {known.here})"
