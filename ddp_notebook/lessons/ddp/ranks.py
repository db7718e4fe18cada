"""Code on each rank for `inside_ddp`: one training step in separate stages, or several steps at full speed.

Only ranks import this module, so it may import torch. It does not use `from __future__ import annotations`, because
torch inspects the annotations of comm hooks.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.lessons.ddp.inside_options import Options
from ddp_notebook.lessons.slow_backward import SlowBackward

if TYPE_CHECKING:  # torch exports it as dist.GradBucket, but not in its type information
    from torch._C._distributed_c10d import GradBucket
else:
    GradBucket = dist.GradBucket

BATCH = 256  # images on each rank
_SMALL_BATCH = 8  # with simulated compute
SHOWN = 6  # elements of a gradient
LEARNING_RATE = 0.5
_WIDTH = 640
_DDP_OPTIONS = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters")

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class Digits(nn.Module):
    """Four layers for 8x8 images of digits. `unused` adds a layer that does not contribute to the loss."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(64, _WIDTH)
        self.second = nn.Linear(_WIDTH, _WIDTH)
        self.third = nn.Linear(_WIDTH, _WIDTH)
        self.last = nn.Linear(_WIDTH, 10)
        if unused:
            self.unused = nn.Linear(_WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, 64)
        for layer in (self.first, self.second, self.third):
            x = layer(x).relu()  # (B, 640)
        return self.last(x)  # (B, 10)


