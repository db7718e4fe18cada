"""Parameters of a training step by name, and the wrappers that average their gradients."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ddp_notebook.rank.variables.snapshot import is_stale
from ddp_notebook.rank.verify import batches
from ddp_notebook.rank.verify.fsdp1 import FlatModels
from ddp_notebook.rank.verify.model_state import ModelState
from ddp_notebook.rank.verify.reads import names_read
from ddp_notebook.stdlib import re

_WRAPPERS = re.compile(r"(?:\b|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_WRAPPED = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)


class Coverage:
    """Parameters by name, with the wrappers that average their gradients.

    Names of the main model have no prefix. Names of other models begin with their variable.

    Args:
        namespace: the user's variables.
        main: name of the variable with the main model.
        state: the saved state, with all modules of the process.
        batch: the batch by name. Its tensors are no parameters, even if they have `requires_grad`.

    Attributes:
        is_sharded: a parameter of the step is a DTensor. `focus` sets it.
        in_graph: names of the parameters on which the loss depends. `note_leaves` sets it.
    """

    def __init__(
        self,
        namespace: Mapping[str, Any],
        main: str,
        state: ModelState,
        batch: Mapping[str, Any],
    ) -> None:
        self._namespace = namespace
        self._batch = set(batch)
        self._batch_ids = _ids_of_batch(batch)
        self.in_graph: set[str] = set()
        self._main = main
        self._unnamed: dict[str, torch.Tensor] = {}  # leaves of the graph without a name
        self._state = state
        modules = state.modules
        self.ddp = [one for one in modules if isinstance(one, DistributedDataParallel)]
        self.fsdp1 = [one for one in modules if isinstance(one, FullyShardedDataParallel)]
        self.fsdp2 = [one for one in modules if isinstance(one, FSDPModule)]
        self.roots = dict(self._roots())
        self._places: dict[int, tuple[str, str, torch.nn.Module]] = {}
        wrappers: dict[int, FullyShardedDataParallel] = {}  # in the same order on each rank
        for prefix, root in self.roots.items():
            for path, module in torch.nn.Module.named_modules(root):
                self._places.setdefault(id(module), (prefix, path, root))
                if isinstance(module, FullyShardedDataParallel):
                    wrappers[id(module)] = module
        self.flat = FlatModels(wrappers.values(), self._name_of)
        self._flat_ids = self.flat.managed()
        # Sharded parameters, which a step on one process replaces in their modules.
        self._owned = {id(one): one for root in self.roots.values() for one in torch.nn.Module.parameters(root)}
        self.is_sharded = False

    def _name_of(self, module: torch.nn.Module, name: str) -> str:
        """Return the name of a parameter of a module."""
        prefix, path, root = self._places[id(module)]
        return prefix + plain_name(f"{path}.{name}" if path else name, root)

    def focus(self, names: Iterable[str]) -> None:
        """Keep only the wrappers of these parameters. Other models of the process do not take part in the step.

        Args:
            names: parameters with a gradient.
        """
        names, tensors = list(names), self.tensors()
        own = {id(tensors[name]) for name in names if name in tensors}

        def has_own(module: torch.nn.Module) -> bool:
            return any(id(one) in own for one in torch.nn.Module.parameters(module))

        self.ddp = [one for one in self.ddp if has_own(one)]
        self.fsdp2 = [one for one in self.fsdp2 if has_own(one)]
        self.fsdp1 = [one for one in self.fsdp1 if id(one) in self._places] if set(names) - set(tensors) else []
        self.is_sharded = bool(self.fsdp1) or any(isinstance(tensors.get(name), DTensor) for name in names)

    def modules_of(self, names: Iterable[str]) -> list[torch.nn.Module]:
        """Return the modules in variables with one of these parameters, with the modules around them."""
        tensors = self.tensors()
        own = {id(tensors[name]) for name in names if name in tensors}
        found = {id(one): one for root in self.roots.values() for one in torch.nn.Module.modules(root)}
        return [one for one in found.values() if any(id(p) in own for p in torch.nn.Module.parameters(one))]

    def _roots(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the modules in variables, the main model first, each once with the prefix of its names."""
        namespace, seen = self._namespace, set[int]()
        first = [self._main] if isinstance(namespace.get(self._main), torch.nn.Module) else []
        rest = [name for name in namespace if not name.startswith("_") and name != self._main]
        for name in (*first, *sorted(rest)):
            value = namespace[name]
            if isinstance(value, torch.nn.Module) and id(value) not in seen:
                seen.add(id(value))
                yield ("" if name == self._main else f"{name}."), value

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all parameters with values by name, frozen ones too."""
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for prefix, module in self.roots.items():
            for name, parameter in torch.nn.Module.named_parameters(module):
                if id(parameter) not in seen and id(parameter) not in self._flat_ids and has_values(parameter):
                    seen.add(id(parameter))
                    found[prefix + plain_name(name, module)] = parameter
        for name, value in self._namespace.items():
            is_tensor = isinstance(value, torch.Tensor) and not is_stale(value) and has_values(value)
            is_leaf = is_tensor and value.is_leaf and value.requires_grad
            is_batch = name in self._batch or id(value) in self._batch_ids
            is_own = not is_batch and not name.startswith("_")
            if is_leaf and is_own and id(value) not in seen and id(value) not in self._owned:
                seen.add(id(value))
                found.setdefault(name, value)
        return found | self._unnamed

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers of the models in variables, by name."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for prefix, module in self.roots.items():
            for name, buffer in torch.nn.Module.named_buffers(module):
                found.setdefault(id(buffer), (prefix + plain_name(name, module), buffer))
        return dict(found.values())

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters with `requires_grad` by name."""
        return {name: one for name, one in self.tensors().items() if one.requires_grad}

    def note_leaves(self, loss: torch.Tensor, batch: Mapping[str, Any]) -> None:
        """Note the parameters that the loss depends on, and add those that no variable holds."""
        names = {id(one): name for name, one in self.tensors().items()}
        samples = self._batch_ids | _ids_of_batch(batch)
        for leaf in _leaves(loss):
            is_made = not isinstance(leaf, torch.nn.Parameter) and not self._state.reaches(leaf)
            if id(leaf) in samples or (is_made and id(leaf) not in names):
                continue  # a sample, or a tensor that the step has made
            if id(leaf) not in names:
                names[id(leaf)] = name = f"unnamed parameter {len(self._unnamed) + 1}"
                self._unnamed[name] = leaf
            self.in_graph.add(names[id(leaf)])

    def group_of(self) -> list[int]:
        """Return the ranks over which gradients are averaged, this rank among them. Call `focus` first."""
        for model in self.ddp:
            return list(dist.get_process_group_ranks(model.process_group))
        if self.fsdp1:
            return self.flat.ranks()
        for module in self.fsdp2:
            for group in param_groups(module):
                return sorted(group.mesh_info.mesh.mesh.flatten().tolist())
        return [dist.get_rank()] if self.is_sharded else list(range(dist.get_world_size()))

    def wrapper(self) -> str:
        """Return the kind of parallelism: "ddp", "fsdp1", "fsdp2", "tensor" or "none". Call `focus` first."""
        if self.ddp or self.fsdp1:
            return "ddp" if self.ddp else "fsdp1"
        return "fsdp2" if self.fsdp2 else "tensor" if self.is_sharded else "none"

    def causes(self) -> dict[str, str]:
        """Return why no wrapper averages the gradient of a parameter, by name. Covered parameters are missing.

        "ignored": DDP was made to ignore it. "converted": it had another type when the model was wrapped. "late": it
        joined the DDP model later, or was frozen before. "unmanaged": it is in an FSDP model, which does not shard it.
        "outside": it is in no wrapped module.
        """
        covered, ignored, inside, unmanaged = set[int](), set[int](), set[int](), set[int]()
        converted: set[int] = set()
        for model in self.ddp:
            skipped = model.parameters_to_ignore
            reduced = _reduced(model)
            for name, one in model.module.named_parameters():
                inside.add(id(one))
                if name in skipped:
                    ignored.add(id(one))
                elif reduced.get(id(one), one.dtype) != one.dtype and model.mixed_precision is None:
                    converted.add(id(one))
                elif id(one) in reduced:
                    covered.add(id(one))
        for module in self.fsdp2:
            for state_group in param_groups(module):
                covered |= {id(one.sharded_param) for one in state_group.fsdp_params}
        for wrapper in (*self.fsdp1, *self.fsdp2):
            unmanaged |= {id(one) for one in torch.nn.Module.parameters(wrapper)}
        sets = {"ignored": ignored, "converted": converted, "late": inside, "unmanaged": unmanaged}
        return {
            name: next((why for why, ids in sets.items() if id(one) in ids), "outside")
            for name, one in self.parameters().items()
            if id(one) not in covered and not (isinstance(one, DTensor) and self.wrapper() == "tensor")
        }

    def user_hooks(self) -> dict[str, torch.Tensor]:
        """Return the parameters with hooks on their gradient, by name."""
        return {name: one for name, one in self.parameters().items() if one._backward_hooks}

    def local_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters with `requires_grad` by name, and the shards of sharded ones."""
        found = self.parameters()
        return {name: one.to_local() if isinstance(one, DTensor) else one for name, one in found.items()}

    def steps_in_backward(self, names: Iterable[str]) -> str:
        """Return a clause if an optimizer may step during backward, which changes or clears gradients, else "".

        Args:
            names: variables with models and parameters of the step, or names of parameters.
        """
        names, variables = set(names), {id(one) for name in names for one in _parameters_of(self._namespace.get(name))}
        for name, one in self.parameters().items():
            if name not in names and id(one) not in variables:
                continue
            if getattr(one, "_in_backward_optimizers", None):
                return f"an optimizer steps {name} in backward (_apply_optimizer_in_backward), and clears its gradient"
            if getattr(one, "_post_accumulate_grad_hooks", None):
                return (
                    f"{name} has a hook that runs after its gradient is complete, such as an optimizer step in "
                    "backward: the gradient cannot be compared"
                )
        return ""


def param_groups(module: FSDPModule) -> list[Any]:
    """Return the groups of parameters that FSDP2 gathers together for a module. torch 2.11 has at most one."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _parameters_of(value: object) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        return torch.nn.Module.parameters(value)
    return [value] if isinstance(value, torch.Tensor) else []


