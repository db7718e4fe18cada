"""What cells call, in place of torch's: `init_rpc`, `shutdown`, and the lookups of workers behind every call.

`init_rpc` starts the rank's agent, once, and from then on only says whom there is; `shutdown` waits for the calls of
all and lets go the remote references, and the agent stays for the next cell. In a child that the rank has forked
torch's own are called.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch._C._distributed_rpc import (
    PyRRef,
    TensorPipeAgent,
    WorkerInfo,
    _delete_all_user_and_unforked_owner_rrefs,
    _is_current_rpc_agent_set,
)
from torch.distributed import rpc
from torch.distributed.rpc import api, internal

from ddp_notebook.rank.group import waiting
from ddp_notebook.rank.replacing import replace
from ddp_notebook.rank.rpc.agent import Agent, Worker, note_ways
from ddp_notebook.rank.rpc.calls import INVOKES, Calls
from ddp_notebook.rank.rpc.functions import CellPickler
from ddp_notebook.rank.rpc.losses import Losses
from ddp_notebook.rank.rpc.meeting import Meeting
from ddp_notebook.rank.rpc.naming import Names
from ddp_notebook.rank.rpc.record.here import numbered
from ddp_notebook.rank.rpc.running import reader, runner
from ddp_notebook.rank.rpc.sending import Sending
from ddp_notebook.rank.rpc.serving import Serving
from ddp_notebook.rank.rpc.waiting import elsewhere
from ddp_notebook.stdlib import contextlib, functools, os
from ddp_notebook.wire.events import Form

_BY_ENVIRONMENT = "env://"
_NUMBERS = 128, 256  # of epochs and ranks that have agents with numbers of their own; in all what 15 bits hold
_MOST_LISTED = 4
_MOST_KNOWN = 10_000  # values of this rank
_AT_ONCE = timedelta(milliseconds=10)
_init_rpc, _shutdown = rpc.init_rpc, rpc.shutdown
_signature = inspect.signature(_init_rpc)
_is_set, _IS_SET, _UDF = _is_current_rpc_agent_set, "_is_current_rpc_agent_set", "PythonUDF"  # not exported
_to_worker_info, _get_worker_info = api._to_worker_info, api.get_worker_info
_owner, _to_here, _local_value = PyRRef.owner, PyRRef.to_here, PyRRef.local_value
_agents_info, _agents_infos = TensorPipeAgent.get_worker_info, TensorPipeAgent.get_worker_infos
_device_map = TensorPipeAgent._get_device_map
_BACKWARD = "backward"  # not exported


class Face:
    """RPC of this rank.

    Args:
        place: tells the rank's place, which changes when the group is formed anew.
        running: tells the cell that runs, and since when.
        loss: tells what to raise where all ranks are needed and some have died; None: all are there.
    """

    def __init__(
        self,
        place: Callable[[], Form | None],
        running: Callable[[], tuple[int, float] | None],
        loss: Callable[[], BaseException | None],
    ) -> None:
        self._place, self._running, self._loss = place, running, loss
        self._pid = os.getpid()
        self._agent: Agent | None = None
        self.names: Names | None = None  # between `init_rpc` and `shutdown`
        self._meeting: Meeting | None = None
        self._is_leaving = False  # in `shutdown`, which waits for calls
        self._since_cell = 0
        self._met: Counter[str] = Counter()  # `init_rpc`s of this rank, by cell and what tells them apart
        self.calls = Calls(lambda call: self._losses.is_lost(call.agent) or self.serving.is_past(call.cell))
        self._losses = Losses(self.calls.of)
        self.serving = Serving(self.calls, lambda: (self._running() or (0, 0.0))[0])
        self.sending = Sending(self.calls, self.serving, self._described, self._losses.explain_call)
        self.on_let_go: list[Callable[[], None]] = []  # called when `shutdown` has let go the references of this rank
        self._made: set[str] = set()  # references to values of this rank that are there

    def install(self) -> None:
        """Replace torch's functions in this process."""
        note_ways()
        replace(_init_rpc, _as(_init_rpc, self.init_rpc))
        replace(_shutdown, _as(_shutdown, self.shutdown))
        replace(_get_worker_info, _as(_get_worker_info, self.get_worker_info))
        api._to_worker_info = self._to_worker_info
        setattr(api, _IS_SET, self._is_set)
        CellPickler.running = staticmethod(self._running)
        CellPickler.check = staticmethod(self._check_value)
        CellPickler.is_leaving = staticmethod(lambda: self._is_leaving)
        internal._pickler = CellPickler
        internal._run_function = runner(self._me, self.serving)
        internal.deserialize = reader(internal.deserialize, self._me)
        for name in INVOKES:
            setattr(api, name, self.sending.around(name, getattr(api, name)))
        setattr(api, _UDF, self.sending.udf)
        backward = getattr(dist_autograd, _BACKWARD)
        setattr(dist_autograd, _BACKWARD, elsewhere(backward, self.calls, "the workers of its context"))
        face = self

        def owner(reference: PyRRef[Any]) -> WorkerInfo:
            return face._seen(_owner(reference))

        def owner_name(reference: PyRRef[Any]) -> str:
            return face._seen(_owner(reference)).name

        PyRRef.owner, PyRRef.owner_name = owner, owner_name  # type: ignore[assignment,method-assign]
        PyRRef.to_here, PyRRef.local_value = self._to_here(), self._local_value()  # type: ignore[method-assign]
        waiting.explain, waiting.came_of = self._losses.explain, self.calls.came_of
        waiting.on_waited = self.calls.settle
        self._lie_over_agent()

    # ---- what cells call

    def init_rpc(self, *args: Any, **kwargs: Any) -> None:
        """torch's `init_rpc`, at the session's store, whatever the address that it is given."""
        here = self._place()
        if os.getpid() != self._pid or here is None:
            _init_rpc(*args, **kwargs)
            return
        cell = (self._running() or (0, 0.0))[0]
        if self.names is not None and self._since_cell == cell:
            raise RuntimeError(f"RPC is initialized already, as {self.names.mine.name!r}: call rpc.shutdown() first")
        asked = _signature.bind(*args, **kwargs).arguments
        options = asked.get("rpc_backend_options") or rpc.TensorPipeRpcBackendOptions()
        _check(asked, options)
        rank, world_size = asked.get("rank", -1), asked.get("world_size") or here.world_size
        rank = here.rank if rank == -1 else int(rank)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}, but of {world_size} workers the ranks are 0 to {world_size - 1}")
        lost = self._loss if world_size >= here.world_size else _nobody  # else it may be none of these workers
        if (loss := lost()) is not None:
            raise loss
        agent_name, number = f"rank{here.rank}-{here.epoch}", here.epoch % _NUMBERS[0] * _NUMBERS[1] + here.rank
        mine = Worker(
            name=asked["name"],
            rank=rank,
            here=here.rank,
            agent=self._agent.name if self._agent else agent_name,
            number=self._agent.number if self._agent else number % 2**15,
            device_count=torch.cuda.device_count(),
            device_maps={name: dict(to) for name, to in options.device_maps.items()},
            devices=list(options.devices),
        )
        name = self._name_of_meeting(options, world_size)
        meeting = Meeting(here, name, rank, world_size, options.rpc_timeout, lost)
        with self.calls.during("init_rpc", f"all {world_size} workers", is_call=False):
            workers: list[Worker] = meeting.exchange(mine)
        names = Names(mine, workers)
        stays: list[str] = []
        if self._agent is None:
            self._agent = Agent(mine, workers, options)
            self.calls.number_from(numbered(mine.number, 0))
            self.serving.threads = options.num_worker_threads
        else:
            stays = self._agent.adopt(mine, options)
        self._agent.learn(mine, workers, meeting.exchange(self._agent.address))
        self._losses.learn(workers)
        was_open = self.names is not None
        api._ALL_WORKER_NAMES = {*names.workers}
        self.names, self._meeting, self._since_cell = names, meeting, cell
        meeting.exchange(None)  # nobody is called before it knows whom there is
        print(_what_it_did(names, stays, was_open))

    def shutdown(self, graceful: bool = True, timeout: float = 0) -> None:
        """torch's `shutdown`. The agent stays, and answers to the next `init_rpc`."""
        if self._agent is None or os.getpid() != self._pid:
            _shutdown(graceful, timeout)
            return
        if self.names is None or self._meeting is None:
            raise RuntimeError("RPC has not been initialized. Call torch.distributed.rpc.init_rpc first.")
        self._is_leaving = True
        try:
            others = [name for name in self.names.workers if name != self.names.mine.name]
            if graceful:
                with self.calls.during("shutdown", " and ".join(others) or self.names.mine.name, is_call=False):
                    self._leave_together(self._meeting, timeout)
        finally:
            self.names = self._meeting = None
            self._is_leaving = False

    def _leave_together(self, meeting: Meeting, timeout: float) -> None:
        meeting.settle(self._calls, timeout)
        _delete_all_user_and_unforked_owner_rrefs(_AT_ONCE)  # all are confirmed that ever will be
        for call in self.on_let_go:
            call()
        meeting.settle(self._calls, timeout)

    def get_worker_info(self, worker_name: Any = None) -> WorkerInfo:
        """torch's `get_worker_info`."""
        if self._agent is None:
            return _get_worker_info(worker_name)
        return self._initialized().find(worker_name).info

    # ---- who is who, for the recording

    @property
    def rank(self) -> int:
        """This one's rank in the session."""
        here = self._place()
        return -1 if here is None else here.rank

    @property
    def number(self) -> int:
        """Of this process's agent, which no other process of the session has."""
        return 0 if self._agent is None else self._agent.number

    def rank_of(self, to: WorkerInfo | str | int) -> int:
        """The rank in the session of a worker, by what torch calls it or by the number of its agent; -1: not known."""
        if self.names is None:
            return -1
        if isinstance(to, int):
            found = self.names.by_number(to)
        else:
            name = to if isinstance(to, str) else to.name
            found = self.names.by_agent(name) or self.names.workers.get(name)
        return -1 if found is None else found.here

    # ---- what torch calls for them

    def _to_worker_info(self, to: Any) -> WorkerInfo:
        if self._agent is None:
            return _to_worker_info(to)
        if not isinstance(to, (WorkerInfo, str, int)):
            raise ValueError(f"a worker is named by its name, its rank or get_worker_info(...), not by {to!r}")
        if isinstance(to, WorkerInfo) and self._losses.is_lost(to.name):
            raise RuntimeError(self._losses.of_reference(to.name))
        names = self._initialized()
        return names.infos[names.find(to).agent]

    def _lie_over_agent(self) -> None:
        """Whoever asks the agent itself, as `RemoteModule` does, has workers by the names of cells too."""
        face = self

        def info(agent: TensorPipeAgent, *to: Any) -> WorkerInfo:
            return _agents_info(agent, *to) if face._agent is None else face.get_worker_info(*to)

        def infos(agent: TensorPipeAgent) -> list[WorkerInfo]:
            if face._agent is None:
                return _agents_infos(agent)
            return [one.info for one in face._initialized().workers.values()]

        def device_map(agent: TensorPipeAgent, to: WorkerInfo) -> dict[torch.device, torch.device]:
            return _device_map(agent, face._to_worker_info(to))

        TensorPipeAgent.get_worker_info, TensorPipeAgent.get_worker_infos = info, infos  # type: ignore[method-assign,assignment]
        TensorPipeAgent._get_device_map = device_map  # type: ignore[method-assign,assignment]

    def _is_set(self) -> bool:
        return _is_set() if self._agent is None or os.getpid() != self._pid else self.names is not None

    def _seen(self, info: WorkerInfo) -> WorkerInfo:
        return info if self.names is None else self.names.of_agent(info)

    def _me(self) -> str:
        here = self._place()
        assert here is not None
        return f"rank {here.rank}" if self.names is None else f"{self.names.mine.name} (rank {here.rank})"

    def _initialized(self) -> Names:
        if self.names is None:
            raise RuntimeError("RPC has not been initialized. Call torch.distributed.rpc.init_rpc first.")
        return self.names

    def _to_here(self) -> Callable[..., Any]:
        def to_here(reference: PyRRef[Any], *args: Any, **kwargs: Any) -> Any:
            """torch's `to_here`, which waits in C++ where no stop reaches it: a thread that can be stopped waits in
            Python for the value to exist before, and for its copy only then."""
            owner = _owner(reference)
            self._check_value(reference)
            if reference.is_owner():
                return self._value_here(_to_here, reference, *args, **kwargs)
            with self.calls.during("to_here", self._described(owner.name)):
                try:
                    if waiting.can_end():
                        kind: object = reference._get_type(blocking=False)  # type: ignore[call-arg]
                        if isinstance(kind, torch._C.Future):  # else it is known already
                            with contextlib.suppress(Exception):  # the value's own error: raised below as what it is
                                kind.wait()
                    return _to_here(reference, *args, **kwargs)
                except RuntimeError as error:
                    if self._losses.is_cut(error, owner.name):
                        raise RuntimeError(self._losses.of_reference(owner.name)) from None
                    raise

        return to_here

    def _check_value(self, reference: PyRRef[Any]) -> None:
        """Raise in words if the value is lost."""
        if self._losses.is_lost(name := _owner(reference).name):
            raise RuntimeError(self._losses.of_reference(name))

    def _value_here(self, fetch: Callable[..., Any], reference: PyRRef[Any], *args: Any, **kwargs: Any) -> Any:
        """A value of this rank's own. Until it is made torch waits for it in C++."""
        name = str(reference)
        if name in self._made or not waiting.can_end():
            return fetch(reference, *args, **kwargs)
        value = elsewhere(fetch, self.calls, self._me())(reference, *args, **kwargs)
        if len(self._made) > _MOST_KNOWN:
            self._made.clear()
        self._made.add(name)
        return value

    def _local_value(self) -> Callable[..., Any]:
        def local_value(reference: PyRRef[Any]) -> Any:
            """torch's `local_value`, which tells where the value is if not here."""
            self._check_value(reference)
            if not reference.is_owner():
                where = self._described(_owner(reference).name)
                raise RuntimeError(f"the value of this reference is on {where}: copy it with to_here()")
            return self._value_here(_local_value, reference)

        return local_value

    def _calls(self) -> tuple[int, int]:
        assert self._agent is not None and self.names is not None
        not_awaited = self.calls.not_awaited(self.names.agents, self.serving.stopped) + self.serving.not_awaited()
        return self.calls.made, self._agent.calls_under_way - not_awaited

    def _described(self, agent: str) -> str:
        """A worker, as its agent is known, in words."""
        return agent if self.names is None else self.names.words.get(agent, agent)

    def _name_of_meeting(self, options: rpc.TensorPipeRpcBackendOptions, world_size: int) -> str:
        """The same for all that this `init_rpc` is to bring together: those of one cell that name one address and one
        number of workers, each at its first, second, ... call."""
        address = options.init_method
        if address == _BY_ENVIRONMENT:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        here = self._place()
        assert here is not None
        name = f"{here.epoch}.{(self._running() or (0, 0.0))[0]}/{address}/{world_size}"
        self._met[name] += 1
        return f"{name}/{self._met[name]}"


