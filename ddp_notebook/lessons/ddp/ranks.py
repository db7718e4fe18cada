"""What each rank does for `inside_ddp`: one training step in stages that can be stopped between, or several at speed.

Only ranks import this module, so it may import torch. It does without `from __future__ import annotations`, because
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

from ddp_notebook.lessons.ddp.options import Options

if TYPE_CHECKING:  # torch gives it to users as dist.GradBucket, and does not say so to mypy
    from torch._C._distributed_c10d import GradBucket
else:
    GradBucket = dist.GradBucket

BATCH = 256  # images on each rank
SHOWN = 6  # elements of a gradient
LEARNING_RATE = 0.5
_WIDTH = 640
_DDP_OPTIONS = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters")

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class Digits(nn.Module):
    """Four layers for 8x8 images of digits. With `unused`, one more that has no part in the loss."""

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
    """This rank's share of the digits: every so many-th image."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:  # importing scikit-learn takes a second of a core on each rank that does it
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
        options: how it is wrapped and trained.
        make: makes the model; None: `Digits`.
        device: of this rank.
    """

    def __init__(self, options: Options, make: Callable[[], nn.Module] | None, device: torch.device) -> None:
        self.options = options
        self.rank, self.world_size, self.device = dist.get_rank(), dist.get_world_size(), device
        torch.manual_seed(100 + self.rank)  # each rank draws weights of its own, so that what DDP does is seen
        self.network = (Digits(options.unused) if make is None else make()).to(device)
        self.names: dict[torch.Tensor, str] = {one: name for name, one in self.network.named_parameters()}
        self.parameter = options.parameter or list(self.names.values())[-1]
        self.x, self.y = digits(device)
        self.at = 0  # the first image of the next batch

    # ---- one stage at a time

    def construct(self) -> None:
        """Wrap the model: parameters and buffers of rank 0 go to all ranks."""
        self._wrap(self._hold)

    def forward(self) -> float:
        """The loss on this rank's own batch; passes without synchronisation, if there are any, come before."""
        self.optimizer.zero_grad()
        for _ in range(self.options.no_sync):
            with self.ddp.no_sync():
                (self._loss() / self._passes).backward()
        self.loss = self._loss() / self._passes
        return float(self.loss.detach()) * self._passes

    def backward(self) -> dict[str, Any]:
        """Gradients of this rank alone, in buckets that are kept back instead of being sent."""
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
        """A comm hook that sends nothing: the bucket stays as this rank has filled it."""
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
        """Average one bucket over the ranks, as DDP does: divide, then sum."""
        buffer, parameters, gradients = self.held[number]
        before = buffer[:SHOWN].tolist()
        buffer.div_(self.world_size)
        dist.all_reduce(buffer)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is not None and parameter.grad.data_ptr() != gradient.data_ptr():
                parameter.grad.copy_(gradient)
        return {"local": before, "mean": buffer[:SHOWN].tolist(), **self._look()}

    def update(self) -> dict[str, Any]:
        """The optimizer's step, of this rank alone: nothing is sent."""
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
        """Some steps as any script would make them."""
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
        chosen = torch.arange(self.at, self.at + BATCH, device=self.device) % len(self.x)
        self.at += BATCH
        return nn.functional.cross_entropy(self.ddp(self.x[chosen]), self.y[chosen])


def comm_hook(name: str | None, rank: int) -> tuple[Hook | None, Any]:
    """A hook of torch's by its short name, and its state.

    Args:
        rank: of PowerSGD's approximation.

    Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
    """
    if name == "powersgd":
        # It begins further all-reduces when its first is over, in whatever thread notices that. So that all ranks call
        # them in one order it has a group to itself, and `SlowLink`. From its third step on it compresses.
        group = dist.new_group()
        return powerSGD_hook, PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    hooks: dict[str | None, Hook | None] = {
        None: None,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
    }
    return hooks[name], None


class SlowLink:
    """Buckets that go one after the other, over a slower network if a speed is given.

    The slowness is made by waiting: when the ranks' real all-reduce of a bucket is over, its bytes occupy a link of
    that speed. A rank sends and receives 2 (N - 1) / N of a bucket, as in a ring. Waiting takes no core from the
    backward, as a network card would not.

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
        """The hook, with its buckets going along this line."""

        def in_line(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            on_gpu = self._device.type == "cuda"
            outer = torch.futures.Future[torch.Tensor](devices=[self._device] if on_gpu else [])
            inner = None if hook is powerSGD_hook else hook(state, bucket)

            def go() -> None:
                try:
                    before = getattr(state, "total_numel_after_compression", 0)
                    value = (hook(state, bucket) if inner is None else inner).wait()
                    if on_gpu:
                        torch.cuda.current_stream(self._device).synchronize()
                    compressed = getattr(state, "total_numel_after_compression", 0) - before
                    time.sleep(self._share * _sent(hook, bucket.buffer(), compressed) / self._bytes_s)
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
    """Bytes that a hook has all-reduced of a bucket."""
    if hook is powerSGD_hook and compressed:
        return compressed * buffer.element_size()
    is_half = hook in (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)
    return 2 * buffer.numel() if is_half else buffer.nbytes


def _flat(tensor: torch.Tensor) -> list[float]:
    found: list[float] = tensor.flatten()[:SHOWN].tolist()
    return found