def _ids_of_batch(batch: Mapping[str, Any]) -> set[int]:
    return {id(one) for one in batches.tensors_of(batch)}


def _reduced(model: DistributedDataParallel) -> dict[int, torch.dtype]:
    """Return the types of the buckets of a DDP model, by the ids of their parameters."""
    try:
        buckets = model.reducer._get_zeros_like_grad_buckets()
    except RuntimeError:  # a bucket of sparse gradients has no memory yet
        return {id(one): one.dtype for one in model._module_parameters}
    return {id(one): bucket.buffer().dtype for bucket in buckets for one in bucket.parameters()}


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values in memory, one after the other.

    A lazy parameter, a tensor on the device "meta" and a sparse tensor have none.

    Example:
        >>> has_values(torch.ones(2)), has_values(torch.nn.LazyLinear(1).weight)
        (True, False)
    """
    return not is_lazy(tensor) and not tensor.is_meta and tensor.layout is torch.strided


def main_module(namespace: Mapping[str, Any], code: str) -> str:
    """Return the first variable in the code that is a wrapped model, or else a module; "" if there is none.

    If the code has no module, the variables that its functions read are searched.

    Example:
        >>> main_module({"f": print, "net": torch.nn.Linear(1, 1)}, "f(net(x))")
        'net'
    """
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    nodes.sort(key=lambda node: (node.lineno, node.col_offset))
    names = [node.id for node in nodes if isinstance(namespace.get(node.id), torch.nn.Module)]
    if not names:
        read = sorted(names_read(code, namespace))
        names = [name for name in read if isinstance(namespace.get(name), torch.nn.Module)]
    wrapped = [name for name in names if isinstance(getattr(one := namespace[name], "_orig_mod", one), _WRAPPED)]
    return next(iter((*wrapped, *names)), "")


def plain_name(name: str, root: torch.nn.Module) -> str:
    """Return a parameter's name without the wrappers.

    Example:
        >>> plain_name("_orig_mod.0.weight", torch.nn.Linear(1, 1))
        '0.weight'
    """
    name = _WRAPPERS.sub("", name)
    inner = getattr(root, "_orig_mod", root)
    return name.removeprefix("module.") if isinstance(inner, DistributedDataParallel) else name


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the leaf tensors of a loss's graph."""
    if loss.grad_fn is None:
        yield loss
        return
    seen, open_nodes = {loss.grad_fn}, [loss.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                open_nodes.append(below)
