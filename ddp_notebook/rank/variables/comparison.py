"""Entries of a rank's variables that are compared between ranks: `model.fc.weight`, `loader.batch_size`."""

from __future__ import annotations

import dataclasses
import platform
import random
import sys
import types
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed import get_process_group_ranks, get_world_size
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from ddp_notebook.rank.cell.exceptions import with_type
from ddp_notebook.rank.variables.values import describe
from ddp_notebook.records.words import list_ranks
from ddp_notebook.stdlib import contextlib, gc, itertools, re

_DEEPEST = 4  # maximum depth of nested containers
_MOST_ITEMS = 1000  # maximum number of items of a container
_MOST_ENTRIES = 50_000  # maximum number of entries of a variable
_MOST_TEXT = 80
_WITHIN = "within another variable"
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_SAMPLER = ("epoch", "seed", "num_replicas", "num_samples", "shuffle", "drop_last")  # without `rank`, which differs
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # torch.compile, FSDP, checkpointing
_KINDS: dict[str, Any] = {  # in the order of the comparison
    "module": torch.nn.Module,
    "parameter": torch.nn.Parameter,
    "optimizer": torch.optim.Optimizer,
    "scheduler": torch.optim.lr_scheduler.LRScheduler,
    "scaler": torch.amp.GradScaler,
    "data": (DataLoader, Dataset, Sampler),
}
_IN_NAMES = re.compile(rf"\b({'|'.join(_WRAPPERS)})\.")


class Leaf(NamedTuple):
    """One entry of a variable."""

    entry: str  # "model.fc.weight"
    kind: str
    value: Any = None
    text: str = ""  # replaces the text made from `value`
    skipped: str = ""  # reason for a missing checksum
    part: str = ""  # pipeline stage or group of replicas to which the entry belongs: "stage 0 of 2"
    may_differ: str = ""  # reason for which ranks may have different values


def leaves(namespace: Mapping[str, Any], names: Sequence[str]) -> Iterator[Leaf]:
    """Yield the entries of variables.

    Args:
        namespace: variables.
        names: variables to compare. Empty: models, optimizers, data and similar objects, random state, versions,
            settings.
    """
    variables = dict(namespace)
    walk = _Walk(variables)
    if not names:
        own = {name: _kind(value) for name, value in variables.items() if not name.startswith("_")}
        # Loaders before the objects they hold, whose entries then belong to the loader. A new rank may have another
        # order.
        own = dict(sorted(own.items(), key=lambda item: not issubclass(type(variables[item[0]]), DataLoader)))
        for kind in _KINDS:
            for name in [name for name in own if own[name] == kind]:
                yield from walk.variable(name, variables[name], kind)
        yield from _random("random")
        yield from _versions()
        return
    for name in names:
        if name == "random" and _is_of_library(variables.get(name)):
            yield from _random("variable")
        elif name in variables:
            yield from walk.variable(name, variables[name], _kind(variables[name]) or "variable")
        else:
            yield Leaf(name, "missing")


def _is_of_library(value: Any) -> bool:
    """Return whether the name `random` is not a variable of the user.

    Then it is undefined, the module, or one of the module's functions.
    """
    return _kind(value) is None and (value is None or callable(value) or issubclass(type(value), types.ModuleType))


def _kind(value: Any) -> str | None:
    """Return the kind of a variable from its type alone, because an object may override `isinstance` checks."""
    cls = type(value)
    with contextlib.suppress(Exception):  # a tensor class that rejects operations
        # Other tensors are data, which may differ between ranks.
        if issubclass(cls, torch.Tensor) and value.requires_grad and value.is_leaf:
            return "parameter"
    return next((kind for kind, base in _KINDS.items() if issubclass(cls, base)), None)


