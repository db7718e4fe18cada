"""Code on each rank for `lessons.pipeline`: some steps of a model in stages, with sleeps instead of computation.

Only ranks import this module, so it may import torch.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from ddp_notebook.lessons.slow_backward import SlowBackward

WIDTH = 32
SAMPLES = 4  # samples per microbatch
STEPS = 3  # the first step is slower: every stage requests shapes from the previous one
_TOLERANCE = 1e-6


class Layer(nn.Module):
    """A matrix and a tanh. The forward pass and each of its two gradients (input and weight) take `ms`.

    It sleeps for this time, because stages that compute would share the cores of the machine.
    """

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.ms = ms
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.ms / 1e3)
        x, weight = (SlowBackward.apply(one, self.ms / 1e3) for one in (x, self.weight))
        return torch.tanh(x @ weight)


class PipelineStageOnRank(PipelineStage):
    """Pipeline stage that does not send to its own rank.

    In torch 2.11 a stage first sends something to its neighbours. In a V schedule a neighbour can be on the same rank,
    which gloo does not support.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


def train(
    name: str, places: list[int], count: int, microbatches: int, ms: float, device: torch.device
) -> dict[str, Any]:
    """Run `STEPS` steps of a model with `count` layers, one per stage. This rank has the stages `places`.

    Args:
        name: Name of a schedule in `torch.distributed.pipelining.schedules`.
        ms: Time of the forward of a layer.

    Returns:
        The loss, and whether the gradients of this rank's stages equal those of a single process.
    """
    torch.manual_seed(0)
    layers = [Layer(ms).to(device) for _ in range(count)]
    x, target = (torch.randn(SAMPLES * microbatches, WIDTH).to(device) for _ in range(2))
    stages = [PipelineStageOnRank(layers[at], at, count, device) for at in places]
    kind = getattr(schedules, name)
    is_single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(stages[0] if is_single else stages, microbatches, loss_fn=nn.functional.mse_loss)
    losses: list[torch.Tensor] = []
    for _ in range(STEPS):
        for stage in stages:
            stage.submod.zero_grad()
        losses = []
        dist.barrier()
        inputs = (x,) if any(stage.is_first for stage in stages) else ()
        outputs = {"target": target, "losses": losses} if any(stage.is_last for stage in stages) else {}
        schedule.step(*inputs, **outputs)
    own = {at: _gradient(layers[at]).clone() for at in places}
    alone = _alone(layers, x, target)
    return {
        "loss": sum(loss.item() for loss in losses) / microbatches if losses else None,
        "is_same": all(torch.allclose(own[at], alone[at], atol=_TOLERANCE) for at in places),
    }


def _alone(layers: list[Layer], x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of the whole model, computed in this process without sleeps."""
    for layer in layers:
        layer.zero_grad()
        layer.ms = 0.0
        x = layer(x)
    nn.functional.mse_loss(x, target).backward()
    return [_gradient(layer) for layer in layers]


def _gradient(layer: Layer) -> torch.Tensor:
    assert layer.weight.grad is not None
    return layer.weight.grad
