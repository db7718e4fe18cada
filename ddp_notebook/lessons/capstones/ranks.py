"""Code on each rank for the capstones that build DDP and FSDP.

Compute and links are simulated by sleeping, which takes no CPU time. So a laptop shows the same overlap as a cluster.
The tensors and the collectives are real. Only ranks import this module, so it may import torch.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook import log
from ddp_notebook.lessons.capstones.plan import Plan
from ddp_notebook.lessons.slow_backward import SlowBackward

WIDTH, LAYERS, BATCH = 128, 8, 16
SHARDED_WIDTH = 120  # weights of the FSDP capstone divide into equal parts for up to six ranks
LAYER_MS = 8.0  # simulated backward of a layer
MB_S, CALL_MS = 10.0, 3.0  # simulated link, and the fixed cost of each call
STEPS = 3


class Transfer:
    """One all-reduce on a `Link`, which may still be under way."""

    def __init__(self, link: "Link") -> None:
        self._link = link
        self._done = threading.Event()
        self._error: Exception | None = None

    def wait(self) -> None:
        """Block until the tensor has the sum of all ranks. The link measures this time."""
        began = time.perf_counter()
        self._done.wait()
        self._link.exposed_s += time.perf_counter() - began
        if self._error is not None:
            raise self._error


class Link:
    """The network of this rank, with a limited speed: one transfer after the other.

    Args:
        mb_s: Megabytes per second.
        call_ms: Milliseconds that each call costs in addition.
    """

    def __init__(self, mb_s: float = MB_S, call_ms: float = CALL_MS) -> None:
        self._bytes_s, self._call_s = mb_s * 1e6, call_ms / 1000
        self.exposed_s = 0.0  # time in `Transfer.wait`
        self.transfers: list[tuple[float, float]] = []  # beginning and end of each, by `time.perf_counter`
        self._queue: queue.SimpleQueue[tuple[torch.Tensor, Transfer] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="simulated link", daemon=True)
        self._thread.start()

    def all_reduce(self, tensor: torch.Tensor) -> Transfer:
        """Start the sum of a contiguous tensor over all ranks, in place. Do not touch the tensor before `wait`."""
        transfer = Transfer(self)
        self._queue.put((tensor.detach(), transfer))
        return transfer

    def transfer_ms(self, nbytes: int) -> float:
        """Return the milliseconds that these bytes occupy the link in a ring: each rank sends 2 (N - 1) / N of them."""
        n = dist.get_world_size()
        return 1000 * nbytes * 2 * (n - 1) / n / self._bytes_s

    def close(self) -> None:
        """End the thread after the transfers that were started."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (next_one := self._queue.get()) is not None:
            tensor, transfer = next_one
            began = time.perf_counter()
            try:
                dist.all_reduce(tensor)
                busy_s = self._call_s + self.transfer_ms(tensor.nbytes) / 1000
                time.sleep(max(0.0, began + busy_s - time.perf_counter()))
                self.transfers.append((began, time.perf_counter()))
            except Exception as error:  # the reader's thread raises it
                transfer._error = error
            transfer._done.set()


class Layer(nn.Linear):
    """A linear layer with a ReLU whose backward takes `LAYER_MS`, as that of a larger layer would."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = SlowBackward.apply(super().forward(x).relu(), LAYER_MS / 1000)
        return out


def network() -> nn.Sequential:
    """Return the network of the capstones, with the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(LAYERS)))


