"""Replacements of torch functions that cells call: `init_rpc`, `shutdown` and the lookup of workers.

`init_rpc` starts the agent of the rank once; later calls only register the current workers. `shutdown` waits for the
calls of all workers and releases the remote references, and the agent stays for the next cell. A forked child of the
rank uses torch's own functions.

Programs see workers by the names and ranks of their `init_rpc`, never by agent number. Numbers are translated in calls
to torch's C++ (`RpcSender`) and in its results (here and in `context_ids`).
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch._C._distributed_rpc import (
    PyRRef,
    RpcBackendOptions,
    TensorPipeAgent,
    WorkerInfo,
    _delete_all_user_and_unforked_owner_rrefs,
    _is_current_rpc_agent_set,
    _set_profiler_node_id,
)
from torch.distributed import rpc
from torch.distributed.rpc import api, backend_registry, internal

from ddp_notebook.messages.ranks import Form
from ddp_notebook.rank.group import waiting
from ddp_notebook.rank.group.arguments import InitArguments
from ddp_notebook.rank.group.stores import connect
from ddp_notebook.rank.patching import replace
from ddp_notebook.rank.remote_calls import NO_RANK, NO_WORKER
from ddp_notebook.rank.rpc.context_ids import ContextIds
from ddp_notebook.rank.rpc.failed_calls import LostWorkers
from ddp_notebook.rank.rpc.functions import CellPickler
from ddp_notebook.rank.rpc.interruptible import elsewhere_if_unseen
from ddp_notebook.rank.rpc.open_calls import INVOKES, RpcCalls
from ddp_notebook.rank.rpc.record.call_stack import numbered
from ddp_notebook.rank.rpc.rpc_agent import RpcAgent, Worker, note_ways
from ddp_notebook.rank.rpc.rref_values import Values
from ddp_notebook.rank.rpc.running import reader, runner
from ddp_notebook.rank.rpc.send_hooks import RpcSender
from ddp_notebook.rank.rpc.serving import Serving
from ddp_notebook.rank.rpc.worker_rendezvous import WorkerRendezvous
from ddp_notebook.rank.rpc.workers import WorkerNames, words_of
from ddp_notebook.stdlib import contextlib, functools, os, re

_TENSORPIPE = "TENSORPIPE"
original_handler = backend_registry._tensorpipe_init_backend_handler


def install_handler(handler: Callable[..., Any]) -> None:
    """Replace the function that creates the TensorPipe agent."""
    replace(original_handler, handler)
    member: Any = backend_registry.BackendType[_TENSORPIPE]
    member._value_ = member.value._replace(init_backend_handler=handler)


def find_backend(backend: Any, options: Any) -> Any:
    """Return the backend that `init_rpc` must use.

    Args:
        backend: argument of `init_rpc`, or None.
        options: argument of `init_rpc`, or None.

    Raises:
        TypeError: an argument has the wrong type.
    """
    if backend is not None and not isinstance(backend, rpc.BackendType | backend_registry.BackendType):
        raise TypeError(f"Argument backend must be a member of BackendType, not {backend!r}")
    if options is not None and not isinstance(options, RpcBackendOptions):
        raise TypeError(
            f"Argument rpc_backend_options must be an instance of RpcBackendOptions, not {type(options).__name__}"
        )
    if backend is not None:
        return backend
    tensorpipe = backend_registry.BackendType[_TENSORPIPE]
    if options is None or isinstance(options, rpc.TensorPipeRpcBackendOptions):
        return tensorpipe
    for candidate in backend_registry.BackendType:
        if isinstance(options, type(backend_registry.construct_rpc_backend_options(candidate))):
            return candidate
    raise TypeError(f"Could not infer backend for options {options}")


def is_tensorpipe(backend: Any) -> bool:
    """Return whether this is the TensorPipe backend."""
    return bool(backend.name == _TENSORPIPE)


_BY_ENVIRONMENT = "env://"
_MOST_LISTED = 4
_MOST_RANK = 65535  # limit of distributed autograd
_AT_ONCE = timedelta(milliseconds=10)
_init_rpc, _shutdown = rpc.init_rpc, rpc.shutdown
_signature = inspect.signature(_init_rpc)
_is_set, _IS_SET, _UDF = _is_current_rpc_agent_set, "_is_current_rpc_agent_set", "PythonUDF"  # not exported
_to_worker_info, _get_worker_info = api._to_worker_info, api.get_worker_info
_owner, _text = PyRRef.owner, PyRRef.__str__
_CREATED_ON = re.compile(r"(?<=created_on=)\d+")
_NO_RPC = "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."


class RpcFunctions:
    """RPC functions of this rank.

    Args:
        place: returns the rank's place in the group, which changes when the group is formed again.
        running: returns number and start of the running cell.
        loss: returns the exception to raise if all ranks are needed and some are dead; None if all are alive.
    """

    def __init__(
        self,
        place: Callable[[], Form | None],
        running: Callable[[], tuple[int, float] | None],
        loss: Callable[[], BaseException | None],
    ) -> None:
        self._place, self._running, self._loss = place, running, loss
        self._pid = os.getpid()
        self._agent: RpcAgent | None = None
        self.names: WorkerNames | None = None  # set between `init_rpc` and `shutdown`
        self._meeting: WorkerRendezvous | None = None
        self._is_leaving = False  # True while `shutdown` waits for calls
        self._since_cell = 0
        self._arguments: InitArguments | None = None
        self._met: Counter[str] = Counter()  # number of `init_rpc` calls, by cell and arguments
        self._targets: dict[str, tuple[int, str, int, WorkerInfo]] = {}  # worker name -> target of a call
        self.calls = RpcCalls(lambda call: self._losses.is_lost(call.worker) or self.serving.is_past(call.cell))
        self._losses = LostWorkers(self.calls.of)
        self.context_ids = ContextIds(lambda: self.names)
        self.serving = Serving(self.calls, lambda: (self._running() or (0, 0.0))[0])
        self.sending = RpcSender(
            self.calls, self.serving, self._target, self.context_ids.of_call, self._losses.explain_call
        )
        self._values = Values(self.calls, self._losses, self._callee, self._myself, self.serving.cell)
        self.on_let_go: list[Callable[[], None]] = []  # called when `shutdown` has released the references of this rank

    def install(self) -> None:
        """Replace the functions of torch in this process."""
        note_ways()
        replace(_init_rpc, _as(_init_rpc, self.init_rpc))
        replace(_shutdown, _as(_shutdown, self.shutdown))
        replace(_get_worker_info, _as(_get_worker_info, self.get_worker_info))
        api._to_worker_info = self._to_worker_info
        setattr(api, _IS_SET, self._is_set)
        CellPickler.running = staticmethod(self._running)
        CellPickler.check = staticmethod(self._values.check)
        CellPickler.is_leaving = staticmethod(lambda: self._is_leaving)
        internal._pickler = CellPickler
        internal._run_function = runner(self._me, self.serving)
        internal.deserialize = reader(internal.deserialize, self._me)
        for name in INVOKES:
            setattr(api, name, self.sending.around(name, getattr(api, name)))
        setattr(api, _UDF, self.sending.udf)
        on = "the workers of its context"
        self.context_ids.install(lambda backward: elsewhere_if_unseen(backward, self.calls, on))
        self._values.install()
        self.sending.on_remote = self._values.follow
        install_handler(self._init_backend)
        face = self

        def owner(reference: PyRRef[Any]) -> WorkerInfo:
            return face._seen(_owner(reference))

        def owner_name(reference: PyRRef[Any]) -> str:
            return face._seen(_owner(reference)).name

        def text(reference: PyRRef[Any]) -> str:
            return _CREATED_ON.sub(lambda found: str(face._rank_shown(int(found[0]))), _text(reference))

        PyRRef.owner, PyRRef.owner_name, PyRRef.__str__ = owner, owner_name, text  # type: ignore[assignment,method-assign]
        waiting.explain, waiting.came_of = self._losses.explain, self.calls.came_of
        waiting.on_waited = self.calls.settle

    # ---- what cells call

    def init_rpc(self, *args: Any, **kwargs: Any) -> None:
        """Initialize RPC like `init_rpc` of torch, but at the session's store instead of the given address."""
        here = self._place()
        if os.getpid() != self._pid or here is None:
            _init_rpc(*args, **kwargs)
            return
        cell = (self._running() or (0, 0.0))[0]
        if self.names is not None and self._since_cell == cell:
            raise RuntimeError(f"RPC is already initialized, as {self.names.mine.name!r}: call rpc.shutdown() first")
        asked = _signature.bind(*args, **kwargs).arguments
        backend = find_backend(asked.get("backend"), asked.get("rpc_backend_options"))
        options = asked.get("rpc_backend_options") or backend_registry.construct_rpc_backend_options(backend)
        name, rank = asked["name"], asked.get("rank", -1)
        world_size = self._check(name, backend, rank, asked.get("world_size"), options) or here.world_size
        rank = int(rank)
        if not 0 <= rank < world_size:
            raise RuntimeError(f"rank must be 0 to {world_size - 1} with {world_size} workers, got {rank}")
        WorkerInfo(name, rank)  # raises for a name that torch rejects
        place = {"name": name, "rank": rank, "world_size": world_size, "rpc_backend_options": options}
        if is_tensorpipe(backend):
            self._init_backend(None, **place)
        else:
            self._init_other(backend, here, **place)

    def _check(self, name: Any, backend: Any, rank: Any, world_size: Any, options: Any) -> int | None:
        """Check the arguments of `init_rpc` in the same order as torch. Return the number of workers, if given.

        Raises:
            Exception: the same errors as torch.
        """
        with contextlib.suppress(AttributeError):  # unknown torch version, as `init_process_group` reports
            self._arguments = self._arguments or InitArguments(self._place)
        if self._arguments is not None:
            self._arguments.check_rendezvous(options.init_method, rank, world_size)
        if not 0 <= rank <= _MOST_RANK:
            raise RuntimeError(f"init_rpc needs a rank from 0 to {_MOST_RANK}, got {rank}: pass rank=rank")
        known = getattr(backend_registry.BackendType, backend.name)  # `register_backend` recreates the members
        rpc._validate_rpc_args(known, HashStore(), name, rank, world_size, options)
        return None if world_size is None else int(world_size)

    def _init_backend(
        self, store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
    ) -> TensorPipeAgent:
        """Register the workers in the agent of the process and return it. Replaces the TensorPipe handler.

        Args:
            store: not used, because workers meet at the session's store.
            name: name of this worker.
            rank: as in `init_rpc`.
            world_size: as in `init_rpc`.
            rpc_backend_options: as in `init_rpc`.
        """
        here, options = self._place(), rpc_backend_options
        if os.getpid() != self._pid or here is None:
            made: TensorPipeAgent = original_handler(store, name, rank, world_size, options)
            return made
        if not isinstance(options, rpc.TensorPipeRpcBackendOptions):
            raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, not {options!r}")
        world_size = world_size or here.world_size
        lost = self._loss if world_size >= here.world_size else _nobody  # otherwise a dead rank may be no worker
        if (loss := lost()) is not None:
            raise loss
        if self._agent is None and _is_set():
            raise RuntimeError("this process has an agent of another backend: call rpc.shutdown() first")
        mine = Worker(
            name=name,
            rank=rank,
            here=here.rank,
            number=here.process,
            device_count=torch.cuda.device_count(),
            device_maps={name: dict(to) for name, to in options.device_maps.items()},
            devices=list(options.devices),
        )
        meeting_name = self._name_of_meeting(options, world_size)
        meeting = WorkerRendezvous(here, meeting_name, rank, world_size, options.rpc_timeout, lost)
        with self.calls.during("init_rpc", f"all {world_size} workers", is_call=False):
            workers: list[Worker] = meeting.exchange(mine)
        names = WorkerNames(mine, workers)
        stays: list[str] = []
        if self._agent is None:
            self._agent = RpcAgent(mine, workers, options, self._kind_of_agent())
            self.calls.number_from(numbered(mine.number, 0))
            self.calls.mine = mine.number
            self.serving.threads = options.num_worker_threads
        else:
            stays = self._agent.adopt(mine, options)
        self._agent.learn(mine, workers, meeting.exchange(self._agent.address))
        self._losses.learn(workers)
        _set_profiler_node_id(rank)
        was_open = self.names is not None
        api._ALL_WORKER_NAMES = {*names.workers}
        self._targets = {
            one.name: (one.number, names.words[one.number], one.here, self._agent.info_of(one.number))
            for one in workers
        }
        self.names, self._meeting, self._since_cell = names, meeting, (self._running() or (0, 0.0))[0]
        meeting.exchange(None)  # no worker is called before it knows all workers
        elsewhere = "" if options.init_method == _BY_ENVIRONMENT else options.init_method
        print(_what_it_did(names, stays, was_open, elsewhere))
        return self._agent.of_torch

    def _init_other(
        self, backend: Any, here: Form, *, name: str, rank: int, world_size: int, rpc_backend_options: Any
    ) -> None:
        """Create the agent of another registered backend, like `init_rpc` of torch."""
        meeting = f"{self._name_of_meeting(rpc_backend_options, world_size)}/{backend.name}"
        made = backend_registry.init_backend(
            backend,
            store=PrefixStore(f"{here.store_prefix}/rpc/{meeting}", connect(here)),
            name=name,
            rank=rank,
            world_size=world_size,
            rpc_backend_options=rpc_backend_options,
        )
        if self._agent is not None and made is self._agent.of_torch:
            return
        if self._agent is not None:
            raise RuntimeError(
                f"{backend.name} created a second agent, but torch supports one agent per process, and this one has "
                "TensorPipe: call %ddp_restart, and use this backend in the first init_rpc"
            )
        torch.distributed.autograd._init(rank)  # type: ignore[attr-defined]
        _set_profiler_node_id(rank)
        api._init_rpc_states(made)

    def shutdown(self, graceful: bool = True, timeout: float = 0) -> None:
        """Shut down like `shutdown` of torch. The agent stays for the next `init_rpc`."""
        if self._agent is None or os.getpid() != self._pid:
            _shutdown(graceful, timeout)
            return
        if self.names is None or self._meeting is None:
            raise RuntimeError(_NO_RPC)
        self._is_leaving = True
        try:
            others = [name for name in self.names.workers if name != self.names.mine.name]
            if graceful:
                with self.calls.during("shutdown", " and ".join(others) or self.names.mine.name, is_call=False):
                    self._leave_together(self._meeting, timeout)
        finally:
            self.names = self._meeting = None
            self._targets = {}
            self._is_leaving = False

    def _leave_together(self, meeting: WorkerRendezvous, timeout: float) -> None:
        meeting.settle(self._calls, timeout)
        _delete_all_user_and_unforked_owner_rrefs(_AT_ONCE)  # all references that can be confirmed are confirmed by now
        for call in self.on_let_go:
            call()
        meeting.settle(self._calls, timeout)

    def get_worker_info(self, worker_name: Any = None) -> WorkerInfo:
        """Return the worker info, like `get_worker_info` of torch."""
        if self._agent is None:
            return _get_worker_info(worker_name)
        return self._initialized().find(worker_name).info

    # ---- who is who, for the recording

    @property
    def rank(self) -> int:
        """Return the rank of this process in the session."""
        here = self._place()
        return -1 if here is None else here.rank

    @property
    def number(self) -> int:
        """Return the number of this process's agent; -1 before the first `init_rpc`."""
        return -1 if self._agent is None else self._agent.number

    def rank_of(self, number: int) -> int:
        """Return the session rank of a worker by its agent number; -1 if unknown."""
        found = None if self.names is None else self.names.by_number.get(number)
        return -1 if found is None else found.here

    def owner_of(self, reference: PyRRef[Any]) -> int:
        """Return the number of the agent that owns the value."""
        return int(_owner(reference).id)

    # ---- what torch calls for them

    def _to_worker_info(self, to: Any) -> WorkerInfo:
        if self._agent is None:
            return _to_worker_info(to)
        if not isinstance(to, (WorkerInfo, str, int)):
            raise ValueError(f"to must be a worker's name, its rank or get_worker_info(...), got {to!r}")
        names = self._initialized()
        return names.infos[names.find(to).name]

    def _target(self, to: WorkerInfo | str) -> tuple[int, str, int, Any]:
        """Return the number of a worker, its description for messages, its rank, and its `WorkerInfo` in the agent."""
        name = to if isinstance(to, str) else to.name
        return self._targets.get(name) or (NO_WORKER, name, NO_RANK, to)

    def _kind_of_agent(self) -> type[TensorPipeAgent]:
        """Return an agent class that names workers as cells do.

        It serves programs that query the agent itself, such as `RemoteModule`.

        A subclass is used because pybind11 aborts the process if methods of torch's own class are replaced and an
        extension inherits from it.
        """
        face = self

        class WorkerInfoAgent(TensorPipeAgent):
            def get_worker_info(self, *to: Any) -> WorkerInfo:
                return face.get_worker_info(*to)

            def get_worker_infos(self) -> list[WorkerInfo]:
                return [one.info for one in face._initialized().workers.values()]

            def _get_device_map(self, to: WorkerInfo) -> dict[torch.device, torch.device]:
                return super()._get_device_map(face._target(face._to_worker_info(to))[-1])

        WorkerInfoAgent.__name__ = WorkerInfoAgent.__qualname__ = TensorPipeAgent.__name__
        return WorkerInfoAgent

    def _is_set(self) -> bool:
        return _is_set() if self._agent is None or os.getpid() != self._pid else self.names is not None

    def _seen(self, info: WorkerInfo) -> WorkerInfo:
        names = self.names
        known = (None if names is None else names.by_number.get(info.id)) or self._losses.find(info.id)
        return info if known is None else known.info

    def _rank_shown(self, number: int) -> int:
        known = (None if self.names is None else self.names.by_number.get(number)) or self._losses.find(number)
        return number if known is None else known.rank

    def _me(self) -> str:
        here = self._place()
        assert here is not None
        return f"rank {here.rank}" if self.names is None else f"{self.names.mine.name} (rank {here.rank})"

    def _myself(self) -> tuple[str, int]:
        """Return the description of this worker, and its rank."""
        here = self._place()
        assert here is not None
        return self._me(), here.rank

    def _initialized(self) -> WorkerNames:
        if self.names is None:
            raise RuntimeError(_NO_RPC)
        return self.names

    def _calls(self) -> tuple[int, int]:
        assert self._agent is not None and self.names is not None
        not_awaited = self.calls.not_awaited(self.names.by_number, self.serving.stopped)
        return self.calls.made, max(0, self._agent.calls_under_way - not_awaited)

    def _callee(self, number: int) -> tuple[str, int]:
        """Return the description and the rank of a worker, by its number."""
        known = self._losses.find(number)
        return (f"worker {number}", NO_RANK) if known is None else (words_of(known), known.here)

    def _name_of_meeting(self, options: Any, world_size: int) -> str:
        """Return the name of the rendezvous, equal for all workers of this `init_rpc`.

        These workers run the same cell, pass the same address and number of workers, and each makes its first, second,
        ... call.
        """
        address = options.init_method
        if address == _BY_ENVIRONMENT:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        here = self._place()
        assert here is not None
        name = f"{here.epoch}.{(self._running() or (0, 0.0))[0]}/{address}/{world_size}"
        self._met[name] += 1
        return f"{name}/{self._met[name]}"


def _as(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap our function with the name, signature and documentation of the original."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    return call


def _nobody() -> None:
    """Return None: no relevant rank is known to be dead."""


def _what_it_did(names: WorkerNames, stays: list[str], was_open: bool, elsewhere: str) -> str:
    workers = sorted(names.workers.values(), key=lambda one: one.rank)
    listed = [one.name for one in workers]
    if len(listed) > _MOST_LISTED:
        listed[1:-1] = ["..."]
    line = f"init_rpc: {len(workers)} worker{'s' * (len(workers) != 1)} ({', '.join(listed)})"
    if was_open:  # the failed cell is run again without its `shutdown`
        line += "; RPC of an earlier cell without rpc.shutdown() has ended"
    if elsewhere:
        line += f"; they use the session's store and not {elsewhere}"
    return f"{line}; {' and '.join(stays)} unchanged until the rank is started again" if stays else line