def _as(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Ours, with the name, the signature and the documentation of torch's."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    return call


def _nobody() -> None:
    """Of the ranks that matter none has died, as far as is known."""


def _check(asked: dict[str, Any], options: Any) -> None:
    """Raise what torch's `init_rpc` does for arguments of other kinds."""
    backend = asked.get("backend")
    if backend is not None and not isinstance(backend, rpc.BackendType):
        raise TypeError(f"backend is a member of rpc.BackendType, not {backend!r}")
    if not isinstance(options, rpc.TensorPipeRpcBackendOptions):
        raise TypeError(f"rpc_backend_options are TensorPipeRpcBackendOptions, not {type(options).__name__}")
    if not isinstance(asked["name"], str):
        raise TypeError(f"a worker's name is text, not {asked['name']!r}")


def _what_it_did(names: Names, stays: list[str], was_open: bool) -> str:
    workers = sorted(names.workers.values(), key=lambda one: one.rank)
    listed = [one.name for one in workers]
    if len(listed) > _MOST_LISTED:
        listed[1:-1] = ["..."]
    line = f"init_rpc: {len(workers)} worker{'s' * (len(workers) != 1)} ({', '.join(listed)})"
    if was_open:  # a cell that failed before its `shutdown` is run again
        line += "; what an earlier cell has not shut down is over"
    return f"{line}; {' and '.join(stays)} as before, until the rank is started again" if stays else line