class _Walk:
    """Walks through variables. A module or parameter that several variables hold is an entry of the first one."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._seen: set[int] = set()
        self._around: set[int] = set()  # ids of the containers around the current value
        self._sharded: set[int] = set()  # ids of parameters sharded by FSDP1, whose shards are plain tensors
        self._by_design = ByDesign(variables)
        for value in variables.values():
            if issubclass(type(value), torch.nn.Module):
                with contextlib.suppress(Exception):
                    for module in torch.nn.Module.modules(value):
                        if type(module).__name__ == "FullyShardedDataParallel":
                            self._sharded |= {id(p) for p in torch.nn.Module.parameters(module)}

    def _is_sharded(self, parameter: Any) -> bool:
        return id(parameter) in self._sharded or hasattr(parameter, "_is_flat_param")

    def variable(self, name: str, value: Any, kind: str) -> Iterator[Leaf]:
        found = self._value(name, value, kind, 0)
        try:
            # Objects that belong to another variable have their entries there.
            yield next(found, Leaf(name, "within", text=_WITHIN))
            yield from itertools.islice(found, _MOST_ENTRIES - 1)
            if next(found, None) is not None:
                yield Leaf(f"{name}[...]", kind, text="more", skipped=f"after {_MOST_ENTRIES} entries")
        except Exception as error:
            yield unreadable(name, kind, error)

    def _value(self, entry: str, value: Any, kind: str, depth: int) -> Iterator[Leaf]:
        own = _kind(value)
        if own == "module":
            yield from self._module(entry, value)
        elif own == "optimizer":
            yield from self._optimizer(entry, value)
        elif own == "data":
            yield from self._data(entry, value)
        elif own in ("scheduler", "scaler"):
            yield Leaf(entry, own, text=type(value).__name__)
            for key, part in value.state_dict().items():
                yield from self._value(f"{entry}.{key}", part, own, depth + 1)
        elif issubclass(type(value), torch.Tensor) or (parts := _parts(value)) is None:
            if own != "parameter" or id(value) not in self._seen:
                self._seen |= {id(value)} if own == "parameter" else set()
                yield Leaf(entry, kind, value)
        elif id(value) in self._around:
            yield Leaf(entry, kind, text=f"the {type(value).__name__} around it")
        elif depth == _DEEPEST:
            yield Leaf(entry, kind, text=describe(value), skipped="nested too deep")
        else:
            yield Leaf(entry, kind, text=f"{type(value).__name__} of {len(parts)} items")
            self._around.add(id(value))
            for suffix, part in itertools.islice(parts.items(), _MOST_ITEMS):
                yield from self._value(entry + suffix, part, kind, depth + 1)
            self._around.discard(id(value))
            if len(parts) > _MOST_ITEMS:
                yield Leaf(f"{entry}[{_MOST_ITEMS}:]", kind, text="more", skipped=f"after {_MOST_ITEMS} items")

    def _module(self, entry: str, module: torch.nn.Module) -> Iterator[Leaf]:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        inner, name = _unwrapped(module)
        stages, reasons = self._by_design.stages, self._by_design.reasons
        yield Leaf(entry, "module", text=f"{name} in {_mode(inner)}", part=stages.get(id(inner), ""))
        # methods of `Module` itself: overridden ones may do anything
        parameters = torch.nn.Module.named_parameters(inner)
        for key, tensor in itertools.chain(parameters, torch.nn.Module.named_buffers(inner)):
            kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
            name = f"{entry}.{_IN_NAMES.sub('', key)}"
            if id(tensor) in self._seen:
                yield Leaf(name, "within", text=_WITHIN)
            else:
                self._seen.add(id(tensor))
                part = stages.get(id(tensor), "")
                if self._is_sharded(tensor):
                    yield Leaf(name, kind, text="sharded by FSDP", skipped="sharded", part=part)
                else:
                    yield Leaf(name, kind, tensor, part=part, may_differ=reasons.get(id(tensor), ""))

    def _optimizer(self, entry: str, optimizer: torch.optim.Optimizer) -> Iterator[Leaf]:
        """Yield the entries of an optimizer. Its steps change pipeline stages, or parameters that may differ."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        part = ", ".join(sorted({self._by_design.stages.get(id(parameter), "") for parameter in parameters} - {""}))
        for leaf, parameter in self._of_optimizer(entry, optimizer, len(parameters)):
            yield leaf._replace(part=part, may_differ=self._by_design.reasons.get(id(parameter), ""))

    def _of_optimizer(
        self, entry: str, optimizer: torch.optim.Optimizer, count: int
    ) -> Iterator[tuple[Leaf, torch.Tensor | None]]:
        """Yield the entries of an optimizer, each with the parameter to which it belongs."""
        groups = optimizer.param_groups
        yield Leaf(entry, "optimizer", text=f"{type(optimizer).__name__} of {count} parameters"), None
        numbers = itertools.count()
        for g, group in enumerate(groups):
            for key in [key for key in group if key not in ("params", "param_names")]:
                for leaf in self._value(f"{entry}.param_groups[{g}].{key}", group[key], "optimizer", 1):
                    yield leaf, None
            for parameter, number in zip(group["params"], numbers, strict=False):
                # Each rank has only the state of its share. With FSDP1 that may be no part of a parameter.
                if type(optimizer).__name__ == "ZeroRedundancyOptimizer" or id(parameter) in self._sharded:
                    continue
                for key, part in optimizer.state.get(parameter, {}).items():
                    name = f"{entry}.state[{number}].{key}"
                    if self._is_sharded(parameter) and getattr(part, "shape", ()) == parameter.shape:
                        yield Leaf(name, "optimizer", text="sharded by FSDP", skipped="sharded"), parameter
                    else:
                        for leaf in self._value(name, part, "optimizer", 1):
                            yield leaf, parameter

    def _data(self, entry: str, data: Any) -> Iterator[Leaf]:
        if id(data) in self._seen:
            return
        self._seen.add(id(data))
        cls = type(data)
        is_loader = issubclass(cls, DataLoader)
        yield _length(entry, data, "batches" if is_loader else "items")
        if is_loader:
            yield Leaf(f"{entry}.batch_size", "data", data.batch_size)
            yield _length(f"{entry}.dataset", data.dataset, "items")
            self._seen.add(id(data.dataset))
            if type(data.sampler) in (RandomSampler, SequentialSampler) and data.batch_size is not None:
                yield Leaf(f"{entry}.sampler.rank", "share", text="all")
            yield from self._data(f"{entry}.sampler", data.sampler)
        elif issubclass(cls, Sampler):
            for key in _SAMPLER:
                if isinstance(value := getattr(data, key, None), int):
                    yield Leaf(f"{entry}.{key}", "data", value)
            share = getattr(data, "rank", None), getattr(data, "num_replicas", None)
            if issubclass(cls, DistributedSampler) and all(type(one) is int for one in share):
                yield Leaf(f"{entry}.rank", "share", text="{} of {}".format(*share))


