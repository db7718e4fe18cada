"""Errors of fully_shard, and of models that are partly sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ddp_notebook.rank.torch_errors import parameter_names
from ddp_notebook.rank.torch_errors.known_error import KnownError, Values
from ddp_notebook.rank.torch_errors.raised import Raised, variables

_FSDP = r"^torch\.distributed\.fsdp\._fully_shard\."
_MIXED = "aten.{operator} got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor"
_LOAD = r"^torch\.nn\.modules\.module:Module\.load_state_dict$"
_LOADING = "Error(s) in loading state_dict for {}:{}got mixed torch.Tensor and DTensor"


def _dtypes(raised: Raised, _: Mapping[str, str]) -> Values | None:
    group = raised.local(_FSDP + r"\w*param_group:FSDPParamGroup\._init_mp_dtypes$", "self")
    by_dtype: dict[str, list[str]] = {}
    for one in getattr(group, "fsdp_params", ()):
        dtype = str(getattr(one, "orig_dtype", "")).removeprefix("torch.")
        by_dtype.setdefault(dtype, []).append(str(getattr(one, "_param_fqn", "")))
    if len(by_dtype) < 2 or not all(all(those) for those in by_dtype.values()):
        return None
    known = [name for those in by_dtype.values() for name in those]
    return {
        "dtypes": "; ".join(f"{parameter_names.parameters(those, known)}: {one}" for one, those in by_dtype.items())
    }


def _outer_first(raised: Raised, _: Mapping[str, str]) -> Values | None:
    place = _FSDP + r"\w*param:FSDPParam\._init_sharded_param$"
    if not parameter_names.is_sharded(raised.local(place, "param")):
        return None
    keeper = raised.local(place, "self")
    mesh = getattr(getattr(keeper, "mesh_info", None), "mesh", None)
    return {} if mesh is not None and raised.local(place, "param").device_mesh == mesh else None


def _split(tensors: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the sharded and the other tensors."""
    sharded = [one for one in tensors if parameter_names.is_sharded(one)]
    return sharded, [one for one in tensors if isinstance(one, torch.Tensor) and not parameter_names.is_sharded(one)]


def _clipped(raised: Raised, _: Mapping[str, str]) -> Values | None:
    place = r"^torch\.nn\.utils\.clip_grad:(clip_grad_norm_|_clip_grads_with_norm_)$"
    parameters = raised.local(place, "parameters")
    if not isinstance(parameters, list | tuple):
        return None
    sharded, plain = _split([one for one in parameters if one.grad is not None])
    if not sharded or not plain:
        return None
    return {
        "plain": parameter_names.of_tensors(plain, raised.frames),
        "count": parameter_names.counted(len(sharded), "parameter"),
    }


def _optimizer(raised: Raised) -> Any:
    return raised.local(r"^torch\.optim\.(?!optimizer:)\w+:\w+\.step$", "self")


def _stepped(raised: Raised, _: Mapping[str, str]) -> Values | None:
    groups = getattr(_optimizer(raised), "param_groups", ())
    sharded, plain = _split([one for group in groups for one in group["params"] if one.grad is not None])
    if not sharded or not plain:
        return None
    return {
        "plain": parameter_names.of_tensors(plain, raised.frames),
        "count": parameter_names.counted(len(sharded), "parameter"),
    }


def _state(raised: Raised, _: Mapping[str, str]) -> Values | None:
    optimizer = _optimizer(raised)
    for parameter, state in getattr(optimizer, "state", {}).items():
        whole = [
            name for name, one in state.items() if isinstance(one, torch.Tensor) and not parameter_names.is_sharded(one)
        ]
        found = [name for name in whole if state[name].dim()]
        if found and parameter_names.is_sharded(parameter):
            return {"name": found[0], "optimizer": type(optimizer).__name__}
    return None


def _loaded_model(raised: Raised) -> tuple[Any, bool] | None:
    model = raised.local(_LOAD, "self")
    if not isinstance(model, torch.nn.Module):
        return None
    return model, any(parameter_names.is_sharded(one) for one in torch.nn.Module.parameters(model))


def _whole_into_sharded(raised: Raised, _: Mapping[str, str]) -> Values | None:
    found = _loaded_model(raised)
    model = type(found[0]).__name__.removeprefix("FSDP") if found is not None else ""
    return {"model": model} if found is not None and found[1] else None


