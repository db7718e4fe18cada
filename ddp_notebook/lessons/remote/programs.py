"""Code of the RPC lessons, as shown to the reader. Only ranks import this module, so it may import torch.

Each rank is `worker{rank}`. The function with the name of a program runs on rank 0.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc


def workers() -> list[str]:
    """Return the names of all workers except rank 0."""
    return [f"worker{rank}" for rank in range(1, dist.get_world_size())]


def play(name: str) -> Any:
    """Run a program with its own `init_rpc`. Return its result on rank 0, and None on other ranks."""
    rpc.init_rpc(f"worker{dist.get_rank()}", rank=dist.get_rank(), world_size=dist.get_world_size())
    try:
        return PROGRAMS[name]() if dist.get_rank() == 0 else None
    finally:
        rpc.shutdown()


# ---- calls


class Agent:
    def select_action(self, state: int) -> int:
        return state % 3


def observe(agent: rpc.RRef[Agent]) -> int:
    state = 0
    for _ in range(2):
        state += 1 + agent.rpc_sync().select_action(state)
    return state


def calls() -> list[int]:
    agent = rpc.RRef(Agent())
    futures = [rpc.rpc_async(to, observe, args=(agent,)) for to in workers()]
    return torch.futures.wait_all(futures)


# ---- rrefs


def numbers() -> torch.Tensor:
    return torch.arange(4.0)


def make_box(owner: str) -> list[rpc.RRef[torch.Tensor]]:
    return [rpc.remote(owner, numbers)]


def rrefs() -> list[float]:
    box = rpc.remote("worker1", make_box, args=(workers()[-1],))
    inner = box.to_here()[0]
    return inner.to_here().tolist()


# ---- batching


lock, waiting = threading.Lock(), list[Any]()


@rpc.functions.async_execution
def add(number: int) -> torch.futures.Future[int]:
    future = torch.futures.Future[int]()
    with lock:
        waiting.append((number, future))
        if len(waiting) == 2 * len(workers()):  # the last one has come
            total = sum(number for number, _ in waiting)
            for _, one in waiting:
                one.set_result(total)
            waiting.clear()
    return future


def bring() -> list[int]:
    futures = []
    for number in (1, 10):
        time.sleep(0.02 * dist.get_rank())
        futures.append(rpc.rpc_async("worker0", add, args=(number,)))
    return torch.futures.wait_all(futures)


def batching() -> list[list[int]]:
    return torch.futures.wait_all([rpc.rpc_async(to, bring) for to in workers()])


# ---- backward

weight = torch.full((3,), 2.0, requires_grad=True)  # each rank has its own


def layer(x: torch.Tensor) -> torch.Tensor:
    return weight * x


def backward() -> list[float]:
    x = torch.ones(3, requires_grad=True)
    with dist_autograd.context() as context:
        y = rpc.rpc_sync("worker1", layer, args=(x,))
        z = rpc.rpc_sync(workers()[-1], layer, args=(y,))
        dist_autograd.backward(context, [z.sum()])  # type: ignore[attr-defined]
        return dist_autograd.get_gradients(context)[x].tolist()  # type: ignore[attr-defined]


# ---- all

PROGRAMS = {one.__name__: one for one in (calls, rrefs, batching, backward)}
