"""Parameters of an optimizer, and the DDP models that contain them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed import get_process_group_ranks, get_world_size
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.findings.tensor_checks import are_zero, sample
from ddp_notebook.rank.record.training.buckets import Model
from ddp_notebook.stdlib import gc, weakref

_MOST_NAMES = 6
UNKNOWN = "one of shape"  # begin of the description of a parameter without a name


class SinceAverage:
    """Events since the last backward of a DDP model that averaged gradients.

    Args:
        backwards: backwards of the cell until then.
        elements: elements that were communicated until then.
        version: see `version_of`.
    """

    __slots__ = ("again", "backwards", "elements", "in_no_sync", "version")

    def __init__(self, backwards: int, elements: int, version: tuple[int, int]) -> None:
        self.backwards, self.elements, self.version = backwards, elements, version
        self.in_no_sync = 0  # forwards under `no_sync` since then
        self.again = 0  # backwards since then that added to the gradients, without another forward


def version_of(model: Any) -> tuple[int, int]:
    """Return the id and the version of the first gradient of a model, which change if another backward adds to it."""
    gradients = (p.grad for p in model.parameters())
    first = next((one for one in gradients if one is not None), None)
    return (0, 0) if first is None or first.is_inference() else (id(first), first._version)


class ModelCounts:
    """Forwards and backwards of one DDP model in the running cell.

    Args:
        model: returns the model.
    """

    __slots__ = (
        *("at_reduction", "before", "complete", "in_no_grad", "in_no_sync", "model", "reduced", "since"),
        "synchronizing",
    )

    def __init__(self, model: Callable[[], Any]) -> None:
        self.model = model
        self.at_reduction = -1  # forwards at the last backward that averaged all buckets
        self.before: tuple[int, int] | None = None  # see `version_of`: before a backward without a forward
        self.synchronizing = 0  # forwards whose backward averages gradients
        self.in_no_sync = 0  # forwards under `no_sync`
        self.in_no_grad = 0  # forwards without gradients
        self.reduced = 0  # backwards with at least one averaged bucket
        self.complete = False  # the last of them has averaged all buckets
        self.since = SinceAverage(0, 0, (0, 0))

    @property
    def forwards(self) -> int:
        """Return the number of forwards with gradients."""
        return self.synchronizing + self.in_no_sync

    def begin_backward(self) -> None:
        """Remember the gradients, if they are averaged and no forward came since then."""
        if self.forwards == self.at_reduction:
            model = self.model()
            self.before = None if model is None else version_of(model)

    def end_backward(self) -> None:
        """Count a backward that has added to averaged gradients."""
        before, self.before = self.before, None
        if before is not None and before != (0, 0) and (model := self.model()) is not None:
            self.since.again += version_of(model) != before

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.synchronizing, self.in_no_sync, self.in_no_grad, self.reduced


class OptimizerParameters:
    """Parameters of one optimizer.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)  # a reference to its parameters would keep a deleted model in memory
        parameters = self.parameters
        self.count = len(parameters)
        self.ids = {id(p) for p in parameters}
        self._last = id(parameters[-1]) if parameters else 0
        self.models: list[tuple[Callable[[], Any], Model, list[int]]] = []  # models with the indices of parameters
        self.models_made = -1
        self.begin_cell()

    @property
    def optimizer(self) -> Any:
        """Return the optimizer; None if it was deleted."""
        return self._optimizer()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters; empty if the optimizer was deleted."""
        optimizer = self._optimizer()
        return [] if optimizer is None else held_by(optimizer)

    def begin_cell(self) -> None:
        """Forget the steps of the last cell."""
        self.steps = 0  # in this cell
        self.backwards = 0  # number in the cell, at the last step
        self.forwards = 0
        self.operations = -1
        self.elements = 0
        self.counts: dict[str, tuple[int, int, int, int]] = {}  # counts by model, at the last step
        self.moved = 0  # most elements that were communicated between two steps
        self.apart: tuple[int, str, str] | None = None  # step, model and cause of a step without averaging
        self.before: set[int] | None = None  # parameters that had a gradient before the step; None if unknown
        self.was_finite: bool | None = None  # the parameters were, before the step; None if unknown
        self.is_zeroed = False  # the step itself has set gradients to zero
        self.noted_apart: tuple[int, str, str] | None = None  # the first one of two consecutive such steps
        # Name, step and details of a fact about missing gradients: noted at the end of the cell if none came later
        self.pending: tuple[str, int, dict[str, Any]] | None = None
        self.zero: list[int] = []  # consecutive steps with zero gradients
        self.not_zero = 0  # index of a gradient that was not zero
        self.is_noted = False  # a step without any gradient was noted
        self.has_no_rate = True  # the learning rate was zero in each step
        self.has_gradients = True  # at the last step
        self.idle = 0  # consecutive steps without any backward
        self.never: set[int] | None = None  # parameters that had no gradient in any step of the cell
        self.first_step = self.last_step = 0

    @property
    def is_current(self) -> bool:
        """Return whether the optimizer still has these parameters."""
        parameters = self.parameters
        return len(parameters) == self.count and (not parameters or id(parameters[-1]) == self._last)

    def find_models(self, models: Iterable[tuple[DistributedDataParallel, Model]], models_made: int) -> None:
        """Find the DDP models that contain parameters of the optimizer."""
        self.models_made, self.models = models_made, []
        for model, known in models:
            inside = {id(p) for p in parameters_of(model).values()}
            if indices := [i for i, p in enumerate(self.parameters) if id(p) in inside]:
                self.models.append((known.reference, known, indices))

    @property
    def elements_of_models(self) -> int:
        """Return the number of elements of the parameters in DDP models."""
        parameters = self.parameters
        return sum(parameters[i].numel() for _, _, indices in self.models for i in indices if i < len(parameters))

    @property
    def are_sharded(self) -> bool:
        """Return whether some of the parameters are split over several ranks."""
        parts: list[Any] = [p for p in self.parameters if hasattr(p, "placements")]
        return any(
            one.is_shard() and p.device_mesh.size(dim) > 1 for p in parts for dim, one in enumerate(p.placements)
        )

    @property
    def is_trainable(self) -> bool:
        """Return whether a parameter requires a gradient."""
        return any(p.requires_grad for p in self.parameters)


class Unheld:
    """Parameters of one DDP model that no optimizer holds."""

    def __init__(self) -> None:
        self.begin_cell()

    def begin_cell(self) -> None:
        """Forget the parameters of the last cell."""
        self.step = 0  # the step in which they were looked for; 0 before
        self.model: Callable[[], Any] = lambda: None
        self._first: list[tuple[str, Callable[[], Any], torch.Tensor]] = []  # name, parameter and some of its values

    def add(self, step: int, model: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        """Add the parameters of a model. Only those of the first model are kept."""
        self.step = step
        if not self._first and parameters:
            self.model = weakref.ref(model)
            some = parameters.items() if all(one.is_cpu for one in parameters.values()) else ()
            self._first = [(name, weakref.ref(p), sample(p.detach()).clone()) for name, p in some]

    def unchanged(self) -> list[str]:
        """Return the names of those that got gradients and have the same values as at the start, at most a few."""
        names = []
        for name, reference, values in self._first:
            parameter = reference()
            if parameter is None or parameter.grad is None or not torch.equal(sample(parameter.detach()), values):
                return []
            if not are_zero([parameter.grad], 0)[0]:
                names.append(name)
        more = len(names) - _MOST_NAMES
        return [*names[:_MOST_NAMES], f"{more} more"] if more > 0 else names

    def are_held(self) -> bool:
        """Return whether an optimizer holds one of them that is in an object of the user and has made no step yet.

        It takes 0.1 s in a process with a million objects, so it is called only if there is something to report.
        """
        optimizers = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
        held = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
        return any(id(reference()) in held for _, reference, _ in self._first)


def held_by(owner: Any) -> list[torch.Tensor]:
    """Return the parameters of an optimizer or of a module."""
    if isinstance(owner, torch.nn.Module):
        return list(owner.parameters())
    return [p for group in owner.param_groups for p in group["params"]]


def parameters_of(model: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters whose gradients DDP averages, by name."""
    ignored = set(model.parameters_to_ignore)
    return {n: p for n, p in model.module.named_parameters() if p.requires_grad and n not in ignored}


