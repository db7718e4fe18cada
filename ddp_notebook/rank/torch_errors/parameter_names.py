"""Parameters, modules and groups of the user, as text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed import get_process_group_ranks, get_world_size
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.torch_errors.raised import variables
from ddp_notebook.records.words import format_ranks

_MOST = 6


def some(names: Sequence[str]) -> str:
    """Return names as text, at most six of them.

    Example:
        >>> some(["a", "b"]), some([str(i) for i in range(9)])
        ('a and b', '0, 1, 2, 3, 4 and 4 more')
    """
    if len(names) > _MOST:
        names = [*names[: _MOST - 1], f"{len(names) - _MOST + 1} more"]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else ""


def parameters(names: Sequence[str], known: Iterable[str]) -> str:
    """Return names of parameters as text. All parameters of a module are written as `module.*`.

    Example:
        >>> known = ["left.weight", "left.bias", "right.weight", "right.bias"]
        >>> parameters(["left.weight", "left.bias", "right.bias"], known)
        'left.* and right.bias'
    """
    known, left, found = list(known), list(names), list[str]()
    while left:
        name = left[0]
        for module in _modules_above(name):
            inside = [one for one in known if one.startswith(f"{module}.")]
            if len(inside) > 1 and set(inside) <= set(left):
                found.append(f"{module}.*")
                left = [one for one in left if one not in inside]
                break
        else:
            found.append(name)
            left.remove(name)
    return some(found)


def _modules_above(name: str) -> Iterator[str]:
    """Yield the modules that contain a parameter, the outermost first."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        yield ".".join(parts[:count])


def of_reducer(model: DistributedDataParallel) -> list[str]:
    """Return the names of the parameters that DDP averages, by their index; empty if they have changed since then."""
    ignored = set(model.parameters_to_ignore)
    named = model.module.named_parameters()
    names = [name for name, one in named if one.requires_grad and name not in ignored]
    logger = getattr(model, "logger", None)
    count = logger._get_ddp_logging_data().ints_map.get("num_parameter_tensors") if logger is not None else None
    return names if count is None or count == len(names) else []


def ranks_of(group: Any) -> list[int]:
    """Return the ranks of a group; of all ranks for None."""
    return list(range(get_world_size())) if group is None else get_process_group_ranks(group)


def ranks(group: Any) -> str:
    """Return the ranks of a group as text."""
    return f"[{format_ranks(ranks_of(group))}]"


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "placements")


def shapes(tensors: Iterable[torch.Tensor]) -> str:
    """Return the shapes of tensors as text."""
    return some([str(list(one.shape)) for one in tensors])


def name_of(module: torch.nn.Module, roots: Collection[Any]) -> str:
    """Return the longest name of a module below one of these modules, or its class if it has none."""
    names = [name for root in roots for name, one in root.named_modules() if one is module and name]
    return max(names, key=len) if names else type(module).__name__


def of_tensors(wanted: Sequence[torch.Tensor], frames: Iterable[Any]) -> str:
    """Return the names of parameters in the models that the user's frames hold; their shapes if no model has them.

    Args:
        wanted: parameters.
        frames: frames of a traceback.
    """
    ids = {id(one) for one in wanted}
    for frame in frames:
        if str(frame.f_globals.get("__name__", "")).startswith("torch"):
            continue
        for values in (variables(frame), frame.f_globals):
            models = [one for one in list(values.values()) if issubclass(type(one), torch.nn.Module)]
            for model in models:
                named = list(torch.nn.Module.named_parameters(model))
                found = [name for name, one in named if id(one) in ids]
                if len(found) == len(ids):
                    return parameters(found, [name for name, _ in named])
    return f"tensors of shape {shapes(wanted)}"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> counted(1, "parameter"), counted(2, "parameter")
        ('1 parameter', '2 parameters')
    """
    return f"{count} {noun}{'s' * (count != 1)}"
