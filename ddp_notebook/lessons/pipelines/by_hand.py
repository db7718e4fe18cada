"""A pipeline by hand: one stage per rank, with sends and receives, in any order of forwards and backwards.

Only ranks import this module, so it may import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, SAMPLES = 16, 8  # samples per microbatch


class Stage:
    """The stage of this rank.

    Each message carries a clock, so that the time of the step does not depend on the machine. A forward adds 1 to the
    clock of its rank, and a backward adds 2. A receiver continues at the time of the message if that is later.

    Args:
        microbatches: Number of microbatches.
        duration: Units of time for a forward; a backward takes twice as long.
    """

    def __init__(self, microbatches: int, duration: float) -> None:
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        chance = torch.Generator().manual_seed(0)  # the same numbers on every rank
        self.whole = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(self.last + 1)])
        for parameter in self.whole.parameters():
            nn.init.normal_(parameter, std=WIDTH**-0.5, generator=chance)
        self.inputs = torch.randn(microbatches, SAMPLES, WIDTH, dtype=torch.float64, generator=chance)
        self.layer: Any = self.whole[self.rank]
        self.duration, self.clock, self.most = duration, 0.0, 0
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # input and output of microbatches in flight
        self.sent: list[tuple[Any, torch.Tensor]] = []

    def forward(self, k: int) -> None:
        """Compute the output of microbatch `k`, and send it to the next stage."""
        x = self.inputs[k] if self.rank == 0 else self.receive(k, self.rank - 1).requires_grad_()
        out = torch.tanh(self.layer(x))
        self.clock += self.duration
        self.kept[k] = x, out  # the backward needs them
        self.most = max(self.most, len(self.kept))
        if self.rank < self.last:
            self.send(out.detach(), k, self.rank + 1)

    def backward(self, k: int) -> None:
        """Compute the gradients of microbatch `k`, and send that of the input to the previous stage."""
        x, out = self.kept.pop(k)
        # the loss is half of the sum of squares, so its gradient is the output
        gradient = out.detach() if self.rank == self.last else self.receive(k, self.rank + 1)
        out.backward(gradient)  # type: ignore[no-untyped-call,unused-ignore]
        self.clock += 2 * self.duration
        if self.rank > 0:
            assert x.grad is not None
            self.send(x.grad, k, self.rank - 1)

    def send(self, x: torch.Tensor, k: int, to: int) -> None:
        """Start to send a tensor and the clock. Does not block."""
        message = torch.cat([x.flatten(), torch.tensor([self.clock], dtype=torch.float64)])
        self.sent.append((dist.isend(message, to, tag=k), message))

    def receive(self, k: int, source: int) -> torch.Tensor:
        """Receive a tensor of microbatch `k`. The clock is set to that of the message if it is later."""
        message = torch.zeros(SAMPLES * WIDTH + 1, dtype=torch.float64)
        dist.recv(message, source, tag=k)
        self.clock = max(self.clock, message[-1].item())
        return message[:-1].view(SAMPLES, WIDTH).clone()

    def is_right(self) -> bool:
        """Return whether the gradient equals that of one process with the whole model."""
        if self.layer.weight.grad is None:
            return False
        mine: torch.Tensor = self.layer.weight.grad.clone()
        self.whole.zero_grad()
        x = self.inputs.flatten(0, 1)
        for layer in self.whole.children():
            x = torch.tanh(layer(x))
        (x.square().sum() / 2).backward()  # type: ignore[no-untyped-call,unused-ignore]
        expected = self.layer.weight.grad
        return isinstance(expected, torch.Tensor) and torch.allclose(mine, expected)


def play(order: Sequence[str], microbatches: int, duration: float = 1) -> dict[str, float]:
    """Run a step with the actions of this rank in this order.

    Args:
        order: "F0" is the forward of microbatch 0, "B0" its backward.
        microbatches: Number of microbatches.
        duration: Units of time for a forward of this rank.

    Returns:
        The largest number of microbatches that this rank kept at once, the units of time of the whole step, and 1 if
        the gradient is right.

    Example:
        >>> play([f"F{k}" for k in range(4)] + [f"B{k}" for k in range(4)], microbatches=4)  # doctest: +SKIP
        {'kept at once': 4, 'units of time': 15.0, 'is right': 1.0}
    """
    stage = Stage(microbatches, duration)
    for action in order:
        (stage.forward if action[0] == "F" else stage.backward)(int(action[1:]))
    for work, _ in stage.sent:
        work.wait()
    clock = torch.tensor(stage.clock)
    dist.all_reduce(clock, op=dist.ReduceOp.MAX)
    return {"kept at once": stage.most, "units of time": clock.item(), "is right": float(stage.is_right())}