def _sharded_into_whole(raised: Raised, _: Mapping[str, str]) -> Values | None:
    found = _loaded_model(raised)
    return {"model": type(found[0]).__name__} if found is not None and not found[1] else None


def _without_call(raised: Raised, _: Mapping[str, str]) -> Values | None:
    """Return the method of a sharded model that was called without the model's own call, which gathers it."""
    called = [variables(frame).get("self") for frame in raised.frames if frame.f_code.co_name == "_call_impl"]
    for frame in raised.frames:
        model = variables(frame).get("self")
        if not type(model).__name__.startswith("FSDP") or not isinstance(model, torch.nn.Module):
            continue
        own = torch.nn.Module.parameters(model)
        if not any(one is model for one in called) and any(parameter_names.is_sharded(one) for one in own):
            return {"model": type(model).__name__.removeprefix("FSDP"), "method": frame.f_code.co_name}
    return None


def _whole_input(raised: Raised, _: Mapping[str, str]) -> Values | None:
    for frame in reversed(raised.frames):
        module, given = variables(frame).get("self"), variables(frame).get("input")
        if isinstance(module, torch.nn.Module) and isinstance(given, torch.Tensor):
            own = [one for one in torch.nn.Module.parameters(module) if parameter_names.is_sharded(one)]
            return {"module": type(module).__name__} if own and not parameter_names.is_sharded(given) else None
    return None


def _container(raised: Raised, _: Mapping[str, str]) -> Values | None:
    module = raised.local(_FSDP + r"\w+:_validate_module$", "module")
    return {"module": type(module).__name__} if isinstance(module, torch.nn.Module) else None


def _again(raised: Raised, found: Mapping[str, str]) -> Values | None:
    return {"model": found["model"].partition("(")[0].removeprefix("FSDP")} if found["api"] == "fully_shard" else None


