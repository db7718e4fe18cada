"""DDP and FSDP models: reset an incomplete forward or backward after an aborted cell."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.cell.current_line import OURS
from ddp_notebook.rank.cell.exceptions import with_type
from ddp_notebook.rank.group.cpp_log import quiet
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, functools, gc, weakref


class Models:
    """DDP and FSDP models of this process, from `watch` on."""

    def __init__(self) -> None:
        self._fsdp1: weakref.WeakSet[FullyShardedDataParallel] = weakref.WeakSet()
        self._ddp: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._left: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # unusable; the user was notified

    def watch(self) -> None:
        """Register models when they are made."""
        for kind in (DistributedDataParallel, FullyShardedDataParallel):
            module: Any = sys.modules[kind.__module__]
            module.warnings = _Warnings(module.warnings)
        _remember(DistributedDataParallel, "__init__", self._ddp)
        _remember(DistributedDataParallel, "__setstate__", self._ddp)
        _remember(FullyShardedDataParallel, "__init__", self._fsdp1)

    @property
    def exist(self) -> bool:
        """Return whether any model exists: its forward or backward may be incomplete."""
        return bool(self._ddp or self._fsdp1 or FSDPModule.__subclasses__())

    def kind_of(self, optimizer: torch.optim.Optimizer | None) -> str:
        """Return how an optimizer's parameters are distributed.

        Returns "ddp" for a DDP model, "sharded" if a rank has only parts of the parameters, and "" if neither is known.
        """
        if optimizer is None:
            return ""
        with contextlib.suppress(RuntimeError):  # another thread may be making a model
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            if any(map(_is_sharded, parameters)):
                return "sharded"
            in_ddp = {id(one) for model in list(self._ddp) for one in model.parameters()}
            return "ddp" if any(id(one) in in_ddp for one in parameters) else ""
        return ""

    def leave(self, default: ProcessGroup, *, is_of_session: bool) -> list[str]:
        """Prepare the models for a new default group, since the current one ends.

        Models in the default group move to the new one at the next `reset`, if the group was the session's. (In another
        group the ranks may never have had the same parameters.)

        Returns:
            Notes for the user: models of other groups, which end too.
        """
        others = 0
        for model in list(self._ddp):
            if model.process_group is default and is_of_session:
                model.process_group = None  # type: ignore[assignment]  # until `reset`
            elif model.process_group is not None and not _is_destroyed(model.process_group):
                others += 1
                self._left.add(model)
        if not others:
            return []
        which = "a model" if others == 1 else f"{others} models"
        return [f"{which} in DDP with a separate process_group cannot continue: create the group and wrap it again"]

    def reset(self, *, make_reducers: bool) -> list[str]:
        """Let all models forget an incomplete forward or backward.

        Args:
            make_reducers: some rank is new, so all ranks need new reducers.

        Returns:
            Notes for the user: unusable models.
        """
        notes = []
        for model in list(self._ddp - self._left):
            try:
                _reset(model, make_reducer=make_reducers)
            except Exception as error:  # an error of one model must not affect the others and the group
                notes.append(f"a model in DDP cannot continue, wrap it again: {with_type(error)}")
        sharded = _sharded_modules()
        if sharded and not hasattr(FSDPModule, "reset_iter_state"):
            notes.append(
                f"torch {torch.__version__} cannot reset a model of fully_shard after an aborted step (2.13 can): "
                "shard such models again on all ranks"
            )
        else:
            for module in sharded:
                _reset_sharded(module)
        if self._fsdp1:
            notes.append(
                "FullyShardedDataParallel cannot be reset after an aborted step: wrap such models again on all ranks"
            )
        return notes


class _Warnings:
    """The module `warnings` for a module of torch: warnings have the line of the user's call, not of our wrappers.

    Args:
        warnings: the module.
    """

    def __init__(self, warnings: ModuleType) -> None:
        self._warnings = warnings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._warnings, name)

    def warn(self, message: Any, category: Any = None, stacklevel: int = 1, **named: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        ours = 1  # this function
        for _ in range(stacklevel - 1):
            frame = frame and frame.f_back
            while frame is not None and frame.f_code.co_filename.startswith(OURS):
                frame, ours = frame.f_back, ours + 1
        self._warnings.warn(message, category, stacklevel + ours, **named)


def _remember(kind: type, name: str, models: Any) -> None:
    """Wrap a method of a model class, so that it adds the model to a set."""
    original = getattr(kind, name)

    @functools.wraps(original)
    def remembered(model: Any, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        if name == "__setstate__":
            model._has_rebuilt_buckets = False  # an unpickled model has a new reducer; torch assumes the old one
            for hook, state in getattr(model, "_comm_hooks", ()):  # an unpickled DDP model lacks them
                dist._register_comm_hook(model.reducer, state, hook)  # type: ignore[attr-defined]  # exported later
        models.add(model)

    setattr(kind, name, remembered)


def _reset(model: DistributedDataParallel, *, make_reducer: bool) -> None:
    """Let a model's reducer forget an incomplete backward, on all ranks in the same way.

    If some rank is new, its reducer is new, with the buckets in their first order. Then all ranks need new reducers.
    Old ones keep their order, and gradients would be added to those of other parameters.
    """
    if getattr(model, "reducer", None) is None:
        return
    group, world = getattr(model, "process_group", None), dist.group.WORLD
    assert world is not None
    # The model has left another default group, or the user has destroyed its group, which contained all ranks.
    if group is None or (_is_destroyed(group) and group.size() == world.size()):
        model.process_group = world
    # Otherwise only ranks whose last forward was not in `no_sync` would wait for rank 0's buffers in the next one.
    model.require_forward_param_sync = True
    if not make_reducer:
        model._update_process_group(model.process_group)
    elif model.process_group is dist.group.WORLD:
        # Not in a smaller group: with a new rank in it, the user must make the group and the model again.
        make_reducer_anew(model)


def _is_sharded(parameter: torch.Tensor) -> bool:
    if hasattr(parameter, "_is_flat_param"):  # FSDP 1
        return True
    module = sys.modules.get("torch.distributed.tensor")  # a DTensor can exist only if this module was imported
    if module is None or not isinstance(parameter, module.DTensor):
        return False
    return not all(placement.is_replicate() for placement in parameter.placements)


def _is_destroyed(group: ProcessGroup) -> bool:
    return group not in distributed_c10d._world.pg_map


def make_reducer_anew(model: DistributedDataParallel, buckets: Sequence[list[int]] = ()) -> None:
    """Give a DDP model a new reducer. Call it on all ranks with the same arguments.

    Args:
        buckets: numbers of the parameters in each bucket; empty for torch's initial buckets.
    """
    state = model.__getstate__()
    model._has_rebuilt_buckets = state["_has_rebuilt_buckets"] = False
    assign = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]  # exported later

    def as_given(*args: Any) -> tuple[list[list[int]], list[int]]:
        _, limits = assign(*args)
        return list(reversed(buckets)), [limits[-1]] * len(buckets)

    if buckets:
        dist._compute_bucket_assignment_by_size = as_given  # type: ignore[attr-defined, assignment]
    try:
        model.__setstate__(state)
    finally:
        dist._compute_bucket_assignment_by_size = assign  # type: ignore[attr-defined]


_USUAL_RATE = 100  # torch: after the tenth step of a reducer, a logger reads its buckets once in this many steps


def read_layout(model: DistributedDataParallel) -> list[list[int]]:
    """Return the parameter numbers of each bucket, as torch has rebuilt them."""
    logger = dist.Logger(model.reducer)  # type: ignore[attr-defined]  # the model's own logger gets them a step later
    with quiet():
        model.reducer._set_ddp_runtime_logging_sample_rate(1)
        logger.set_runtime_stats_and_log()
        model.reducer._set_ddp_runtime_logging_sample_rate(_USUAL_RATE)
    order = str(logger._get_ddp_logging_data().strs_map.get("rebuilt_per_bucket_param_indices", ""))
    return [[int(number) for number in one.split()] for one in order.split(",") if one.strip()]


def _sharded_modules() -> list[FSDPModule]:
    """Return all modules that `fully_shard` was called with. It makes a subclass for each class of module."""
    classes = set(FSDPModule.__subclasses__())
    return [each for each in gc.get_objects() if type(each) in classes] if classes else []


def _reset_sharded(module: FSDPModule) -> None:
    """Let the root of an FSDP model forget an incomplete forward or backward.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    with contextlib.suppress(AttributeError, RuntimeError):  # it has not run yet, or is not the root
        module.reset_iter_state()
