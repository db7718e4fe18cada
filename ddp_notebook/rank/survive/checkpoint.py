"""Save and load the state of a loop with `torch.distributed.checkpoint`, for one step that all ranks start with.

Models and optimizers are stored as in torch's checkpoint recipe, so other programs can load them. The individual state
of each rank is stored as additional bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import get_rank, get_world_size
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ddp_notebook.rank.survive.tracked import TrackedObjects
from ddp_notebook.stdlib import pickle
from ddp_notebook.wire import bulk

_STEP = "step-"


class PreemptedError(Exception):
    """The loop has saved its state and ended, because the machine will be taken away soon."""


def save(folder: str, step: int, members: TrackedObjects, own: bytes) -> str:
    """Save the state from before a step. Call it on all ranks.

    Args:
        folder: target folder; "" if another rank passes the folder.
        step: number of the step.
        members: tracked objects.
        own: state of this rank, from `members.own`.

    Returns:
        The folder of this step.

    Raises:
        Exception: any error of torch; a CheckpointException if a rank cannot write.
    """
    folders = [""] * get_world_size()
    dist.all_gather_object(folders, folder)
    path = str(Path(max(folders)) / f"{_STEP}{step}")
    state = _shared(members)
    data = bulk.dumps((members.buckets.known, own))
    state[f"own.{get_rank()}"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    state_dict_saver.save(state, checkpoint_id=path)
    return path


def newest(folder: str) -> Path | None:
    """Return the folder of the last completely saved step; None if there is none.

    Example:
        >>> newest("/nowhere")
    """
    whole = [one.parent for one in Path(folder).glob(f"{_STEP}*/.metadata")]  # written last
    return max(whole, key=step_of, default=None)


def step_of(path: Path) -> int:
    """Return the step with which ranks continue."""
    return int(path.name.removeprefix(_STEP))


def load(path: Path, members: TrackedObjects) -> int:
    """Load a saved state. Call it on all ranks.

    Returns:
        The number of ranks that saved it. Only if the number is the same now, the individual state of this rank is
        restored.
    """
    state = _shared(members)
    state_dict_loader.load(state, checkpoint_id=path)
    set_state_dict(
        _root(members.modules),
        members.optimizers,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    members.forget_gradients()
    known = FileSystemReader(path).read_metadata().state_dict_metadata
    ranks = sum(name.startswith("own.") for name in known)
    if ranks == get_world_size():
        name = f"own.{get_rank()}"
        told: Any = known[name]
        data = torch.empty(told.size, dtype=torch.uint8)
        state_dict_loader.load({name: data}, checkpoint_id=path)
        buckets, own = pickle.loads(data.numpy().tobytes())
        members.buckets.make(buckets)
        members.take_own(own, step_of(path))
    return ranks


def _shared(members: TrackedObjects) -> dict[str, Any]:
    model, optimizer = get_state_dict(_root(members.modules), members.optimizers)
    return {"model": model, "optimizer": optimizer}


def _root(modules: Sequence[torch.nn.Module]) -> torch.nn.Module:
    """Return one module that contains all modules, for the names of parameters."""
    return modules[0] if len(modules) == 1 else torch.nn.ModuleList(modules)
