"""RPC agent of this process: one agent, which lives as long as the process.

torch starts an agent at each `init_rpc` and stops it at `shutdown`. But remote references of a process belong to its
first agent. They fail after a second `init_rpc` ("RPC is no longer running on this node"), which happens when a cell is
run again. So the agent of a rank stays, and `init_rpc` only registers the current workers.

The agent is created as a member of a group that workers may join and leave. In torch such agents find each other
through a shared store, one after the other. Here each agent has a store within its process, and `learn` adds the
addresses of other workers. So an agent starts without waiting for others (5 ms on two cores), and a replacement process
is one more worker.

The agent number is the number of the process in the session, which is never reused. A running agent remembers the
broken connection of a dead agent by its number. It would raise an error for each call to a new process with the same
number. torch prints agent names in warnings, so an agent has the name of its worker in the first `init_rpc`.
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

_ADDRESS = "addrs/"  # key prefix under which the TensorPipe agent stores the address of a worker
MOST_NUMBERS = 2**15  # torch stores agent numbers as signed 16-bit integers
_MOST_NAME = 110  # characters; the limit of torch is 127
_WAYS, _ASKED = ("_transports", "_channels"), "_ddp_asked"
_init_options, _INIT = TensorPipeRpcBackendOptions.__init__, "__init__"

Maps = dict[str, dict[torch.device, torch.device]]  # device maps by the worker at the other end


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """Description of a worker, exchanged in `init_rpc`."""

    name: str  # name that the cell assigned
    rank: int  # RPC rank that the cell assigned
    here: int  # rank in the session
    number: int  # number of the process in the session, and of the agent; never reused
    device_count: int
    device_maps: Maps
    devices: list[torch.device]

    @property
    def info(self) -> WorkerInfo:
        """Return the worker as cells see it."""
        return WorkerInfo(self.name, self.rank)


def note_ways() -> None:
    """Make `TensorPipeRpcBackendOptions` remember its transports and channels, because torch does not expose them."""

    @functools.wraps(_init_options)
    def __init__(options: TensorPipeRpcBackendOptions, *args: Any, **kwargs: Any) -> None:
        _init_options(options, *args, **kwargs)
        setattr(options, _ASKED, {name: kwargs[name] for name in _WAYS if kwargs.get(name)})

    setattr(TensorPipeRpcBackendOptions, _INIT, __init__)


def _asked_ways(options: TensorPipeRpcBackendOptions) -> dict[str, list[str]]:
    """Return the transports and channels that the program selected; empty for those left to torch."""
    found: dict[str, list[str]] = getattr(options, _ASKED, {})
    return found


class RpcAgent:
    """RPC agent of the process. At first it knows only its own worker.

    Args:
        mine: worker of this process.
        workers: all workers.
        options: options of `init_rpc`.
        kind: agent class, `TensorPipeAgent` or a subclass.

    Raises:
        ValueError: inconsistent device maps, with torch's message.
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
                f"init_rpc: the ids of RPC workers must be at most {MOST_NUMBERS - 1}, and this session has started "
                f"{mine.number} processes before: %ddp_restart resets the ids"
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
            _reset_current_rpc_agent()  # otherwise RPC counts as running in this process
            raise
        self.number = mine.number
        self.address = self._known.get(_ADDRESS + mine.name).decode()  # address on which the agent listens
        self._addresses = {mine.number: self.address}  # addresses of all agents, by number

    @property
    def of_torch(self) -> TensorPipeAgent:
        """Return the agent object of torch."""
        return self._agent

    def info_of(self, number: int) -> WorkerInfo:
        """Return the `WorkerInfo` of the worker with this agent number."""
        return self._infos[number]

    def adopt(self, mine: Worker, options: TensorPipeRpcBackendOptions) -> list[str]:
        """Apply the options that a running agent can change. Return descriptions of those that it cannot change."""
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
        """Register workers in the agent.

        Args:
            mine: worker of this process.
            workers: all workers.
            addresses: addresses of their agents, in the same order.
        """
        back, devices = _devices_of(mine, workers)
        for one, address in zip(workers, addresses, strict=True):
            holder = self._names.get(one.name)
            if holder != one.number:
                if holder is not None:
                    self._rename(one.name, holder, devices)
                self._register(one.name, one.number, address, devices, back)

    def _register(self, name: str, number: int, address: str, devices: list[torch.device], back: Maps) -> None:
        """Register a worker, or an additional name of a known worker, which calls from TorchScript need."""
        info = WorkerInfo(name, number)
        self._known.set(_ADDRESS + name, address)
        self._agent._update_group_membership(info, devices, back, True)
        self._names[name], self._infos[number], self._addresses[number] = number, info, address

    def _rename(self, name: str, number: int, devices: list[torch.device]) -> None:
        """Release the name of an agent for another one.

        torch still looks up the number, for references to its values.
        """
        del self._names[name]
        self._agent._update_group_membership(WorkerInfo(name, number), devices, {}, False)
        self._register(f"{name[:_MOST_NAME]}:{number}", number, self._addresses[number], devices, {})

    @property
    def calls_under_way(self) -> int:
        """Return the number of calls that this agent has sent and that have no answer yet.

        A call that this agent executes is counted by its caller, as long as the caller waits.
        """
        return int(self._agent.get_debug_info()["agent.client_active_calls"])


def _devices_of(mine: Worker, workers: Sequence[Worker]) -> tuple[Maps, list[torch.device]]:
    """Return the device maps for received tensors by sender, and all devices that this process uses."""
    maps = {one.name: one.device_maps for one in workers}
    names = [one.name for one in workers]
    backend_registry._validate_device_maps(
        names, {one.name: one.device_count for one in workers}, maps, {one.name: one.devices for one in workers}
    )
    back = backend_registry._create_reverse_mapping(mine.name, names, maps)
    devices = backend_registry._create_device_list(mine.devices, mine.device_maps, back)
    if devices and torch.cuda.is_available():
        torch.cuda.init()  # before the first tensor arrives
    return back, devices


def _with_transports(options: TensorPipeRpcBackendOptions, mine: Worker) -> TensorPipeRpcBackendOptions:
    """Return the options with a transport that sleeps while idle, unless the program has selected others.

    For processes of one machine torch selects shared memory, which a thread polls: an idle rank uses 21 to 99 % of a
    core, with sockets 1 %. Sockets have 1.5 to 1.8 times the latency (two cores, torch 2.13,
    `tests/benchmarks/rpc.py`).

    Tensors between processes of one machine do not use the sockets. The kernel copies them directly (`cma`), in a
    thread that sleeps during the copy. torch checks for each pair of processes whether this is possible.
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
