"""A rank that is slow in one part of its training steps. Runs on the ranks."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

PHASES = ("input", "forward", "backward")
_BATCH = 4
_DELAY_S = 0.05


class _SlowGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(_DELAY_S)
        return gradient


class _Net(nn.Module):
    def __init__(self, phase: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self._phase = phase

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self._phase == "forward":
            time.sleep(_DELAY_S)
        if self._phase == "backward":
            x = _SlowGradient.apply(x)
        return self.second(x)


class _Samples(Dataset[torch.Tensor]):
    def __init__(self, count: int, is_slow: bool) -> None:
        self._count = count
        self._is_slow = is_slow

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: int) -> torch.Tensor:
        if self._is_slow and at % _BATCH == 0:
            time.sleep(_DELAY_S)
        return torch.full((64,), float(at))


def train(phase: str, steps: int = 16) -> None:
    """Run some steps.

    Args:
        phase: One of `PHASES` in which this rank loses 50 ms; "" for none.
    """
    model = DistributedDataParallel(_Net(phase))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for batch in DataLoader(_Samples(_BATCH * steps, phase == "input"), batch_size=_BATCH):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
