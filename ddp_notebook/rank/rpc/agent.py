"""The RPC agent of this process. There is one, and it lives as long as the process.

Torch starts an agent at each `init_rpc` and ends it at `shutdown`. But what a process knows of remote references is
bound to its first agent, so that they fail after the second `init_rpc` of a process ("RPC is no longer running on this
node"), which a cell that is run again does. So the agent of a rank stays, and `init_rpc` only tells it whom there is.

It is made as one of a group whose members come and go. Torch lets such agents find each other by a store that all of
them share, one after the other. Here each has a store of its own process, and `learn` puts in what others have said of
themselves: nobody has to be there for an agent to start (5 ms on two cores), and a process that was replaced is one
more worker.

An agent's number is the process's in the session. Numbers are never reused: a living agent remembers the broken
connection of a dead one by its number, and would raise its error for every call to a process with the same number.
Agents have the names that the cell gave their workers at first, since torch prints them in its warnings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch._C._distributed_c10d import HashStore
from torch._C._distributed_rpc import (
    TensorPipeAgent,
    WorkerInfo,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
)
from torch.distributed.rpc import TensorPipeRpcBackendOptions, backend_registry

from ddp_notebook.stdlib import functools

_ADDRESS = "addrs/"  # where TensorPipe's agent has the address of a worker
MOST_NUMBERS = 2**15  # torch has them in 16 bits with a sign
_MOST_NAME = 110  # characters; torch takes 127
_WAYS, _ASKED = ("_transports", "_channels"), "_ddp_asked"
_init_options, _INIT = TensorPipeRpcBackendOptions.__init__, "__init__"

Maps = dict[str, dict[torch.device, torch.device]]  # of devices, by the worker at the other end


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What a worker says of itself."""

    name: str  # that the cell has given it
    rank: int  # that too
    here: int  # its rank in the session
    number: int  # number of the process in the session, and of the agent; never reused
    device_count: int
    device_maps: Maps
    devices: list[torch.device]

    @property
    def info(self) -> WorkerInfo:
        """As cells see it."""
        return WorkerInfo(self.name, self.rank)


def note_ways() -> None:
    """Have options keep the transports and channels that they are made with: torch's do not tell them."""

    @functools.wraps(_init_options)
    def __init__(options: TensorPipeRpcBackendOptions, *args: Any, **kwargs: Any) -> None:
        _init_options(options, *args, **kwargs)
        setattr(options, _ASKED, {name: kwargs[name] for name in _WAYS if kwargs.get(name)})

    setattr(TensorPipeRpcBackendOptions, _INIT, __init__)


def _asked_ways(options: TensorPipeRpcBackendOptions) -> dict[str, list[str]]:
    """The transports and channels that they were made with; none where they were left to torch."""
    found: dict[str, list[str]] = getattr(options, _ASKED, {})
    return found


