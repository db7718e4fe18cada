"""Hold the time limits of operations while a debugger waits for a command.

gloo and NCCL cannot extend the timeout of an operation that has begun. So while a cell may stop in a debugger, its
operations begin with a timeout of a day. A thread ends those that have reached the timeout of their group. Its clock
stands still while a debugger waits. No timeout of a group is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistStoreError, distributed_c10d
from torch.utils.data import _utils, dataloader

from ddp_notebook.messages.ranks import Form, RunCell
from ddp_notebook.rank.group.calls import LONG, Call, timeout_of
from ddp_notebook.rank.group.cpp_log import quiet
from ddp_notebook.rank.group.held_time import CLOCK
from ddp_notebook.rank.group.network import Network
from ddp_notebook.rank.group.waiting import waits_for_workers
from ddp_notebook.records.words import list_ranks
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import functools, threading, time

_LONG_MS = int(LONG.total_seconds() * 1000)
_LOOK_S = 0.05
_MONITORED = "monitored_barrier"
_LATER_S = 0.1  # a wait at a board in memory reports the limit itself, and first
_END_S = 2.0  # time in which an ended operation is ended again
_ENDS_S = 0.02  # interval of that
_MOST_NAMED = 5
_LEAST_S = 0.001  # a wait of 0 s would have no limit


class LongTimeouts:
    """Long timeouts of operations, and their own limits. See `recorder.Lengthen`.

    Args:
        network: the groups of this rank.
        place: returns the place of this rank; None before it has one.
        look: called every 50 ms in a thread, while operations begin with long timeouts.
    """

    def __init__(self, network: Network, place: Callable[[], Form | None], look: Callable[[], None]) -> None:
        self._network = network
        self._place = place
        self._look = look
        self._missing: Collection[int] | None = None  # ranks outside the debugged cell; None: no such cell runs
        self._meeting: set[int] = set()  # barriers whose ranks meet at the store, by id
        self._lengthened: dict[int, Call] = {}  # operations in progress that began with a long timeout, by id
        self._waits: dict[int, tuple[Call, int, float]] = {}  # messages, starts of their waits and limits, by id
        self._late = ""  # sentence about the operation that has reached its limit
        self._is_on = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def late(self) -> str:
        """A sentence about the operation that has reached its limit in this cell; "" if none has."""
        return self._late

    def begin_cell(self, cell: RunCell) -> None:
        """Begin for a cell in which a debugger may stop ranks. All its ranks do so."""
        self.begin()
        self._missing = cell.missing

    def begin(self) -> None:
        """Let operations begin with long timeouts from now on."""
        self._late = ""
        if self._is_on.is_set():
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ddp-timeouts", daemon=True)
            self._thread.start()
        self._is_on.set()
        self._network.recorder.lengthen = self
        self._network.recorder.hold_boards(True)

    def end(self) -> None:
        """Let operations begin with their own timeouts again."""
        self._is_on.clear()
        self._missing = None
        self._network.recorder.lengthen = None
        self._network.recorder.hold_boards(False)
        self._waits.clear()

    def unheld(self) -> list[str]:
        """Describe the operations in progress whose timeout is not held. Callable from any thread."""
        found = []
        waiting = list(self._network.recorder.waiting.values())
        for call in self._network.recorder.operations():
            is_held = id(call) in self._lengthened and not self._waits_for_group(call)
            # gloo applies the limit of a message when the wait for it begins
            begins_later = call.kernel.spec.kind != "collective" and all(call is not one for one in waiting)
            if is_held or begins_later or self._is_at_memory(call) or id(call) in self._meeting:
                continue
            limit_s = self._limit_s(call)
            words = f"{call.kernel.spec.name} #{call.number} of group {call.group.title}"
            found.append(words if limit_s is None else f"{words} ({limit_s:g} s)")
        found += [f"TCPStore, which waits for {what}" for what in waits_for_workers()]
        return found[:_MOST_NAMED]

    # ---- `recorder.Lengthen`

    def arguments(self, call: Call, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._meets(call) and (place := self._place()) is not None:
            self._meet(call, place)
        if call.kernel.spec.kind == "collective" and _is_on_gloo(call):
            longer = call.kernel.with_limit(arguments, _LONG_MS)
            if longer is not None:
                self._lengthened[id(call)] = call
                return longer
        return arguments

    def timeout(self, call: Call, timeout: timedelta | None) -> timedelta | None:
        if timeout is None or call.kernel.spec.kind == "collective" or not _is_on_gloo(call):
            return timeout
        self._lengthened[id(call)] = call
        self._waits[id(call)] = call, time.monotonic_ns(), timeout.total_seconds()
        return LONG

    def error(self) -> BaseException | None:
        return RuntimeError(self._late) if self._late else None

    # ---- the thread

    def _run(self) -> None:
        while True:
            self._is_on.wait()
            time.sleep(_LOOK_S)
            try:
                recorder = self._network.recorder
                _keep(self._lengthened, recorder.live)
                _keep(self._waits, recorder.live)
                if self._is_on.is_set() and (late := next(self._reached(), None)) is not None:
                    self._end(*late)
                self._look()
            except RuntimeError:  # a group was destroyed in the meantime
                pass

    def _reached(self) -> Iterator[tuple[Call, float]]:
        for call, since_ns, limit_s in list(self._waits.values()):
            if not CLOCK.left_s(limit_s, since_ns):
                yield call, limit_s
        for call in list(self._lengthened.values()):
            if call.kernel.spec.kind != "collective" or call.is_done:
                continue
            later_s = _LATER_S if self._is_at_memory(call) else 0.0
            limit = self._limit_s(call)
            if limit is not None and not CLOCK.left_s(limit + later_s, call.since_ns):
                yield call, limit

    def _meets(self, call: Call) -> bool:
        """Return whether the ranks of a call meet at the store. All ranks of its group return the same."""
        if call.kernel.spec.name != _MONITORED or self._missing is None:
            return False
        return set(call.group.ranks).isdisjoint(self._missing)

    def _meet(self, call: Call, place: Form) -> None:
        """Let the ranks of a `monitored_barrier` meet at the store, before gloo lets them meet.

        In gloo, all ranks except the first one of the group wait with the timeout that the group had at its start. It
        cannot be changed. At the store, a debugger holds their limit.

        Raises:
            RuntimeError: ranks are missing at the limit.
        """
        group = call.group.reference()
        is_first = group is None or group.rank() == 0  # not None: the arguments of the call hold it
        first, *others = call.group.ranks
        prefix = f"{_MONITORED}/{place.epoch}/{call.group.name}/{call.number}"
        store = PrefixStore(prefix, distributed_c10d._get_default_store())
        limit_s = self._limit_s(call, is_first=is_first) or 0.0
        awaited, missing = {rank: str(rank) for rank in others} if is_first else {first: "all"}, []
        self._meeting.add(id(call))
        try:
            store.set(str(first if group is None else call.group.ranks[group.rank()]), "")
            for rank, key in awaited.items():
                left_s = max(_LEAST_S, CLOCK.left_s(limit_s, call.since_ns))
                try:
                    store.wait([key], timedelta(seconds=left_s))
                except DistStoreError:
                    missing.append(rank)
            if missing:  # the other ranks only know that the first one, or a rank that it waits for, is missing
                for_ranks = f" for {list_ranks(missing)}" if is_first else ""
                raise RuntimeError(self._sentence(call, limit_s, for_ranks))
            if is_first:
                store.set("all", "")
        finally:
            self._meeting.discard(id(call))

    def _sentence(self, call: Call, limit_s: float, for_ranks: str = "") -> str:
        place = self._place()
        return (
            f"Timed out after {limit_s:g} s: rank {0 if place is None else place.rank} waited{for_ranks} in "
            f"{call.kernel.spec.name} #{call.number} of group {call.group.title}"
        )

    def _end(self, call: Call, limit_s: float) -> None:
        """End an operation that has reached its limit, like gloo, which closes the connections of the group."""
        network = self._network
        self._late = self._sentence(call, limit_s)
        until = time.monotonic() + _END_S
        with quiet():
            while id(call) in network.recorder.live and not call.is_done and time.monotonic() < until:
                network.release.cut_groups()
                time.sleep(_ENDS_S)
        self._lengthened.pop(id(call), None)
        self._waits.pop(id(call), None)

    def _is_at_memory(self, call: Call) -> bool:
        """Return whether an operation may wait at a board in memory, whose limit is always held."""
        board = call.group.board
        return board is not None and board.messages is not None and call.work is None and bool(call.kernel.returns)

    def _waits_for_group(self, call: Call) -> bool:
        """Return whether gloo waits with the timeout of the group, whatever the arguments of the call are.

        All ranks except the first one of the group wait so in `monitored_barrier`, unless they have met before.
        """
        group = call.group.reference()
        return call.kernel.spec.name == _MONITORED and not self._meets(call) and group is not None and group.rank() != 0

    def _limit_s(self, call: Call, *, is_first: bool = True) -> float | None:
        if is_first and (own := call.kernel.limit_of(call.rest or call.arguments[call.kernel.at_rest :])) is not None:
            return own
        group = call.group.reference()
        return None if group is None else timeout_of(group).total_seconds()


def hold_loaders() -> None:
    """Let a debugger hold the `timeout` of each DataLoader with worker processes."""
    loader = dataloader._MultiProcessingDataLoaderIter
    get = loader._try_get_data

    @functools.wraps(get)
    def _try_get_data(iterator: Any, timeout: float = _utils.MP_STATUS_CHECK_INTERVAL) -> tuple[bool, Any]:
        left_s, began_ns = timeout, time.monotonic_ns()
        while True:
            found: tuple[bool, Any] = get(iterator, left_s)
            left_s = CLOCK.left_s(timeout, began_ns)
            if found[0] or not left_s:
                return found

    loader._try_get_data = _try_get_data  # type: ignore[method-assign]


def _keep(of_calls: dict[int, Any], ids: Container[int]) -> None:
    """Remove other calls than these. Other threads add calls in the meantime."""
    for key in [key for key in list(of_calls) if key not in ids]:
        of_calls.pop(key, None)


def _is_on_gloo(call: Call) -> bool:
    return bool(call.is_on_cpu())