def whole_loaders(namespace: Mapping[str, Any]) -> list[str]:
    """Return the loaders that draw from all of their data in random order.

    Empty if another loader draws from a share of the data, because then the others may be intended.

    Args:
        namespace: variables.

    Example:
        >>> whole_loaders({"loader": DataLoader([1, 2, 3, 4], shuffle=True), "test": DataLoader([1, 2])})
        ['loader']
    """
    loaders = {name: one for name, one in namespace.items() if issubclass(type(one), DataLoader) and name[0] != "_"}
    of_all = [
        name for name, one in loaders.items() if type(one.sampler) is RandomSampler and one.batch_size is not None
    ]
    has_shares = any(issubclass(type(one.sampler), DistributedSampler) for one in loaders.values())
    return [] if has_shares else of_all


def _length(entry: str, data: Any, unit: str) -> Leaf:
    try:
        return Leaf(entry, "data", text=f"{len(data)} {unit}")
    except TypeError:  # a stream has no length, although its loader has `__len__`
        return Leaf(entry, "data", text=f"{type(data).__name__} without a length")
    except Exception as error:
        return unreadable(entry, "data", error)


def unreadable(entry: str, kind: str, error: Exception) -> Leaf:
    text = " ".join(f"unreadable: {with_type(error)}".split())
    return Leaf(entry, kind, text=text[: 2 * _MOST_TEXT], skipped="unreadable")


