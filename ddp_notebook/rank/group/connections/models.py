"""Models in DDP and FSDP: after a cell that was cut, they forget a forward or backward that did not end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.cell.exceptions import with_type
from ddp_notebook.stdlib import contextlib, functools, gc, weakref


class Models:
    """The models in DDP and FSDP of this process, from `watch` on."""

    def __init__(self) -> None:
        self._fsdp1: weakref.WeakSet[FullyShardedDataParallel] = weakref.WeakSet()
        self._ddp: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._left: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # cannot go on, as the user was told

    def watch(self) -> None:
        """See models as they are made."""
        _remember(DistributedDataParallel, "__init__", self._ddp)
        _remember(DistributedDataParallel, "__setstate__", self._ddp)
        _remember(FullyShardedDataParallel, "__init__", self._fsdp1)

    @property
    def exist(self) -> bool:
        """Whether there are any: a forward or backward of one may have been left half done."""
        return bool(self._ddp or self._fsdp1 or FSDPModule.__subclasses__())

    def kind_of(self, optimizer: torch.optim.Optimizer | None) -> str:
        """Return how the parameters of an optimizer are spread over ranks: "ddp", "sharded" if a rank has parts of
        them, or "" if neither is known."""
        if optimizer is None:
            return ""
        with contextlib.suppress(RuntimeError):  # asked in another thread while a model is made
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            if any(map(_is_sharded, parameters)):
                return "sharded"
            in_ddp = {id(one) for model in list(self._ddp) for one in model.parameters()}
            return "ddp" if any(id(one) in in_ddp for one in parameters) else ""
        return ""

    def leave(self, default: ProcessGroup, *, is_of_session: bool) -> list[str]:
        """The default group ends, and another one will take its place: models in it go there at the next `reset`, if
        it was the session's. (In another one ranks may never have had the same parameters.)

        Returns:
            What the user has to know: models of other groups, which end too.
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
        return [f"{which} in DDP with a process_group of its own cannot go on: make the group again, and wrap it again"]

    def reset(self, *, make_reducers: bool) -> list[str]:
        """Let all of them forget a forward or backward that did not end.

        Args:
            make_reducers: some rank is new, so the reducers of all ranks have to be.

        Returns:
            What the user has to know: models that cannot go on.
        """
        notes = []
        for model in list(self._ddp - self._left):
            try:
                _reset(model, make_reducer=make_reducers)
            except Exception as error:  # of one model: the others and the group are not to suffer
                notes.append(f"a model in DDP cannot go on, wrap it again: {with_type(error)}")
        sharded = _sharded_modules()
        if sharded and not hasattr(FSDPModule, "reset_iter_state"):
            notes.append(
                f"torch {torch.__version__} cannot let a model of fully_shard forget a step that was cut (2.13 can): "
                "shard such models again on all ranks"
            )
        else:
            for module in sharded:
                _reset_sharded(module)
        if self._fsdp1:
            notes.append(
                "FullyShardedDataParallel cannot forget a step that was cut: wrap such models again on all ranks"
            )
        return notes


def _remember(kind: type, name: str, models: Any) -> None:
    """Wrap a method of a kind of model, so that it puts the model into a set."""
    original = getattr(kind, name)

    @functools.wraps(original)
    def remembered(model: Any, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        if name == "__setstate__":
            model._has_rebuilt_buckets = False  # an unpickled one has a new reducer, and torch takes it for the old one
            for hook, state in getattr(model, "_comm_hooks", ()):  # an unpickled model in DDP lacks them
                dist._register_comm_hook(model.reducer, state, hook)  # type: ignore[attr-defined]  # exported later
        models.add(model)

    setattr(kind, name, remembered)


def _reset(model: DistributedDataParallel, *, make_reducer: bool) -> None:
    """Let a model's reducer forget a backward that did not end, on all ranks alike.

    If some rank is new, so is its reducer, whose buckets are in their first order. Then all ranks need new reducers:
    old ones keep their order, and gradients would be added to those of other parameters.
    """
    if getattr(model, "reducer", None) is None:
        return
    group, world = getattr(model, "process_group", None), dist.group.WORLD
    assert world is not None
    # It has left another default group, or the user has destroyed its group, in which all ranks were.
    if group is None or (_is_destroyed(group) and group.size() == world.size()):
        model.process_group = world
    # Else only ranks whose last forward was not in `no_sync` would wait for rank 0's buffers in the next one.
    model.require_forward_param_sync = True
    if not make_reducer:
        model._update_process_group(model.process_group)
    elif model.process_group is dist.group.WORLD:
        # Not in a smaller group: with a new rank in it, the user has to make it again, and the model too.
        make_reducer_anew(model)


def _is_sharded(parameter: torch.Tensor) -> bool:
    if hasattr(parameter, "_is_flat_param"):  # of FSDP 1
        return True
    module = sys.modules.get("torch.distributed.tensor")  # a DTensor can exist only if it was imported
    if module is None or not isinstance(parameter, module.DTensor):
        return False
    return not all(placement.is_replicate() for placement in parameter.placements)


def _is_destroyed(group: ProcessGroup) -> bool:
    return group not in distributed_c10d._world.pg_map


def make_reducer_anew(model: DistributedDataParallel, buckets: Sequence[list[int]] = ()) -> None:
    """Give a model in DDP a new reducer. The same on all ranks.

    Args:
        buckets: numbers of the parameters in each; none: torch's first ones.
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


def _sharded_modules() -> list[FSDPModule]:
    """All modules that `fully_shard` was called with. It makes a subclass for each class of module."""
    classes = set(FSDPModule.__subclasses__())
    return [each for each in gc.get_objects() if type(each) in classes] if classes else []


def _reset_sharded(module: FSDPModule) -> None:
    """Let the root of an FSDP model forget a forward or backward that did not end.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    with contextlib.suppress(AttributeError, RuntimeError):  # it has not run yet, or is not the root
        module.reset_iter_state()
