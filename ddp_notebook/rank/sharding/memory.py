"""Memory of this rank's training by purpose.

Parameters, gradients and optimizer state are measured at the optimizer step by their storages, each counted once.
Activations and temporary memory are measured by torch's memory trackers. Each number is a separate maximum, so the peak
of the total may be smaller than their sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from IPython import get_ipython
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

_HELD = ("Parameter", "Sharded Param", "Buffer", "Gradient", "Sharded Grad", "Optstate", "OptState")
_AROUND = ("ZeroRedundancyOptimizer",)  # optimizer classes that hold their state in an inner optimizer


def held(namespace: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of parameters, buffers, gradients and optimizer state of all models and optimizers in variables.

    Example:
        >>> held({"model": torch.nn.Linear(3, 5)})
        {'parameters': 80, 'buffers': 0, 'gradients': 0, 'optimizer_state': 0}
    """
    models, optimizers = _training(namespace)
    seen: set[int] = set()
    parameters = {id(p): p for model in models for p in torch.nn.Module.parameters(model)}
    parameters |= {id(p): p for one in optimizers for group in one.param_groups for p in group["params"]}
    buffers = [buffer for model in models for buffer in torch.nn.Module.buffers(model)]
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    states = [value for one in optimizers for state in one.state.values() for value in _tensors(state)]
    return {
        "parameters": _nbytes(parameters.values(), seen),
        "buffers": _nbytes(buffers, seen),
        "gradients": _nbytes(gradients, seen),
        "optimizer_state": _nbytes(states, seen),
    }


def measure(namespace: dict[str, Any], code: str, number: int = 1) -> dict[str, int]:
    """Run code and measure its memory.

    Args:
        namespace: variables.
        code: code of the user, such as "step()". With an empty string, nothing runs and the current memory is returned.
        number: number in the `In [n]` of its cell.

    Returns:
        The numbers of `held` at the last optimizer step, the maxima of `activations` and `temporary`, and the `peak` of
        the total.

    Raises:
        Exception: any error of the code.
    """
    if not code:
        now = held(namespace)
        return now | {"activations": 0, "temporary": 0, "peak": sum(now.values())}
    compiled = compile(code, _file_of(code, number), "exec")
    stepped: list[dict[str, int]] = []
    hook = register_optimizer_step_post_hook(lambda *_: stepped.append(held(namespace)))
    tracker = _tracker(namespace)
    most = {"activations": 0, "temporary": 0, "peak": 0}
    _look_often(tracker, most)
    _let_begin_again(tracker)
    try:
        with tracker:
            exec(compiled, namespace)
    finally:
        hook.remove()
    return (stepped[-1] if stepped else held(namespace)) | most


def _file_of(code: str, number: int) -> str:
    """Return a file name with which tracebacks find the code and the number of its cell."""
    shell = get_ipython()
    return "<memory>" if shell is None else str(shell.compile.cache(code, number))


def _look_often(tracker: Any, most: dict[str, int]) -> None:
    """Update the maximum of each kind whenever the tracker updates its peak.

    (Its own snapshot only covers the peak.)
    """
    update = tracker._update_peak_stats

    def look(state: Any) -> None:
        update(state)
        split: Counter[str] = Counter()
        for of_device in tracker._curr_mem_snap.values():
            split.update({str(getattr(kind, "value", kind)): nbytes for kind, nbytes in of_device.items()})
        total, activations = split["Total"], split["Activation"]
        temporary = total - activations - sum(split[name] for name in _HELD)
        now = {"activations": activations, "temporary": temporary, "peak": total}
        most.update({name: max(most[name], nbytes) for name, nbytes in now.items()})

    tracker._update_peak_stats = look


def _let_begin_again(tracker: Any) -> None:
    """Allow repeated calls of a model, for example for gradient accumulation.

    torch's tracker must be reset before the second call. (It does not support this for FSDP models.)
    """
    enter = tracker._pre_fw_hook

    def enter_anew(module: torch.nn.Module, inputs: Any) -> None:
        modules = tracker._mod_tracker
        is_root = set(modules.parents) - {modules.get_known_fqn(module)} == {"Global"}
        if is_root and module in tracker.memory_tracking and not modules.is_bw:
            tracker.reset_mod_stats()
        enter(module, inputs)

    tracker._pre_fw_hook = enter_anew


def _tracker(namespace: Mapping[str, Any]) -> Any:
    """Return the memory tracker of torch: the one for FSDP if there is one FSDP2 model, else the general one.

    Raises:
        NotImplementedError: there are several FSDP2 models.
    """
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed.fsdp import FSDPModule

    models, optimizers = _training(namespace)
    inside = {id(part) for model in models for part in list(torch.nn.Module.modules(model))[1:]}
    roots = [model for model in models if isinstance(model, FSDPModule) and id(model) not in inside]
    if not roots:
        tracker = MemTracker()
        tracker.track_external(*[model for model in models if id(model) not in inside], *optimizers)
        return tracker
    if len(roots) > 1:
        names = [name for name, value in namespace.items() if any(value is root for root in roots)]
        raise NotImplementedError(
            f"the tracker of torch supports one FSDP model at a time, got {', '.join(names)}: `del` the unused models"
        )
    (model,) = roots
    own = {id(p) for p in torch.nn.Module.parameters(model)}
    its = [one for one in optimizers if any(id(p) in own for group in one.param_groups for p in group["params"])]
    return FSDPMemTracker(model, its[0] if its else None)


def _training(namespace: Mapping[str, Any]) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
    """Return the models and optimizers among variables, each once. For a sharded optimizer, return the inner one."""
    own = {id(value): value for name, value in namespace.items() if not name.startswith("_")}.values()
    models = [value for value in own if issubclass(type(value), torch.nn.Module)]
    optimizers = [value for value in own if issubclass(type(value), torch.optim.Optimizer)]
    inner = [getattr(one, "optim", one) if type(one).__name__ in _AROUND else one for one in optimizers]
    return models, inner


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)


def _nbytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Return the size of the tensors' storages that are not in `seen`, and add them to `seen`."""
    found = 0
    for tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # `to_local` waits for its collective
        storage = local.untyped_storage()
        if local.device.type != "meta" and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found += storage.nbytes()
    return found