class RpcAgent:
    """The process's agent. It knows nobody yet.

    Args:
        mine: what this process is.
        workers: all that there are.
        options: as `init_rpc` takes them.
        kind: torch's class of agents, or one that inherits it.

    Raises:
        ValueError: device maps that do not fit each other, in torch's words.
    """

    def __init__(
        self,
        mine: Worker,
        workers: Sequence[Worker],
        options: TensorPipeRpcBackendOptions,
        kind: type[TensorPipeAgent] = TensorPipeAgent,
    ) -> None:
        if mine.number >= MOST_NUMBERS:
            raise RuntimeError(
                f"init_rpc: torch numbers RPC workers up to {MOST_NUMBERS - 1}, and this session has had {mine.number} "
                "processes before this one: %ddp_restart starts a session with new numbers"
            )
        back, devices = _devices_of(mine, workers)
        self._known = HashStore()
        self._names = {mine.name: mine.number}  # numbers of the known agents, by name
        self._infos: dict[int, WorkerInfo] = {mine.number: WorkerInfo(mine.name, mine.number)}
        self._threads = options.num_worker_threads
        self._maps = mine.device_maps
        self._ways = _asked_ways(options)
        dist_autograd._init(mine.number)  # type: ignore[attr-defined]
        self._agent = kind(self._known, mine.name, mine.number, None, _with_transports(options, mine), back, devices)
        try:
            _set_and_start_rpc_agent(self._agent)
        except BaseException:
            _reset_current_rpc_agent()  # else the process counts as one in which RPC runs
            raise
        self.number = mine.number
        self.address = self._known.get(_ADDRESS + mine.name).decode()  # where it listens
        self._addresses = {mine.number: self.address}  # addresses of all agents, by number

    @property
    def of_torch(self) -> TensorPipeAgent:
        """Torch's object."""
        return self._agent

    def info_of(self, number: int) -> WorkerInfo:
        """Return the name of the worker with this number in the torch agent."""
        return self._infos[number]

    def adopt(self, mine: Worker, options: TensorPipeRpcBackendOptions) -> list[str]:
        """Take over from options what an agent can change that runs. Returns what it cannot, in words."""
        _set_rpc_timeout(options.rpc_timeout)
        stays = []
        if options.num_worker_threads not in (self._threads, TensorPipeRpcBackendOptions().num_worker_threads):
            stays.append(f"num_worker_threads={self._threads}")
        if _asked_ways(options) not in (self._ways, {}):
            stays.append("transports and channels")
        if mine.device_maps != self._maps:
            stays.append("the device maps")
        return stays

    def learn(self, mine: Worker, workers: Sequence[Worker], addresses: Sequence[str]) -> None:
        """Know these workers, too, from now on.

        Args:
            mine: this process.
            workers: all that there are.
            addresses: where their agents listen, in the same order.
        """
        back, devices = _devices_of(mine, workers)
        for one, address in zip(workers, addresses, strict=True):
            holder = self._names.get(one.name)
            if holder != one.number:
                if holder is not None:
                    self._rename(one.name, holder, devices)
                self._register(one.name, one.number, address, devices, back)

    def _register(self, name: str, number: int, address: str, devices: list[torch.device], back: Maps) -> None:
        """Register a worker in the agent; or one more name of a known worker, for calls from TorchScript."""
        info = WorkerInfo(name, number)
        self._known.set(_ADDRESS + name, address)
        self._agent._update_group_membership(info, devices, back, True)
        self._names[name], self._infos[number], self._addresses[number] = number, info, address

    def _rename(self, name: str, number: int, devices: list[torch.device]) -> None:
        """Free the name of an agent for another one. Torch still looks up its number, for references to its values."""
        del self._names[name]
        self._agent._update_group_membership(WorkerInfo(name, number), devices, {}, False)
        self._register(f"{name[:_MOST_NAME]}:{number}", number, self._addresses[number], devices, {})

    @property
    def calls_under_way(self) -> int:
        """Number of calls that this agent has sent and that have no answer yet. A call that it executes is counted by
        the caller, as long as the caller waits."""
        return int(self._agent.get_debug_info()["agent.client_active_calls"])


def _devices_of(mine: Worker, workers: Sequence[Worker]) -> tuple[Maps, list[torch.device]]:
    """The devices of this process that receive tensors, by the name of the sender; and all devices that it uses."""
    maps = {one.name: one.device_maps for one in workers}
    names = [one.name for one in workers]
    backend_registry._validate_device_maps(
        names, {one.name: one.device_count for one in workers}, maps, {one.name: one.devices for one in workers}
    )
    back = backend_registry._create_reverse_mapping(mine.name, names, maps)
    devices = backend_registry._create_device_list(mine.devices, mine.device_maps, back)
    if devices and torch.cuda.is_available():
        torch.cuda.init()  # before a tensor comes
    return back, devices


def _with_transports(options: TensorPipeRpcBackendOptions, mine: Worker) -> TensorPipeRpcBackendOptions:
    """The options, with a transport that sleeps while no message comes, unless they name others.

    Torch's own choice between processes of a machine is shared memory, at which a thread looks all the time: 21 to 99 %
    of a core of an idle rank, where sockets take 1 %. With nothing beside them sockets have 1.5 to 1.8 times its
    latency (two cores, torch 2.13, `tests/benchmarks/rpc.py`).

    Tensors between processes of a machine do not go through the sockets, but are copied from one to the other by the
    kernel (`cma`), in a thread that sleeps meanwhile. Whether that may be torch finds out for each pair.
    """
    return TensorPipeRpcBackendOptions(
        num_worker_threads=options.num_worker_threads,
        rpc_timeout=options.rpc_timeout,
        init_method=options.init_method,
        device_maps={name: dict(to) for name, to in mine.device_maps.items()},  # type: ignore[arg-type]
        devices=list(mine.devices),
        **{
            "_transports": ["uv"],
            "_channels": None if torch.cuda.is_available() else ["cma", "basic"],
            **_asked_ways(options),
        },
    )
