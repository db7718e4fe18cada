"""Helpers of the recording tests on the ranks: models, training, and torch's measurements of the same run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_TIMERS = (
    "forward_compute_time",
    "forward_compute_time_start",
    "backward_comm_time",
    "backward_comm_time_start",
    "backward_comm_time_end",
)
_MARKS = 20
_MORE = 4  # operations of all threads of gloo, twice


class Small(nn.Sequential):
    """6 MB, which fit one bucket of DDP's default size."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(256, 2000), nn.ReLU(), nn.Linear(2000, 500))


class Deep(nn.Sequential):
    """Four layers of 1 MB."""

    def __init__(self) -> None:
        super().__init__(*[nn.Linear(512, 512) for _ in range(4)])


class Tied(nn.Module):
    """A large parameter that is used twice, in the first and in the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4000, 256)
        self.hidden = nn.Linear(256, 256)
        self.head = nn.Linear(256, 4000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.embedding((x[:, :8].abs() * 100).long())))


class Branching(nn.Module):
    """Uses its branches in alternation, and the rank's own one last."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(512, 512)
        self.branches = nn.ModuleList(nn.Linear(512, 512) for _ in range(2))
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.branches[self.passes % 2](self.trunk(x))


BATCHES = {"Small": (128, 256), "Deep": (128, 512), "Tied": (16, 8), "Branching": (512, 512)}  # a few ms each


def make(kind: str, **options: Any) -> DistributedDataParallel:
    """Return a model in DDP, equal on all ranks, by default in buckets of 1 MB.

    Gradients are views of the buckets, because torch counts copying them back as communication, and it takes a
    considerable share of it.
    """
    torch.manual_seed(0)
    options = {"bucket_cap_mb": 1, "gradient_as_bucket_view": True, **options}
    model = DistributedDataParallel(globals()[kind](), **options)
    model._set_ddp_runtime_logging_sample_rate(1)
    return model


class Witness:
    """torch's measurements of a run."""

    def __init__(self) -> None:
        self.ranges: list[
            tuple[str, int, int]
        ] = []  # ranges of the profiler: name, start and end, in nanoseconds of `time.monotonic_ns`
        self.timers: list[dict[str, int]] = []  # times of DDP's reducer, by step, in nanoseconds of the same clock
        self._profiler: Any = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[Witness]:
        """Measure the operations inside of the block."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            marked_ns = []
            for _ in range(_MARKS):
                marked_ns.append(time.monotonic_ns())
                with torch.profiler.record_function("mark"):
                    pass
            yield self
            until_ns = time.monotonic_ns()
            # A thread of gloo ends its range after the waiting thread has continued. These operations bypass torch's
            # public API, so they are not recorded.
            backend: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
            for _ in range(_MORE):
                backend.barrier().wait()
        events = profiler.events()
        marks = sorted(event.time_range.start for event in events if event.name == "mark")
        # The profiler uses another clock. The mark with the shortest call gives the difference.
        ahead_us = min(theirs - ours / 1000 for theirs, ours in zip(marks, marked_ns, strict=True))
        self.ranges = [
            (event.name, *(round((at - ahead_us) * 1000) for at in (event.time_range.start, event.time_range.end)))
            for event in events
            if event.name.startswith(("gloo:", "FSDP::")) and (event.time_range.start - ahead_us) * 1000 < until_ns
        ]

    def note_timers(self, model: DistributedDataParallel) -> None:
        """Store the timers at the end of a step."""
        model.logger.set_runtime_stats_and_log()  # type: ignore[union-attr]  # a model in DDP has one
        facts, ahead_ns = model._get_ddp_logging_data(), time.time_ns() - time.monotonic_ns()
        self.timers.append({name: facts[name] - ahead_ns * name.endswith(("_start", "_end")) for name in _TIMERS})


def train(
    models: Sequence[DistributedDataParallel],
    steps: int,
    *,
    accumulate: int = 1,
    backwards: int = 1,
    witness: Witness | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Run some steps.

    Args:
        models: Models with a common loss.
        accumulate: Passes of a step; only the last one synchronises.
        backwards: Passes of a step that synchronise.
    """
    optimizer = torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=1e-4)
    batches = [torch.randn(BATCHES[type(model.module).__name__]) for model in models]

    def both_ways() -> None:
        torch.stack(
            [model(batch).square().mean() for model, batch in zip(models, batches, strict=True)]
        ).sum().backward()

    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate - 1):
            with contextlib.ExitStack() as stack:
                for model in models:
                    stack.enter_context(model.no_sync())
                both_ways()
        for _ in range(backwards):
            both_ways()
        if witness is not None:
            witness.note_timers(models[0])
        optimizer.step()
        on_step(step)


class Notes:
    """A comm hook that stores its arguments."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self.buckets: list[list[tuple[int, tuple[str, ...]]]] = [[]]  # by step: bytes and parameters
        model.register_comm_hook(self, _note)

    def next_step(self, _: int) -> None:
        self.buckets.append([])

    def add(self, bucket: Any) -> None:
        names = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
        self.buckets[-1].append((bucket.buffer().nbytes, names))


def _note(notes, bucket):  # torch rejects annotations that are strings
    notes.add(bucket)
    averaged = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(averaged, async_op=True).get_future().then(lambda done: done.value()[0])
