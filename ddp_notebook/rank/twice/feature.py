"""Feature of a rank that runs a cell twice from the same state: takes a snapshot, observes, and restores."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import Checked, RunCell
from ddp_notebook.messages.twice_messages import PutBack, TakeSnapshot
from ddp_notebook.rank import reserve
from ddp_notebook.rank.cell.exceptions import with_type
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.hooks import Core, Feature
from ddp_notebook.records import shortages
from ddp_notebook.stdlib import contextlib


class TwiceFeature(Feature):
    """Handlers of `%%ddp_twice` on a rank."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._snapshot: Any = None
        self._running: Any = None  # observation of the running cell
        self._observed: list[Any] = []  # observations of the runs
        self.watches_cells = False

    def questions(self) -> Mapping[type[Message], Callable[[Any], Coroutine[Any, Any, None]]]:
        return {TakeSnapshot: self._take, PutBack: self._put_back}

    def cell_begins(self, cell: RunCell) -> None:
        if self._snapshot is not None:
            from ddp_notebook.rank.twice.observation import Observation

            self._running = Observation()

    def cell_ends(self) -> None:
        if self._running is not None:
            self._running.end()
            self._observed.append(self._running)
            self._running = None

    async def _take(self, message: TakeSnapshot) -> None:
        await self._answer(message.request, self._taken, message)

    async def _put_back(self, message: PutBack) -> None:
        await self._answer(message.request, self._restored, message)

    async def _answer(self, request: int, act: Callable[[Any], dict[str, Any]], message: Message) -> None:
        try:
            facts = unseen(act, message)
        except (Exception, SystemExit) as error:  # from an object of the user, or missing memory
            self.core.send(Checked(request=request, error=with_type(error)))
        else:
            self.core.send(Checked(request=request, facts=facts))

    def _taken(self, message: TakeSnapshot) -> dict[str, Any]:
        from ddp_notebook.rank.twice.reads import names_read
        from ddp_notebook.rank.variables.snapshot import Snapshot

        shell = self.core.shell
        snapshot = Snapshot(shell.user_ns, shell.user_ns_hidden)
        reads = names_read(message.code, shell.user_ns)
        refused = {place: why for place, why in snapshot.left.items() if _root(place) in reads}
        left = {place: why for place, why in snapshot.left.items() if place not in refused}
        if message.copies:
            self._observed.clear()
            snapshot.take()
            self._snapshot = snapshot
            self._watch_cells(True)
        return {"nbytes": snapshot.nbytes, "left": left, "refused": refused, "free": _free()}

    def _restored(self, message: PutBack) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if message.restores and self._snapshot is not None:
            self._snapshot.put_back(resets_models=message.ends)
        if message.ends:
            if not message.restores and len(self._observed) == 2:
                from ddp_notebook.rank.twice.observation import first_difference

                facts = first_difference(*self._observed)
            self._snapshot = None
            self._observed.clear()
            self._watch_cells(False)
        return facts

    def _watch_cells(self, on: bool) -> None:
        self.watches_cells = on
        self.core.update_cell_hooks()


def _root(place: str) -> str:
    """Return the variable of a place: "reader" for "reader.file[0]"."""
    return place.partition(".")[0].partition("[")[0]


def _free() -> dict[str, int]:
    """Return the memory in bytes that a process can still use, without swap, by the name of each limit."""
    found = {}
    with contextlib.suppress(OSError, KeyError, ValueError), open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
        found["memory of the host"] = int(fields["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):
        found |= {what: max(0, left) for left, _, _, what in shortages.memory_limits(reserve.lent_bytes())}
    return found


FEATURE = TwiceFeature
