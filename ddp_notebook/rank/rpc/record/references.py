"""Remote references as rows: created, forked to other ranks, received, and deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._C._distributed_rpc import PyRRef
from torch.distributed import rpc
from torch.distributed.rpc.internal import _InternalRPCPickler

from ddp_notebook.rank.record.event_buffer import OFF, EventBuffer
from ddp_notebook.rank.remote_calls import ReferenceEvent, Sent
from ddp_notebook.rank.rpc.record.call_stack import RpcThread, numbered
from ddp_notebook.records.schema import REFERENCE_EVENTS
from ddp_notebook.stdlib import re, time, weakref

if TYPE_CHECKING:
    from ddp_notebook.rank.rpc.rpc_functions import RpcFunctions

_MADE, _FORKED, _TAKEN, _DELETED, _LET_GO = range(len(REFERENCE_EVENTS))
_text = PyRRef.__str__  # contains agent numbers, where programs see ranks
_IDS = re.compile(r"created_on=(\d+), local_id=(\d+)")
_REDUCER, _RECEIVER, _INIT = "_py_rref_reducer", "_py_rref_receiver", "__init__"


class References:
    """Records the references of this rank.

    Args:
        event_buffer: buffer for the rows.
        face: RPC functions of the rank, which know the workers.
        here: current call of each thread.
    """

    def __init__(self, event_buffer: EventBuffer, face: RpcFunctions, here: RpcThread) -> None:
        self._event_buffer, self._face, self._here = event_buffer, face, here
        self._alive: dict[int, weakref.ref[Any]] = {}  # id of a weak reference -> weak reference

    def install(self) -> None:
        """Replace the functions of torch in this process."""
        reduce, receive, init = getattr(_InternalRPCPickler, _REDUCER), PyRRef._deserialize, getattr(rpc.RRef, _INIT)

        def _py_rref_reducer(pickler: Any, reference: PyRRef[Any]) -> Any:
            made = reduce(pickler, reference)
            if self._event_buffer.level != OFF:
                self._forked(made[1][0])
            return made

        def _py_rref_receiver(_: type, data: Any) -> Any:
            reference = receive(data)
            if self._event_buffer.level != OFF:
                self._taken(reference, data)
            return reference

        def __init__(reference: Any, *args: Any, **kwargs: Any) -> None:
            init(reference, *args, **kwargs)
            if self._event_buffer.level != OFF:
                self._own(reference)

        setattr(_InternalRPCPickler, _REDUCER, _py_rref_reducer)
        setattr(_InternalRPCPickler, _RECEIVER, classmethod(_py_rref_receiver))
        setattr(rpc.RRef, _INIT, __init__)
        self._face.on_let_go.append(self._let_go)

    def number(self, reference: PyRRef[Any]) -> int:
        """Return the number of a reference, which is the same on all ranks."""
        return _numbers(reference)[0]

    def made(self, reference: PyRRef[Any], sent: Sent) -> int:
        """Record a reference created by `rpc.remote`. Return its number."""
        number, fork = _numbers(reference)
        self._put(_MADE, number, fork, sent.dst, sent.src, sent.number, time_ns=sent.sent_ns)
        self._watch(reference, number, fork, sent.dst)
        return number

    def _own(self, reference: PyRRef[Any]) -> None:
        number, mine = self.number(reference), self._face.rank
        self._put(_MADE, number, 0, mine, -1, self._here.inside, type(reference.local_value()).__name__)
        self._watch(reference, number, 0, mine)

    def _forked(self, data: Any) -> None:
        number, fork, owner, parent, name = self._read(data)
        self._put(_FORKED, number, fork, owner, parent, self._face.sending.making() or self._here.inside, name)

    def _taken(self, reference: PyRRef[Any], data: Any) -> None:
        number, fork, owner, parent, name = self._read(data)
        if owner == self._face.rank:  # the owner gets its reference back: not a fork
            fork = 0
        self._put(_TAKEN, number, fork, owner, parent, self._here.inside, name)
        self._watch(reference, number, fork, owner)

    def _read(self, data: Any) -> tuple[int, int, int, int, str]:
        owner, made_on, made, forked_on, forked, parent, name = data
        rank_of = self._face.rank_of
        return numbered(made_on, made), numbered(forked_on, forked), rank_of(owner), rank_of(parent), str(name)

    def _watch(self, reference: PyRRef[Any], number: int, fork: int, owner: int) -> None:
        def gone(watching: weakref.ref[Any]) -> None:
            self._alive.pop(id(watching), None)
            if self._event_buffer.level != OFF:
                self._put(_DELETED, number, fork, owner, -1, 0)

        watching = weakref.ref(reference, gone)
        self._alive[id(watching)] = watching

    def _let_go(self) -> None:
        if self._alive and self._event_buffer.level != OFF:
            self._alive.clear()
            self._put(_LET_GO, 0, 0, self._face.rank, -1, 0)

    def _put(
        self,
        event: int,
        number: int,
        fork: int,
        owner: int,
        parent: int,
        call: int,
        name: str = "",
        *,
        time_ns: int | None = None,
    ) -> None:
        time_ns = time.monotonic_ns() if time_ns is None else time_ns
        self._event_buffer.put(
            ReferenceEvent(event, number, fork, owner, parent, call, name, self._event_buffer.moment, time_ns)
        )


def _numbers(reference: PyRRef[Any]) -> tuple[int, int]:
    """Return the numbers of a reference and of its fork. The fork is 0 for the owner's reference."""
    found = [numbered(int(worker), int(count)) for worker, count in _IDS.findall(_text(reference))]
    return (found[0], found[1]) if len(found) > 1 else (found[0] if found else 0, 0)