def has_several_ranks(model: DistributedDataParallel) -> bool:
    """Return whether a DDP model is on more than one rank."""
    return get_world_size(model.process_group) > 1


def ranks_of(model: Any) -> list[int]:
    """Return the ranks that average gradients of a DDP model, or of an FSDP model on a mesh of one dimension.

    Returns [] for other meshes: their dimensions may have another purpose than data parallelism.
    """
    if isinstance(model, DistributedDataParallel):
        try:
            return list(map(int, get_process_group_ranks(model.process_group)))
        except (KeyError, ValueError):  # the cell has destroyed the group
            return []
    meshes = [p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")]
    if not meshes or meshes[0].ndim != 1 or any(one != meshes[0] for one in meshes):
        return []
    return [int(rank) for rank in meshes[0].mesh.tolist()]


def variable_of(value: object, namespace: Mapping[str, Any]) -> str:
    """Return the name of the last variable with this value; else the name of its class."""
    names = [name for name, one in list(namespace.items()) if one is value and not name.startswith("_")]
    return names[-1] if names else type(value).__name__


def model_name(model: Any, namespace: Mapping[str, Any]) -> str:
    """Return the variable of a model, or of the module that a DDP model contains; else the name of its class."""
    name = variable_of(model, namespace)
    return type(getattr(model, "module", model)).__name__.removeprefix("FSDP") if name == type(model).__name__ else name


def names_of(parameters: Iterable[torch.Tensor], namespace: Mapping[str, Any], roots: Iterable[Any]) -> list[str]:
    """Return the names of parameters in the models of variables, at most a few; shapes where no name is known."""
    known: dict[int, str] = {}
    for model in [*roots, *(one for one in list(namespace.values()) if issubclass(type(one), torch.nn.Module))]:
        for name, parameter in getattr(model, "module", model).named_parameters():
            known.setdefault(id(parameter), name)
    found = [known.get(id(p), f"{UNKNOWN} {tuple(p.shape)}") for p in parameters]
    more = len(found) - _MOST_NAMES
    return [*found[:_MOST_NAMES], f"{more} more"] if more > 0 else found
