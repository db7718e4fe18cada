"""Errors of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import get_rank
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.torch_errors import parameter_names
from ddp_notebook.rank.torch_errors.known_error import Facts, KnownError, Values
from ddp_notebook.rank.torch_errors.raised import Raised
from ddp_notebook.stdlib import re

_DDP = r"^torch\.nn\.parallel\.distributed:DistributedDataParallel\."
_INIT = _DDP + "(_log_and_throw|__init__)$"
_UNFINISHED = (  # text of two entries, which differ by their facts
    "Expected to have finished reduction in the prior iteration before starting a new one.{}Parameter indices which "
    "did not receive grad for rank {rank:d}: {indices}"
)
_VERIFY = r"^torch\.distributed\.utils:_verify_param_shape_across_processes$"
_KEYS = re.compile(r'"([^"]+)"')
_PREFIXES = {"module.": "a model in DDP", "_orig_mod.": "a compiled model"}


def _unused(raised: Raised, found: Mapping[str, str]) -> Values | None:
    model = raised.local(_DDP + "(_pre_forward|forward)$", "self")
    indices = [int(one) for one in found["indices"].split() if one.isdigit()]
    known = parameter_names.of_reducer(model) if isinstance(model, DistributedDataParallel) else []
    if not indices or max(indices) >= len(known):
        return None
    return {"names": parameter_names.parameters([known[index] for index in indices], known)}


def _replaced(raised: Raised, found: Mapping[str, str]) -> Values | None:
    """Return the names of parameters that the module has no more."""
    model = raised.local(_DDP + "(_pre_forward|forward)$", "self")
    averaged = [one for one in getattr(model, "_module_parameters", ()) if one.requires_grad]
    if not isinstance(model, DistributedDataParallel):
        return None
    known = parameter_names.of_reducer(model)
    current = {id(one) for one in model.module.parameters()}
    indices = [int(one) for one in found["indices"].split() if one.isdigit()]
    if len(known) != len(averaged) or not indices or max(indices) >= len(known):
        return None
    names = [known[index] for index in indices if id(averaged[index]) not in current]
    return {"names": parameter_names.parameters(names, known)} if names else None


def _unused_if(looks_for_them: bool) -> Facts:
    """Return facts of unused parameters in a model with this value of `find_unused_parameters`."""

    def facts(raised: Raised, found: Mapping[str, str]) -> Values | None:
        model = raised.local(_DDP + "(_pre_forward|forward)$", "self")
        return _unused(raised, found) if getattr(model, "find_unused_parameters", None) is looks_for_them else None

    return facts


def _in_checkpoint(raised: Raised, _: Mapping[str, str]) -> Values | None:
    return {} if raised.has(r"^torch\.utils\.checkpoint:CheckpointFunction\.backward$") else None


def _module(raised: Raised) -> Any:
    return raised.local(_DDP + "__init__$", "module")


def _frozen(raised: Raised, _: Mapping[str, str]) -> Values | None:
    module = _module(raised)
    if not isinstance(module, torch.nn.Module):
        return None
    count = len(list(torch.nn.Module.parameters(module)))
    has = f"all {count} parameters of this {type(module).__name__} are frozen"
    return {"cause": has if count else f"this {type(module).__name__} has no parameters"}


def _device_ids(raised: Raised, _: Mapping[str, str]) -> Values | None:
    given = raised.local(_DDP + "__init__$", "device_ids")
    return None if given is None else {"count": len(given)}


def _devices(raised: Raised, _: Mapping[str, str]) -> Values | None:
    module = _module(raised)
    if not isinstance(module, torch.nn.Module):
        return None
    by_device: dict[str, list[str]] = {}
    named = list(torch.nn.Module.named_parameters(module))
    for name, one in named:
        by_device.setdefault(one.device.type, []).append(name)
    known = [name for name, _ in named]
    places = [f"{parameter_names.parameters(those, known)} on {device}" for device, those in by_device.items()]
    return {"places": "; ".join(places)} if len(places) > 1 else None


def _lazy(raised: Raised, _: Mapping[str, str]) -> Values | None:
    module = _module(raised)
    if not isinstance(module, torch.nn.Module):
        return None
    lazy = torch.nn.parameter.UninitializedParameter
    found = [name for name, one in torch.nn.Module.named_parameters(module) if isinstance(one, lazy)]
    return {"names": parameter_names.some(found)} if found else None


def _different_shape(raised: Raised, found: Mapping[str, str]) -> Values | None:
    model = raised.local(_DDP + "__init__$", "self")
    if not isinstance(model, DistributedDataParallel):
        return None
    module = _module(raised)
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    known = [name for name, one in module.named_parameters() if one.requires_grad and name not in ignored]
    index = int(found["index"])
    return {"name": known[index], "here": get_rank()} if index < len(known) else None


def _inner_attribute(raised: Raised, found: Mapping[str, str]) -> Values | None:
    error = raised.error
    model = error.obj if type(error) is AttributeError else None
    if not isinstance(model, DistributedDataParallel) or not hasattr(type(model.module), found["name"]):
        inner = {} if not isinstance(model, DistributedDataParallel) else vars(model.module)
        kinds = ("_parameters", "_modules", "_buffers")
        if found["name"] not in inner and not any(found["name"] in inner.get(kind, ()) for kind in kinds):
            return None
    return {"kind": type(model.module).__name__ if isinstance(model, DistributedDataParallel) else ""}


def _prefix(raised: Raised, found: Mapping[str, str]) -> tuple[str, bool] | None:
    """Return the prefix that distinguishes missing and unexpected keys, and whether the loaded keys have it."""
    missing, unexpected = set(_KEYS.findall(found["missing"])), set(_KEYS.findall(found["unexpected"]))
    for prefix in _PREFIXES:
        if {prefix + one for one in missing} == unexpected:
            return prefix, True
        if {prefix + one for one in unexpected} == missing:
            return prefix, False
    return None


def _loaded_with_prefix(raised: Raised, found: Mapping[str, str]) -> Values | None:
    prefix = _prefix(raised, found)
    if prefix is None or not prefix[1]:
        return None
    return {"prefix": prefix[0], "of": _PREFIXES[prefix[0]]}


def _loaded_without_prefix(raised: Raised, found: Mapping[str, str]) -> Values | None:
    prefix = _prefix(raised, found)
    if prefix is None or prefix[1]:
        return None
    inner = {"module.": "module", "_orig_mod.": "_orig_mod"}[prefix[0]]
    return {"prefix": prefix[0], "of": _PREFIXES[prefix[0]], "inner": inner}


_LOADING = "Error(s) in loading state_dict for {}:\n\tMissing key(s) in state_dict: {missing}\n\tUnexpected key(s) in "
_LOADING += "state_dict: {unexpected}"
_LOAD = r"^torch\.nn\.modules\.module:Module\.load_state_dict$"


def _gradients_off(raised: Raised, _: Mapping[str, str]) -> Values | None:
    return None if torch.is_grad_enabled() else {}


def _decorated(raised: Raised, _: Mapping[str, str]) -> Values | None:
    """Return the decorator of the innermost function that runs without gradients."""
    context = raised.local(r"^torch\.utils\._contextlib:context_decorator\.", "ctx_factory")
    kind = type(getattr(context, "__self__", None))
    return {"decorator": kind.__name__} if kind in (torch.no_grad, torch.inference_mode) else None


_NO_GRAPH = "element {:d} of tensors does not require grad and does not have a grad_fn"

ENTRIES = (
    KnownError(
        name="a step while gradients are off",
        text=_NO_GRAPH,
        kind="RuntimeError",
        where=r"^torch\.autograd",
        facts=_gradients_off,
        cause="gradients are off on this rank, since torch.set_grad_enabled(False) or an open no_grad()",
        fix="call torch.set_grad_enabled(True), and use `with torch.no_grad():` for evaluation",
    ),
    KnownError(
        name="a step in a function without gradients",
        text=_NO_GRAPH,
        kind="RuntimeError",
        where=r"^torch\.autograd",
        facts=_decorated,
        cause="backward() ran in a function with the decorator torch.{decorator}",
        fix="leave the decorator out for functions that train",
    ),
    KnownError(
        name="parameters replaced after DDP",
        text=_UNFINISHED,
        kind="RuntimeError",
        where=_DDP + "(_pre_forward|forward)$",
        facts=_replaced,
        cause="{names} were replaced after DDP(model), which still waits for gradients of the old ones",
        fix="make the DDP model after the last change of the model",
    ),
    KnownError(
        name="unused parameters",
        text=_UNFINISHED,
        kind="RuntimeError",
        where=_DDP + "(_pre_forward|forward)$",
        facts=_unused_if(False),
        cause="{names} got no gradient on rank {rank} in the last backward of this model",
        fix="use them in the loss, freeze them before DDP(model), or pass find_unused_parameters=True to DDP",
    ),
    KnownError(
        name="backward past the outputs",
        text=_UNFINISHED,
        kind="RuntimeError",
        where=_DDP + "(_pre_forward|forward)$",
        facts=_unused_if(True),
        cause="{names} got no gradient on rank {rank} in the last backward of this model, but its outputs depend on "
        "them",
        fix="compute the loss from the outputs, and call backward() without inputs=",
    ),
    KnownError(
        name="checkpointed twice in one backward",
        text="Expected to mark a variable ready only once.{}Parameter at index {:d} with name {name} has been marked "
        "as "
        "ready twice.",
        kind="RuntimeError",
        where=r"^torch\.(autograd|utils\.checkpoint)",
        facts=_in_checkpoint,
        cause="checkpoint(..., use_reentrant=True) runs a backward within the backward, in which DDP counted the "
        "gradient of {name} twice",
        fix="pass use_reentrant=False to checkpoint",
    ),
    KnownError(
        name="no parameter to train",
        text="DistributedDataParallel is not needed when a module doesn't have any parameter",
        kind="RuntimeError",
        where=_INIT,
        facts=_frozen,
        cause="{cause}, so DDP has no gradient to average",
        fix="use the module without DDP, or call requires_grad_(True) on parameters before DDP(model)",
    ),
    KnownError(
        name="several device_ids",
        text="device_ids can only be None or contain a single element.",
        kind="ValueError",
        where=_INIT,
        facts=_device_ids,
        cause="each rank is one process with one device, and device_ids has {count} entries",
        fix="pass device_ids=[device.index] on GPUs, and leave it out on CPUs",
    ),
    KnownError(
        name="device_ids of a model on the CPU",
        text="DistributedDataParallel device_ids and output_device arguments only work with single-device/"
        "multiple-device GPU modules or CPU modules, but got device_ids {ids}, output_device {}, and module parameters "
        "{device(type='cpu')}",
        kind="ValueError",
        where=_INIT,
        cause="the model is on the CPU, and device_ids is for models on GPUs",
        fix="leave device_ids and output_device out, or call model.to(device) where device is a GPU",
    ),
    KnownError(
        name="model on several kinds of devices",
        text="DistributedDataParallel's input module must be on the same type of devices",
        kind="ValueError",
        where=_INIT,
        facts=_devices,
        cause="the parameters are on several kinds of devices ({places})",
        fix="call model.to(device), or model.to_empty(device=device) for parameters on meta, before DDP(model)",
    ),
    KnownError(
        name="lazy parameters",
        text="Modules with uninitialized parameters can't be used with `DistributedDataParallel`.",
        kind="RuntimeError",
        where=_INIT,
        facts=_lazy,
        cause="{names} of a lazy module have no shape yet",
        fix="call the model once on a batch, on all ranks, before DDP(model)",
    ),
    KnownError(
        name="models with different numbers of parameters",
        text="DDP expects same model across all ranks, but Rank {here:d} has {own:d} params, while rank {other:d} has "
        "inconsistent {others:d} params.",
        kind="RuntimeError",
        where=_VERIFY,
        cause="the model has {own} parameters that require gradients on rank {here}, and {others} on rank {other}",
        fix="build the same model and freeze the same parameters on all ranks",
    ),
    KnownError(
        name="models with different shapes",
        text="[{:d}]: params[{index:d}] in this process with sizes {shape} appears not to match sizes of the same "
        "param "
        "in process {other:d}.",
        kind="RuntimeError",
        where=_VERIFY,
        facts=_different_shape,
        cause="{name} has the shape {shape} on rank {here}, and another one on rank {other}",
        fix="use the same sizes on all ranks, also if they depend on data",
    ),
    KnownError(
        name="attribute of the inner model",
        text="'DistributedDataParallel' object has no attribute '{name}'",
        kind="AttributeError",
        where=r"^torch\.nn\.modules\.module:Module\.__getattr__$",
        facts=_inner_attribute,
        cause="{name} belongs to the {kind} inside DDP",
        fix="write model.module.{name}; train with model(...) itself, so that gradients are averaged",
    ),
    KnownError(
        name="state_dict of a wrapped model",
        text=_LOADING,
        kind="RuntimeError",
        where=_LOAD,
        facts=_loaded_with_prefix,
        cause="the keys start with {prefix}, as those of {of}",
        fix="load {{k.removeprefix('{prefix}'): v for k, v in state.items()}}, or save the inner model",
    ),
    KnownError(
        name="state_dict of a model that is not wrapped",
        text=_LOADING,
        kind="RuntimeError",
        where=_LOAD,
        facts=_loaded_without_prefix,
        cause="this model is {of}, and these keys lack {prefix}",
        fix="call model.{inner}.load_state_dict(state)",
    ),
    KnownError(
        name="changed static graph",
        text="Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration",
        kind="RuntimeError",
        where=r"^torch\.autograd",
        cause="DDP(static_graph=True) requires the same used parameters in each step, and this step used others",
        fix="pass find_unused_parameters=True instead of static_graph=True",
    ),
    KnownError(
        name="DDP of a sharded model",
        text="Operator c10d.{operator}.default does not have a sharding strategy registered.",
        kind="NotImplementedError",
        where=r"^torch\.distributed\.tensor\._sharding_prop:",
        facts=lambda raised, _: {} if isinstance(_module(raised), torch.nn.Module) else None,
        cause="this model is sharded already, and DDP copies whole models",
        fix="leave DDP out; for replicas of shards pass a mesh of two dimensions to fully_shard",
    ),
    KnownError(
        name="DDP of a model on meta",
        text="Tensor.item() cannot be called on meta tensors",
        kind="RuntimeError",
        where=r"^torch\._meta_registrations:",
        facts=lambda raised, _: {} if isinstance(_module(raised), torch.nn.Module) else None,
        cause="the parameters of this model are on meta and have no values",
        fix="call model.to_empty(device=device) and initialize the model before DDP(model)",
    ),
)