def digits(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's share of the digits: every N-th image."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:  # importing scikit-learn takes a second of CPU time on each rank that does it
        from sklearn.datasets import load_digits

        box = [load_digits(return_X_y=True)]
    dist.broadcast_object_list(box, src=0)
    images, labels = box[0]
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    x = torch.tensor(images[mine], dtype=torch.float32, device=device) / 16  # (N, 64), from 0 to 1
    return x, torch.tensor(labels[mine], device=device)


class Inside:
    """A model in DDP on this rank, and a training step of it in stages.

    Args:
        options: Options of the model and its training.
        make: Function that creates the model; None for `Digits`.
        device: Device of this rank.
    """

    def __init__(self, options: Options, make: Callable[[], nn.Module] | None, device: torch.device) -> None:
        self.options = options
        self.rank, self.world_size, self.device = dist.get_rank(), dist.get_world_size(), device
        torch.manual_seed(100 + self.rank)  # each rank gets different weights, to make the effect of DDP visible
        self.network = (Digits(options.unused) if make is None else make()).to(device)
        self.names: dict[torch.Tensor, str] = {one: name for name, one in self.network.named_parameters()}
        self.parameter = options.parameter or list(self.names.values())[-1]
        self.x, self.y = digits(device)
        if options.compute_ms is not None:
            simulate_compute(self.network, options.compute_ms / 1000)
        self.at = 0  # first image of the next batch

    # ---- one stage at a time

    def construct(self) -> None:
        """Wrap the model. DDP broadcasts the parameters and buffers of rank 0."""
        self._wrap(self._hold)

    def forward(self) -> float:
        """Return the loss on this rank's batch. Run the passes without synchronisation before, if there are any."""
        self.optimizer.zero_grad()
        for _ in range(self.options.no_sync):
            with self.ddp.no_sync():
                (self._loss() / self._passes).backward()
        self.loss = self._loss() / self._passes
        return float(self.loss.detach()) * self._passes

    def backward(self) -> dict[str, Any]:
        """Compute the gradients of this rank, in buckets that are held back instead of being sent."""
        self.held: list[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]] = []
        self.events: list[tuple[float, str, Any]] = []
        began = time.perf_counter()
        handles = [
            parameter.register_post_accumulate_grad_hook(
                lambda ready: self.events.append((time.perf_counter() - began, "gradient", self.names[ready]))
            )
            for parameter in self.names
            if parameter.requires_grad
        ]
        self._began = began
        self.loss.backward()
        for handle in handles:
            handle.remove()
        return {"events": self.events, "buckets": [self._told(*one) for one in self.held], **self._look()}

    def _hold(self, _: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Hold a bucket back as this rank has filled it. A comm hook that sends nothing."""
        one = bucket.buffer(), list(bucket.parameters()), list(bucket.gradients())
        self.events.append((time.perf_counter() - self._began, "bucket", self._told(*one)))
        self.held.append(one)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[self.device] if self.device.type == "cuda" else []
        )
        done.set_result(bucket.buffer())
        return done

    def _told(self, buffer: torch.Tensor, parameters: list[torch.Tensor], _: Any) -> dict[str, Any]:
        return {"nbytes": buffer.nbytes, "parameters": [self.names[one] for one in parameters]}

    def reduce(self, number: int) -> dict[str, Any]:
        """Average one bucket over the ranks like DDP: divide, then sum."""
        buffer, parameters, gradients = self.held[number]
        before = buffer[:SHOWN].tolist()
        buffer.div_(self.world_size)
        dist.all_reduce(buffer)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is not None and parameter.grad.data_ptr() != gradient.data_ptr():
                parameter.grad.copy_(gradient)
        return {"local": before, "mean": buffer[:SHOWN].tolist(), **self._look()}

    def update(self) -> dict[str, Any]:
        """Run the optimizer step of this rank. It sends nothing."""
        before = self._first_weights()
        self.optimizer.step()
        return {"before": before, "after": self._first_weights()}

    def weights(self) -> dict[str, Any]:
        return {"weights": self._first_weights()}

    def _look(self) -> dict[str, Any]:
        gradient = dict(self.network.named_parameters())[self.parameter].grad
        return {"gradient": [] if gradient is None else _flat(gradient)}

    def _first_weights(self) -> list[float]:
        return _flat(dict(self.network.named_parameters())[self.parameter].detach())

    # ---- at speed

    def train(self, steps: int) -> dict[str, Any]:
        """Run some steps like any training script."""
        line = None
        hook, state = comm_hook(self.options.comm_hook, self.options.powersgd_rank)
        mb_s = self.options.link_mb_s
        if mb_s is not None or hook is powerSGD_hook:
            line = SlowLink(mb_s, self.device)
            hook = line.around(hook or default_hooks.allreduce_hook)
        losses = []
        try:
            self._wrap(hook, state)
            for _ in range(steps):
                losses.append(self.forward())
                self.loss.backward()
                self.optimizer.step()
        finally:
            if line is not None:
                line.close()
            if isinstance(state, PowerSGDState):
                dist.destroy_process_group(state.process_group)
        return {"losses": losses}

    def _wrap(self, hook: Hook | None, state: Any = None) -> None:
        given = {name: getattr(self.options, name) for name in _DDP_OPTIONS}
        ids = [self.device] if self.device.type == "cuda" else None
        self.ddp = DistributedDataParallel(self.network, device_ids=ids, **given)
        if hook is not None:
            self.ddp.register_comm_hook(state, hook)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=LEARNING_RATE)

    @property
    def _passes(self) -> int:
        return self.options.no_sync + 1

    def _loss(self) -> torch.Tensor:
        if self.options.straggler == self.rank:
            time.sleep(self.options.straggler_ms / 1000)
        batch = BATCH if self.options.compute_ms is None else _SMALL_BATCH
        chosen = torch.arange(self.at, self.at + batch, device=self.device) % len(self.x)
        self.at += batch
        return nn.functional.cross_entropy(self.ddp(self.x[chosen]), self.y[chosen])


def simulate_compute(network: nn.Module, backward_s: float) -> None:
    """Let each layer with parameters sleep for its share of a backward before its gradient, and half of it in the
    forward."""
    layers = [one for one in network.modules() if list(one.parameters(recurse=False))]
    share_s = backward_s / len(layers)

    def slow(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        time.sleep(share_s / 2)
        found: torch.Tensor = SlowBackward.apply(output, share_s)
        return found

    for layer in layers:
        layer.register_forward_hook(slow)


def comm_hook(name: str | None, rank: int) -> tuple[Hook | None, Any]:
    """Return a hook of torch by its short name, and its state.

    Args:
        name: "powersgd", "fp16" or "bf16"; None for no hook.
        rank: Rank of the PowerSGD approximation.

    Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
    """
    if name == "powersgd":
        # PowerSGD starts further all-reduces when its first one is done, in the thread that notices this. A separate
        # group and `SlowLink` ensure the same order on all ranks. It compresses from its third step on.
        group = dist.new_group()
        return powerSGD_hook, PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    hooks: dict[str | None, Hook | None] = {
        None: None,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
    }
    return hooks[name], None


class SlowLink:
    """Sends buckets one after the other, over a simulated slower network if a speed is given.

    A bucket is all-reduced for real. It occupies the link for the time of its bytes at this speed, or for the time of
    the real all-reduce if that is longer. A rank sends and receives 2 (N - 1) / N of a bucket, as in a ring. The link
    is simulated by sleeping, which takes no CPU time from the backward pass, like a network card.

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """

    def __init__(self, mb_s: float | None, device: torch.device) -> None:
        self._bytes_s = float("inf") if mb_s is None else mb_s * 1e6
        self._device = device
        self._share = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        self._buckets: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="line of buckets", daemon=True)
        self._thread.start()

    def around(self, hook: Hook) -> Hook:
        """Return the hook with its buckets going through this link."""

        def in_line(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            on_gpu = self._device.type == "cuda"
            outer = torch.futures.Future[torch.Tensor](devices=[self._device] if on_gpu else [])
            inner = None if hook is powerSGD_hook else hook(state, bucket)

            def go() -> None:
                try:
                    began_s = time.perf_counter()
                    before = getattr(state, "total_numel_after_compression", 0)
                    value = (hook(state, bucket) if inner is None else inner).wait()
                    if on_gpu:
                        torch.cuda.current_stream(self._device).synchronize()
                    compressed = getattr(state, "total_numel_after_compression", 0) - before
                    until_s = began_s + self._share * _sent(hook, bucket.buffer(), compressed) / self._bytes_s
                    time.sleep(max(0.0, until_s - time.perf_counter()))
                    outer.set_result(value)
                except Exception as error:
                    outer.set_exception(error)  # type: ignore[arg-type]  # torch's own annotation is that of a value

            self._buckets.put(go)
            return outer

        return in_line

    def close(self) -> None:
        self._buckets.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (go := self._buckets.get()) is not None:
            go()


def _sent(hook: Hook, buffer: torch.Tensor, compressed: int) -> int:
    """Return the bytes of a bucket that a hook has all-reduced."""
    if hook is powerSGD_hook and compressed:
        return compressed * buffer.element_size()
    is_half = hook in (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)
    return 2 * buffer.numel() if is_half else buffer.nbytes


def _flat(tensor: torch.Tensor) -> list[float]:
    found: list[float] = tensor.flatten()[:SHOWN].tolist()
    return found
