"""Code on each rank for `lessons.product` and `lessons.mesh`.

Only ranks import this module, so it may import torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PLACEMENTS = {"Replicate()": Replicate(), "Shard(0)": Shard(0), "Shard(1)": Shard(1)}
SAMPLES = 16  # samples per batch
RATE = 0.5

Numbers = list[list[float]]  # the values of a matrix


class ShardedProduct:
    """Two matrices that are distributed over the ranks, and their product.

    Args:
        a, b: Values of the matrices, the same on all ranks.
        of_a, of_b: Placements of the matrices.
        device: Device of this rank.
    """

    def __init__(self, a: Numbers, b: Numbers, of_a: str, of_b: str, device: torch.device) -> None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.c: Any = None  # the product
        self.a, self.b = (
            distribute_tensor(torch.tensor(values, dtype=torch.float64, device=device), mesh, [PLACEMENTS[of]])
            for values, of in ((a, of_a), (b, of_b))
        )

    def multiply(self) -> Numbers:
        """Multiply, and return the part of the product on this rank."""
        self.c = self.a @ self.b
        return local(self.c)

    def put_together(self) -> Numbers:
        """Return the whole product."""
        return _numbers(self.c.full_tensor())


def local(tensor: DTensor) -> Numbers:
    """Return the values of a matrix that this rank holds."""
    return _numbers(tensor.to_local())


def _numbers(tensor: torch.Tensor) -> Numbers:
    values: Numbers = tensor.tolist()
    return values


class Block(nn.Module):
    """Two linear layers; the second one restores the width before the first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class OnMesh:
    """A network of two blocks on a mesh, and the same network in this process alone.

    Args:
        rows, columns: Shape of the mesh.
        way: "HSDP" for shards in a row and copies down the column, or "TP and FSDP" for matrices divided along a row
            whose pieces are sharded down the column.
        width: Size of a vector between the blocks.
        is_by_rank: Each rank has a different batch, even if the mesh requires the same one.
        device: Device of this rank.
    """

    def __init__(self, rows: int, columns: int, way: str, width: int, is_by_rank: bool, device: torch.device) -> None:
        self._make = lambda: _network(width, device)
        self._batch = lambda number: _batch(number, width, device)
        self.model = self._make()
        if way == "HSDP":
            mesh = init_device_mesh(device.type, (rows, columns), mesh_dim_names=("replicate", "shard"))
            self.workers, self.batch = rows * columns, dist.get_rank()
            sharders = mesh
        else:
            mesh = init_device_mesh(device.type, (rows, columns), mesh_dim_names=("data", "tensor"))
            self.workers, self.batch = rows, dist.get_rank() if is_by_rank else mesh["data"].get_local_rank()
            for block in self.model:
                parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            sharders = mesh["data"]
        self.place = tuple(mesh.get_coordinate() or ())
        for block in self.model:
            fully_shard(block, mesh=sharders)
        fully_shard(self.model, mesh=sharders)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.losses: list[float] = []

    def step(self) -> None:
        """Train on this rank's batch."""
        self.losses.append(_step(self.model, self.optimizer, self._batch(self.batch)))

    def told(self) -> dict[str, Any]:
        """Return the state of this rank: its coordinates, its share of the model, its losses, and those of a single
        process.

        `alone` is the first loss of a single process with the same batch. `together` are all its losses with the
        batches of all ranks.
        """
        whole = sum(p.numel() for p in self.model.parameters())
        held = sum(p.to_local().numel() for p in self.model.parameters() if isinstance(p, DTensor))
        alone, together = self._make(), self._make()
        optimizer = torch.optim.SGD(together.parameters(), lr=RATE)
        everything = torch.cat([self._batch(number) for number in range(self.workers)])
        return {
            "place": self.place,
            "held": held / whole,
            "batch": self.batch,
            "losses": self.losses,
            "alone": alone(self._batch(self.batch)).square().mean().item(),
            "together": [_step(together, optimizer, everything) for _ in self.losses],
        }


def _network(width: int, device: torch.device) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the same weights on every rank
        return nn.Sequential(Block(width), Block(width)).double().to(device)


def _batch(number: int, width: int, device: torch.device) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(number)
    return torch.randn(SAMPLES, width, dtype=torch.float64, generator=drawn).to(device)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()
