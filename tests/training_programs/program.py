"""A program of a table, with a random place for its fault."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

# Advice that was once given from the symptom alone. A program that deserves it names it in its cause.
FALSE_ADVICE = (r"\bJoin\b", r"wrap the model in")

# Names that each program finds. `batch` returns other data on each rank and in each step.
PRELUDE = """
import contextlib, copy, gc, os, tempfile, threading, time
import torch.nn as nn, torch.nn.functional as F
import torch.distributed.checkpoint as dcp
from concurrent.futures import ThreadPoolExecutor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
def batch(step, size=8):
    draw = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(size, 4, generator=draw), torch.randn(size, 2, generator=draw)
def dataset(size=32):
    draw = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(size, 4, generator=draw), torch.randn(size, 2, generator=draw))
def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)
"""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program.

    Args:
        name: short description, unique in its table.
        source: address of the public report or documentation on which the program is based.
        code: cell for all ranks. `$rank`, `$other`, `$step`, `$layer`, `$part` and the keys of `draws` are replaced.
        cause: patterns of the right cause; one of them must match. Patterns have the same replacements.
        wrong: patterns of wrong causes; none may match.
        draws: other places for the fault: a key, and the values to choose from.
        world_size: number of ranks.
        timeout_s: seconds after which the cell is stopped.
    """

    name: str
    source: str
    code: str
    cause: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    draws: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    world_size: int = 2
    timeout_s: float = 15.0

    def drawn(self, seed: int) -> Program:
        """Return the program with a random place for its fault. The seed and the name determine the place."""
        draw = random.Random(f"{seed} {self.name}")
        rank = draw.randrange(2)
        values = {"rank": str(rank), "other": str(1 - rank), "step": str(draw.randint(1, 3))}
        values |= {"layer": draw.choice(("0", "2")), "part": draw.choice(("weight", "bias"))}
        own = {key: draw.choice(choices) for key, choices in self.draws.items()}

        def put(text: str) -> str:
            return string.Template(string.Template(text).safe_substitute(own)).safe_substitute(values)

        return replace(self, code=put(self.code), cause=tuple(map(put, self.cause)), wrong=tuple(map(put, self.wrong)))


def loop(make: str, step: str, steps: int = 5) -> str:
    """Return a cell that makes a model and trains it.

    Args:
        make: lines before the loop.
        step: lines of a step.
        steps: number of steps.
    """
    body = "\n".join(f"    {line}" for line in step.strip("\n").split("\n"))
    return f"{make.strip()}\nfor step in range({steps}):\n    x, y = batch(step)\n{body}\n"


MAKE = "model = DDP(net()); optimizer = sgd(model)"
STEP = """
optimizer.zero_grad()
loss = F.mse_loss(model(x), y)
loss.backward()
optimizer.step()
"""
