"""Facts about a step, its batch and its wrappers, from which the notebook derives sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ddp_notebook.rank.verify import batches, noise
from ddp_notebook.rank.verify.copies import Copies
from ddp_notebook.rank.verify.coverage import Coverage, param_groups
from ddp_notebook.rank.verify.ranks import Ranks, RefusedError
from ddp_notebook.rank.verify.runs import Runs, is_compiled
from ddp_notebook.rank.verify.step import Run, Step

_HOOK_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}  # dtype by a part of the name of the comm hook


def of_models(
    ranks: Ranks,
    coverage: Coverage,
    copies: Copies,
    runs: Runs,
    local: Run,
    sizes: Mapping[str, int],
    namespace: Mapping[str, Any],
) -> dict[str, Any]:
    """Return facts about the models of a step, their wrappers and their types. All ranks call it at the same time.

    Args:
        ranks: the ranks.
        coverage: parameters by name.
        copies: tensors that differ between ranks.
        runs: evaluations of the step on this rank.
        local: the run `local`.
        sizes: number of elements by parameter.
        namespace: the user's variables.
    """
    hooks = [hook for model in coverage.ddp for hook in getattr(model, "_comm_hooks", ())]
    dtypes = ranks.all([str(one).removeprefix("torch.") for one in _types(coverage, local, hooks)])
    modules = coverage.modules_of(sizes)
    buffers = {id(one) for module in modules for one in torch.nn.Module.buffers(module)}
    is_compiled_step = runs.calls_compiled or any(map(is_compiled, modules))
    return {
        "world": ranks.world,
        "wrapper": coverage.wrapper(),
        "losses": ranks.all(local.loss),
        "sizes": sizes,
        "causes": coverage.causes(),
        "weights": copies.weights,
        "largest": copies.largest,
        "options": copies.options(namespace) if copies.weights else [],
        "copies": copies.shards,
        "own_buffers": [name for name, one in copies.own_buffers.items() if id(one) in buffers],
        "hook": next((_name_of(hook) for hook, _ in hooks), ""),
        "unit": max(torch.finfo(getattr(torch, one)).eps for of_rank in dtypes for one in of_rank),
        "dtypes": sorted({one for of_rank in dtypes for one in of_rank}),
        # On a GPU, kernels of the backward may add in another order each time.
        "is_eager": not is_compiled_step and not coverage.is_sharded and not _are_on_gpu(modules),
        "drops": ranks.any(local.drew_random or any(map(noise.drops, modules))),
        "norms": sorted({type(one).__name__ for one in modules if noise.has_batch_statistics(one)}),
        "data_parallel": any(isinstance(one, nn.DataParallel) for one in modules),
        "gradient_hooks": sorted(coverage.user_hooks()),
        "divide_factor": _divide_factor(coverage),
        "prefixes": list(coverage.roots),
        "plain": sorted(name for name, one in namespace.items() if isinstance(one, torch.Tensor)),
    }


def of_batch(ranks: Ranks, values: Mapping[str, Any], step: Step, group: Sequence[int]) -> dict[str, Any]:
    """Return facts about the parts of the batch. All ranks call it at the same time.

    Args:
        ranks: the ranks.
        values: this rank's part by name.
        step: the step.
        group: ranks over which this rank's gradients are averaged.
    """
    hashes = ranks.all(batches.samples(values))
    parts = ranks.all(list(group))[0]
    part_of = ranks.all(group.index(ranks.rank) if ranks.rank in group else 0)
    of_parts = [hashes[rank] for rank in parts]
    return {
        "parts": parts,
        "rows": ranks.all(batches.rows_of(values)),
        "counts": ranks.all(batches.counts(values)),
        "micro": step.micro,
        "divides": step.divides,
        "sized": next((name for name, one in values.items() if _has_length(one, values)), ""),
        "samples": sum(map(len, of_parts)),
        "same_batch": len(parts) > 1 and bool(hashes[0]) and all(one == hashes[0] for one in of_parts),
        "overlap": batches.overlap(of_parts),
        "other_batch": [rank for rank in range(ranks.world) if hashes[rank] != hashes[parts[part_of[rank]]]],
    }


def of_reducer(
    ranks: Ranks, coverage: Coverage, runs: Runs, sizes: Mapping[str, int], names: Sequence[Mapping[str, int]]
) -> dict[str, Any]:
    """Return parameters for which DDP would wait in the step of all ranks, which then is not computed.

    Args:
        ranks: the ranks.
        coverage: parameters by name.
        runs: evaluations of the step on this rank, after `local`.
        sizes: number of elements by parameter with a gradient on a rank.
        names: parameters with a gradient, by rank.

    Raises:
        RefusedError: a model with a static graph may wait for a parameter.
    """
    missing = {
        name: absent for name in sizes if (absent := [rank for rank in range(ranks.world) if name not in names[rank]])
    }
    models, causes = coverage.ddp, coverage.causes()
    entered = all(ranks.all(runs.enters_ddp))
    needs_all = entered and not any(one.find_unused_parameters or one.static_graph for one in models)
    covered = set(coverage.parameters()) - set(causes) if models and needs_all else set()
    if entered and any(one.static_graph for one in models):
        left = sorted(set(coverage.parameters()) - set(causes) - (set(sizes) - set(missing)))
        if ranks.any(left):
            raise RefusedError(
                f"the loss does not depend on {', '.join(left[:3]) or 'a parameter'} on all ranks, and a DDP model "
                "with static_graph=True may wait for it"
            )
    never = sorted(set[str]().union(*ranks.all(covered - set(sizes))))
    return {
        "missing": missing,
        "never": never,
        "hangs": ranks.any(bool(never) or bool(covered & set(missing))),
        "forward_bypassed": bool(models) and not entered,
    }


def _types(coverage: Coverage, local: Run, hooks: Sequence[Any]) -> set[torch.dtype]:
    found = set(local.dtypes) | {one.dtype for one in local.gradients.values() if one.is_floating_point()}
    for hook, _ in hooks:
        found |= {dtype for part, dtype in _HOOK_TYPES.items() if part in _name_of(hook)}
    for module in coverage.fsdp2:
        for group in param_groups(module):
            policies = [one.mp_policy for one in group.fsdp_params]  # torch 2.15: may differ in a group
            types = {dtype for one in policies for dtype in (one.param_dtype, one.reduce_dtype)}
            found |= {dtype for dtype in types if dtype is not None}
    return found


def _divide_factor(coverage: Coverage) -> float | None:
    groups = [one for module in coverage.fsdp2 for one in param_groups(module)]
    return next((one.gradient_divide_factor for one in groups if one.gradient_divide_factor), None)


def _name_of(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__)).rpartition(".")[2]


def _are_on_gpu(modules: Sequence[nn.Module]) -> bool:
    return any(one.device.type != "cpu" for module in modules for one in module.parameters(recurse=False))


def _has_length(value: Any, values: Mapping[str, Any]) -> bool:
    """Return whether `len(value)` is the number of samples of a batch."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == batches.rows_of(values)
