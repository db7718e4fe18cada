"""A loop's state in a folder, by `torch.distributed.checkpoint`: of one step, which all ranks begin with.

Models and optimizers lie there as torch's own recipe has them, so that anything that reads a checkpoint can load them;
beside them what is each rank's own, as bytes.
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
    """A loop has saved its state and ended, since the machine is about to be taken away."""


def save(folder: str, step: int, members: TrackedObjects, own: bytes) -> str:
    """Save what all ranks have before a step. On all of them.

    Args:
        folder: where; "": where another rank says.
        own: what `members` tell of this rank.

    Returns:
        The folder of this step.

    Raises:
        whatever torch raises: CheckpointException where a rank cannot write.
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
    """The last step that was saved there to its end; None: none was.

    Example:
        >>> newest("/nowhere")
    """
    whole = [one.parent for one in Path(folder).glob(f"{_STEP}*/.metadata")]  # written last
    return max(whole, key=step_of, default=None)


def step_of(path: Path) -> int:
    """The step that ranks go on with."""
    return int(path.name.removeprefix(_STEP))


def load(path: Path, members: TrackedObjects) -> int:
    """Take what was saved. On all ranks.

    Returns:
        How many ranks have saved it. If there are as many now, this rank has what was its own.
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
    """One module with all of them, by which parameters have their names."""
    return modules[0] if len(modules) == 1 else torch.nn.ModuleList(modules)