ENTRIES = (
    KnownError(
        name="dtypes of a sharded module",
        text="FSDP expects uniform original parameter dtype but got ",
        kind="AssertionError",
        where=_FSDP + r"\w*param_group:FSDPParamGroup\._init_mp_dtypes$",
        facts=_dtypes,
        cause="one call of fully_shard takes parameters of one dtype, and these have several ({dtypes})",
        fix="convert the model to one dtype, or call fully_shard separately on the modules with another one",
    ),
    KnownError(
        name="module called before its root",
        text="FSDP state has already been lazily initialized for {module}\nFSDP requires running forward through the "
        "root "
        "module first",
        kind="RuntimeError",
        where=_FSDP + r"\w*state:FSDPState\._lazy_init$",
        cause="module {module} was called before the model that contains it, so it became a root",
        fix="after all calls of fully_shard, call the whole model before any part of it",
    ),
    KnownError(
        name="sharded from the outside to the inside",
        text="Invariant encountered: value was None when it should not be",
        kind="TypeError",
        where=r"^torch\.utils\._typing_utils:not_none$",
        facts=_outer_first,
        cause="a module that contains this one was sharded before, with the parameters of this one",
        fix="make the model again, and call fully_shard on inner modules first, on the model last",
    ),
    KnownError(
        name="gradients partly sharded",
        text=_MIXED,
        kind="RuntimeError",
        where=r"^torch\.nn\.utils\.clip_grad:",
        facts=_clipped,
        cause="{count} with gradients are DTensors, and {plain} not",
        fix="call fully_shard or parallelize_module on the whole model, or clip the two kinds separately",
    ),
    KnownError(
        name="optimizer with partly sharded parameters",
        text=_MIXED,
        kind="RuntimeError",
        where=r"^torch\.optim\.",
        facts=_stepped,
        cause="{count} of this optimizer are DTensors, and {plain} not",
        fix="shard the whole model before the optimizer is made, or use foreach=False",
    ),
    KnownError(
        name="optimizer with whole state",
        text=_MIXED,
        kind="RuntimeError",
        where=r"^torch\.optim\.",
        facts=_state,
        cause="the parameters of this {optimizer} are sharded, and its state {name} is not",
        fix="load its state with set_optimizer_state_dict of torch.distributed.checkpoint.state_dict",
    ),
    KnownError(
        name="whole state_dict into a sharded model",
        text=_LOADING,
        kind="RuntimeError",
        where=_LOAD,
        facts=_whole_into_sharded,
        cause="this {model} is sharded, and the state_dict has whole tensors",
        fix="use set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True)) of "
        "torch.distributed.checkpoint.state_dict, or load before the model is sharded",
    ),
    KnownError(
        name="sharded state_dict into a whole model",
        text=_LOADING,
        kind="RuntimeError",
        where=_LOAD,
        facts=_sharded_into_whole,
        cause="the state_dict is of a sharded model, and this {model} is not sharded",
        fix="gather it on all ranks with get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) "
        "of "
        "torch.distributed.checkpoint.state_dict",
    ),
    KnownError(
        name="method of a sharded model",
        text=_MIXED,
        kind="RuntimeError",
        where="^$|^torch",
        facts=_without_call,
        cause="fully_shard gathers parameters when the {model} itself is called, and {method} was called instead",
        fix="call model(...), or register_fsdp_forward_method(model, '{method}') before",
    ),
    KnownError(
        name="whole input of a sharded module",
        text=_MIXED,
        kind="RuntimeError",
        where=r"^torch\.nn\.modules\.",
        facts=_whole_input,
        cause="the parameters of this {module} are DTensors, and its input is a plain tensor",
        fix="after fully_shard call the model that contains it; for tensor parallel use parallelize_module, which "
        "converts inputs",
    ),
    KnownError(
        name="plain tensor with a DTensor",
        text=_MIXED,
        kind="RuntimeError",
        where="",
        cause="one operand of {operator} is a DTensor, and another one a plain tensor",
        fix="convert one of them: distribute_tensor(x, d.device_mesh, d.placements), or d.full_tensor() on all ranks",
    ),
    KnownError(
        name="module without a forward",
        text="fully_shard does not support containers that do not implement forward: ",
        kind="ValueError",
        where=_FSDP + r"\w+:_validate_module$",
        facts=_container,
        cause="{module} defines no forward, before which fully_shard could gather its parameters",
        fix="call fully_shard on each of its modules, and on the model that contains it",
    ),
    KnownError(
        name="sharded twice",
        text="Each distinct composable distributed API can only be applied to a module once. {api} has already been "
        "applied to the following module:\n{model}\n",
        kind="AssertionError",
        where=r"^torch\.distributed\._composable\.contract:",
        facts=_again,
        cause="fully_shard was called on this {model} before, perhaps by an earlier run of the cell",
        fix="make the model in the same cell, before fully_shard",
        other_texts=(
            "Each distinct composable distributed API can only be applied to a module once. {api} has already been "
            "applied to the following module:\n{model}",
        ),
    ),
    KnownError(
        name="mesh with three dimensions",
        text="fully_shard expects a 1D or 2D DeviceMesh but got ",
        kind="ValueError",
        where=_FSDP,
        cause="fully_shard shards over one dimension of a mesh, and copies over a second one",
        fix="pass a part of the mesh, such as mesh['dp'] or mesh['replicate', 'shard']",
    ),
    KnownError(
        name="uneven shards of another dimension",
        text="FSDP does not support uneven sharding on dim {dim:d}: torch.Size({shape}) (world size: {size:d})",
        kind="NotImplementedError",
        where=_FSDP,
        cause="dimension {dim} of {shape} has no equal parts for {size} ranks; only dimension 0 may have unequal ones",
        fix="use Shard(0), or pad dimension {dim} to a multiple of {size}",
    ),
    KnownError(
        name="ranks per group after the forward",
        text="If passing reshard_after_forward as an int, it should be a factor of {size:d}, not {given:d}",
        kind="ValueError",
        where=_FSDP,
        cause="reshard_after_forward={given} is the number of ranks that hold the model after a forward, and {given} "
        "does "
        "not divide {size} ranks",
        fix="pass a divisor of {size}, or True or False",
    ),
    KnownError(
        name="FullyShardedDataParallel on CPU ranks",
        text="FSDP needs a non-CPU accelerator device, but no accelerator device is detected.",
        kind="RuntimeError",
        where=r"^torch\.distributed\.fsdp\._init_utils:",
        cause="FullyShardedDataParallel of this torch needs GPUs, and these ranks have none",
        fix="use fully_shard(model), which works on CPU ranks",
    ),
    KnownError(
        name="copy of a sharded model",
        text="FSDP does not support deepcopy.",
        kind="AssertionError",
        where=_FSDP + r"\w+:_unimplemented_deepcopy$",
        cause="the model was copied with deepcopy after fully_shard",
        fix="copy it before fully_shard, and shard the copy too; for an average of weights, average the DTensors of "
        "both",
    ),
)
