"""Code of puzzle 17/small-files on each rank: a sharded matrix, and a trial of a function that saves it.

Only ranks import this module, so it may import torch.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

SIDE = 512


def matrix(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded layer, and its optimizer after one step."""
    torch.manual_seed(seed)
    model = nn.Linear(SIDE, SIDE)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, SIDE)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def tried(save: Callable[[nn.Module, torch.optim.Optimizer, Path], None]) -> dict[str, float]:
    """Save a matrix in a new folder, and load it into another one.

    Args:
        save: Gets the model, the optimizer and the folder.

    Returns:
        The bytes of the largest file, and 1 if every loaded number is right.
    """
    box = [tempfile.mkdtemp(prefix="puzzle-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box, src=0)
    folder = Path(box[0])
    try:
        model, optimizer = matrix(seed=0)
        save(model, optimizer, folder)
        dist.barrier()
        largest = max((file.stat().st_size for file in folder.iterdir()), default=0)
        return {"largest file": largest, "is right": float(_is_loaded(model, optimizer, folder))}
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _is_loaded(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> bool:
    if not (folder / ".metadata").exists():
        return False
    loaded = _state(*matrix(seed=1))
    dcp.load(loaded, checkpoint_id=folder)  # type: ignore[attr-defined,unused-ignore]
    return all(map(torch.equal, _numbers(loaded), _numbers(_state(model, optimizer))))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def _numbers(state: dict[str, Any]) -> list[torch.Tensor]:
    """Return the weight and the two averages of Adam, whole."""
    averages = state["optimizer"]["state"]["weight"]
    found: list[DTensor] = [state["model"]["weight"], averages["exp_avg"], averages["exp_avg_sq"]]
    return [one.full_tensor() for one in found]
