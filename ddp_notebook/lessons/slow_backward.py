"""An identity whose backward pass sleeps: it simulates computation without CPU time.

Only ranks import this module, so it may import torch.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class SlowBackward(torch.autograd.Function):
    """Returns its input. Its backward pass sleeps for the given seconds.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> SlowBackward.apply(x, 0.01).sum().backward()  # takes 10 ms
        >>> x.grad
        tensor([1., 1.])
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None