def _unwrapped(module: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """Return the module inside its wrappers, and the names of all: `"DistributedDataParallel(Net)"`."""
    parallel = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    keys = ["module"] if issubclass(type(module), parallel) else [key for key in _WRAPPERS if key in module._modules]
    inner = module._modules[keys[0]] if keys else None
    if inner is None:
        return module, type(module).__name__
    inner, name = _unwrapped(inner)
    return inner, f"{type(module).__name__}({name})"


def _mode(module: torch.nn.Module) -> str:
    modes = {key: part.training for key, part in torch.nn.Module.named_modules(module)}
    others = [key for key, training in modes.items() if training != module.training]
    most = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    return ("train" if module.training else "eval") + " mode" + (f" except {most}" if others else "")


def _parts(value: Any) -> dict[str, Any] | None:
    """Return the parts of a container by the suffix of their entries.

    None for other values and for containers of plain values.
    """
    cls = type(value)
    if issubclass(cls, Mapping):
        return {f"[{key!r}]": part for key, part in value.items()}
    if issubclass(cls, list | tuple):
        return None if is_plain(value) else {f"[{i}]": part for i, part in enumerate(value)}
    repr_of_any: Any = object.__repr__  # shows nothing of an object's contents
    if cls.__repr__ is repr_of_any or dataclasses.is_dataclass(cls) or issubclass(cls, Namespace | SimpleNamespace):
        return {f".{key}": part for key, part in getattr(value, "__dict__", {}).items()} or None
    return None


def is_plain(values: Any) -> bool:
    return all(type(value) in _SCALARS for value in values)


def _random(kind: str) -> Iterator[Leaf]:
    yield Leaf("random state of torch", kind, torch.default_generator)
    if torch.cuda.is_initialized():
        yield Leaf("random state of CUDA", kind, torch.cuda.default_generators[torch.cuda.current_device()])
    # The generators of these modules are only reachable through their functions.
    yield Leaf("random state of NumPy", kind, np.random.get_state.__self__)  # type: ignore[attr-defined]
    yield Leaf("random state of Python", kind, random.getstate.__self__)  # type: ignore[attr-defined]


def _versions() -> Iterator[Leaf]:
    versions = {"Python": platform.python_version(), "torch": torch.__version__, "NumPy": np.__version__}
    versions |= {"CUDA": torch.version.cuda or "none"}
    if torch.version.hip:
        versions |= {"ROCm": torch.version.hip}
    for name, version in versions.items():
        yield Leaf(f"{name} version", "version", text=str(version))
    settings = {
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cuDNN deterministic": torch.backends.cudnn.deterministic,
        "cuDNN benchmark": torch.backends.cudnn.benchmark,
    }
    with contextlib.suppress(RuntimeError):  # it was set through both interfaces of torch
        settings["float32 matmul precision"] = torch.get_float32_matmul_precision()
    for name, setting in settings.items():
        yield Leaf(name, "setting", text=str(setting).removeprefix("torch."))


_OUTSIDE = "outside DistributedDataParallel"
_IGNORED = "ignored by DistributedDataParallel"
_MARKED = "marked as local to the rank"
_BUFFERS_OF_DDP = "DistributedDataParallel sends buffers of rank 0 at the next forward pass, not after it"
_OWN_BUFFERS = "DistributedDataParallel was created with broadcast_buffers=False"
_BUFFERS_OF_FSDP = "FSDP does not synchronize buffers"


class ByDesign:
    """Parameters, buffers and modules of this rank that may differ from those of other ranks.

    Args:
        variables: variables of the user.

    Example:
        >>> ByDesign({"model": torch.nn.Linear(1, 1)}).reasons
        {}
    """

    def __init__(self, variables: Mapping[str, Any]) -> None:
        # "stage 0 of 2" by id of a module, parameter or buffer; for DDP in a smaller group "replicas on ranks 0-1"
        self.stages: dict[int, str] = {}
        self.reasons: dict[int, str] = {}  # reason by id of a parameter or buffer
        for stage in _stages():
            with contextlib.suppress(Exception):  # attributes of torch that a version may lack
                self._add_stage(stage.submod, f"stage {stage.stage_index} of {stage.num_stages}")
        for value in variables.values():
            if issubclass(type(value), torch.nn.Module):
                with contextlib.suppress(Exception):  # a module of the user may raise anything
                    self._add_model(value)

    def _add_stage(self, module: torch.nn.Module, name: str) -> None:
        for part in torch.nn.Module.modules(module):
            self.stages[id(part)] = name
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                if tensor is not None:
                    self.stages[id(tensor)] = name

    def _add_model(self, model: torch.nn.Module) -> None:
        wrapped: set[int] = set()  # ids of parameters in DistributedDataParallel
        for part in torch.nn.Module.modules(model):
            if issubclass(type(part), DistributedDataParallel):
                wrapped |= self._add_wrapped(part)
                ranks = get_process_group_ranks(vars(part)["process_group"])
                if 1 < len(ranks) < get_world_size():  # other groups may train another model, or other shards
                    self._add_stage(part, f"replicas on {list_ranks(sorted(ranks))}")
            elif hasattr(part, "unshard") and hasattr(part, "reshard"):  # an FSDPModule
                self._add_buffers(part, _BUFFERS_OF_FSDP)
        for parameter in torch.nn.Module.parameters(model):
            if getattr(parameter, "allreduce", True) is False or getattr(parameter, "tensor_model_parallel", False):
                self.reasons[id(parameter)] = _MARKED  # conventions of Megatron and DeepSpeed
            elif wrapped and id(parameter) not in wrapped:
                self.reasons.setdefault(id(parameter), _OUTSIDE)

    def _add_wrapped(self, ddp: Any) -> set[int]:
        """Add the buffers of a DDP model, and the tensors that it ignores. Return the ids of its parameters."""
        self._add_buffers(ddp, _BUFFERS_OF_DDP if ddp.broadcast_buffers else _OWN_BUFFERS)
        ignored = set(ddp.parameters_to_ignore)
        named = (*torch.nn.Module.named_parameters(ddp.module), *torch.nn.Module.named_buffers(ddp.module))
        for name, tensor in named:
            if name in ignored:
                self.reasons[id(tensor)] = _IGNORED
        return {id(parameter) for parameter in torch.nn.Module.parameters(ddp)}

    def _add_buffers(self, module: torch.nn.Module, reason: str) -> None:
        for buffer in torch.nn.Module.buffers(module):
            self.reasons[id(buffer)] = reason


def _stages() -> Iterator[Any]:
    """Yield the stages of pipelines. They can only exist if torch's module was imported."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    base = getattr(module, "_PipelineStageBase", None) or getattr(module, "PipelineStage", None)
    if base is not None:
        yield from (one for one in gc.get_objects() if issubclass(type(one), base))