def batch(step: int, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and targets of this rank in a step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(BATCH, width, generator=generator), torch.randn(BATCH, width, generator=generator)


def train_with(make: Callable[[nn.Module, Link], Any]) -> list[torch.Tensor]:
    """Train some steps with the reader's DDP, and return the weights.

    Logs `exposed`: the shortest exposed time of a step, as a multiple of the time that its bytes occupy the link.

    Args:
        make: Class or function that gets the network and the link. Its result has a method `finish`, which is called
            after each backward. After it, every gradient must be the mean over the ranks.
    """
    model, link = network(), Link()
    exposed_ms = []
    try:
        own = make(model, link)
        for step in range(STEPS):
            began_s = link.exposed_s
            _train(model, step, own.finish)
            exposed_ms.append(1000 * (link.exposed_s - began_s))
    finally:
        link.close()
    parameters = [p.detach() for p in model.parameters()]
    log(exposed=min(exposed_ms) / link.transfer_ms(sum(p.nbytes for p in parameters)))
    return parameters


def timeline_of(make: Callable[[nn.Module, Link], Any]) -> dict[str, Any]:
    """Return the times of the shortest step of the reader's DDP, in milliseconds from the beginning of its backward.

    Returns:
        `backward`: its end. `end`: end of the step. `transfers`: beginning and end of each.
    """
    model, link = network(), Link()
    try:
        own = make(model, link)
        steps = [_timed_step(model, link, own, step) for step in range(STEPS)]
    finally:
        link.close()
    return min(steps, key=lambda step: step["end"])


def _timed_step(model: nn.Module, link: Link, own: Any, step: int) -> dict[str, Any]:
    x, y = batch(step)
    model.zero_grad()
    loss = (model(x) - y).square().mean()
    link.transfers.clear()
    began = time.perf_counter()
    loss.backward()
    done = time.perf_counter()
    own.finish()
    end = time.perf_counter()
    return {
        "backward": 1000 * (done - began),
        "end": 1000 * (end - began),
        "transfers": [(1000 * (first - began), 1000 * (last - began)) for first, last in link.transfers],
    }


def train_with_ddp() -> list[torch.Tensor]:
    """Train the same steps with DDP of torch, and return the weights."""
    model = network()
    ddp = DistributedDataParallel(model)
    with _fast():
        for step in range(STEPS):
            _train(ddp, step, lambda: None)
    return [p.detach() for p in model.parameters()]


def _train(model: nn.Module, step: int, finish: Callable[[], object]) -> None:
    x, y = batch(step)
    model.zero_grad()
    (model(x) - y).square().mean().backward()
    finish()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(0.1 * p.grad)


@contextmanager
def _fast() -> Iterator[None]:
    """Run the backward of a `Layer` without its simulated time."""
    global LAYER_MS
    before, LAYER_MS = LAYER_MS, 0.0
    try:
        yield
    finally:
        LAYER_MS = before


# ---- build FSDP


def whole_gradients(weights: list[torch.Tensor], step: int) -> list[torch.Tensor]:
    """Return the gradients of the mean loss of all ranks, computed with whole weights on this rank.

    Args:
        weights: Weight of each layer, (SHARDED_WIDTH, SHARDED_WIDTH).
    """
    leaves = [w.detach().clone().requires_grad_() for w in weights]
    x, y = batch(step, SHARDED_WIDTH)
    for weight in leaves:
        x = (x @ weight.t()).relu()
    gradients = torch.autograd.grad((x - y).square().mean(), leaves)
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return list(gradients)


def stack() -> list[torch.Tensor]:
    """Return the weights of the layers of the FSDP capstone, the same on every rank."""
    torch.manual_seed(0)
    return [torch.randn(SHARDED_WIDTH, SHARDED_WIDTH) * (2 / SHARDED_WIDTH) ** 0.5 for _ in range(LAYERS)]


class GradedFSDP:
    """Runs a step of the reader's FSDP, and compares its gradients.

    Args:
        make: Class that gets the weight of each layer, (SHARDED_WIDTH, SHARDED_WIDTH). Its object has `shards`, one
            tensor per layer with the part of this rank, and `loss(x, y)`.
    """

    def __init__(self, make: Callable[[list[torch.Tensor]], Any]) -> None:
        self.own = make(stack())

    def step(self) -> None:
        """Compute the gradients of one step."""
        for shard in self.own.shards:
            shard.grad = None
        x, y = batch(0, SHARDED_WIDTH)
        self.own.loss(x, y).backward()

    def is_sharded(self) -> bool:
        """Return whether this rank keeps its part of each weight only, without the rest of its memory."""
        part = SHARDED_WIDTH * SHARDED_WIDTH // dist.get_world_size()
        return len(self.own.shards) == LAYERS and all(
            shard.numel() == part and shard.untyped_storage().nbytes() == shard.nbytes for shard in self.own.shards
        )

    def is_right(self) -> bool:
        """Return whether each shard has its part of the mean gradient."""
        size, rank = dist.get_world_size(), dist.get_rank()
        exact = [one.flatten().chunk(size)[rank] for one in whole_gradients(stack(), 0)]
        return all(
            shard.grad is not None and torch.allclose(shard.grad.flatten(), right, atol=1e-6)
            for shard, right in zip(self.own.shards, exact, strict=True)
        )


# ---- plan it


def try_plan(choice: dict[str, Any]) -> bool:
    """Log tokens per second of a plan, and return whether it fits."""
    plan = Plan(**choice)
    log(tokens_per_s=plan.tokens_per_s)
    return plan.fits
