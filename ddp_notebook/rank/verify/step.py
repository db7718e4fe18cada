"""Evaluate the loss of a training step and its gradients, in the user's namespace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ddp_notebook.rank.verify import batches
from ddp_notebook.rank.verify.coverage import Coverage
from ddp_notebook.rank.verify.noise import Draws
from ddp_notebook.stdlib import contextlib, os

OF_WORLD = ("world_size", "rank", "local_rank")  # variables of each rank


class StepError(Exception):
    """The step cannot be computed. The message is a sentence for the user."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step as code.

    Args:
        before: statements before the loss, such as `out = model(x)`; "": none.
        loss: expression whose value is differentiated.
        after: statements between `backward` and the optimizer's step; "": none.
        batch: names of the variables with this rank's part of the batch.
        selects: the batch are those of the names that are tensors, or containers of tensors.
        micro: number of micro-steps of one optimizer step.
        divides: divide the loss of each micro-step by their number. False: their gradients are added.
    """

    before: str = ""
    loss: str
    after: str = ""
    batch: Sequence[str]
    selects: bool = False
    micro: int = 1
    divides: bool = True


@dataclass(kw_only=True)
class Run:
    """Result of one evaluation.

    Attributes:
        loss: value of the loss, the mean of all micro-steps.
        gradients: gradients by parameter name. Parameters without a gradient are missing.
        by_rows: the same, with micro-steps that count by their number of samples; empty if they are equal.
        dtypes: types of the tensors that autograd has saved, such as bfloat16 in autocast.
        drew_random: random numbers were drawn.
        saved_bytes: size of the tensors that autograd has saved for the backward pass, without parameters.
        variables: the variables that the step has assigned, before the statements after `backward`.
        shards: this rank's shards of sharded gradients, before these statements.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    by_rows: dict[str, torch.Tensor] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)
    drew_random: bool = False
    saved_bytes: int = 0
    variables: dict[str, Any] = field(default_factory=dict)
    shards: dict[str, torch.Tensor] = field(default_factory=dict)


def evaluate(
    step: Step,
    namespace: MutableMapping[str, Any],
    coverage: Coverage,
    values: Mapping[str, Any],
    *,
    syncs: Callable[[bool], object] = lambda _: None,
    is_together: bool = False,
    weighs: bool = False,
    draws: Draws | None = None,
) -> Run:
    """Compute the gradients of one step.

    Args:
        values: the part of the batch, by name.
        syncs: called before each micro-step, with whether it is the last one.
        is_together: all ranks compute the step: also run the statements after `backward`.
        weighs: also compute `Run.by_rows`.
        draws: watches the forward passes.

    Raises:
        StepError: the loss is no scalar tensor with a gradient.
        Exception: any error of the user's code.
    """
    outside = dict(namespace)
    parameters = coverage.parameters()
    for parameter in parameters.values():
        parameter.grad = None
    coverage.flat.clear_gradients()
    pieces = batches.split(values, step.micro)
    rows = [batches.rows_of(piece) for piece in pieces]
    sums = _RowSums() if weighs and len(set(rows)) > 1 else None
    total, saved = 0.0, _SavedTensors(parameters.values())
    for number, piece in enumerate(pieces, 1):
        syncs(number == len(pieces))
        namespace.update(piece)
        saved.begin()
        with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
            with contextlib.nullcontext() if draws is None else draws.watched():
                loss = _loss(step, namespace)
            saved.end()
            if not is_together:  # the leaves of that graph are parameters that FSDP frees
                coverage.note_leaves(loss, piece)
            total += float(loss.detach()) / len(pieces)
            (loss / len(pieces) if step.divides and len(pieces) > 1 else loss).backward()
        if sums is not None:
            sums.add(coverage.parameters(), rows[number - 1])
    variables: dict[str, Any] = {}
    shards: dict[str, torch.Tensor] = {}
    if is_together and step.after:
        shards = _shards(coverage.parameters())
        variables = {name: _copy(namespace[name]) for name in namespace if namespace[name] is not outside.get(name)}
        exec(_compiled(step.after, "exec"), namespace)  # type: ignore[arg-type]
    if is_together:
        coverage.flat.take_gradients()
    return Run(
        loss=total,
        gradients=_take_gradients(coverage.parameters()),  # with those of the graph
        by_rows={} if sums is None else sums.mean(),
        dtypes=saved.dtypes,
        saved_bytes=saved.most_bytes,
        variables=variables,
        shards=shards,
    )


def _shards(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of this rank's shards of the gradients that are sharded over all ranks, by name."""
    return {
        name: one.to_local().detach().clone()
        for name, parameter in parameters.items()
        if isinstance(one := parameter.grad, DTensor) and one.device_mesh.ndim == 1 and one.placements[0].is_shard()
    }


def _take_gradients(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # Copies: with gradient_as_bucket_view, DDP overwrites them.
    found = {name: _dense(one.grad).clone() for name, one in parameters.items() if one.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return found


class _SavedTensors:
    """Types and sizes of the tensors that autograd saves for the backward pass.

    Args:
        parameters: tensors whose memory does not count.

    Attributes:
        dtypes: floating point types of the tensors.
        most_bytes: size of the tensors of the largest micro-step.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._own = {one.untyped_storage()._cdata for one in parameters if type(one) is torch.nn.Parameter}
        self._sizes: dict[int, int] = {}  # by storage
        self.dtypes: set[torch.dtype] = set()
        self.most_bytes = 0

    def begin(self) -> None:
        """Count the tensors of another micro-step."""
        self._sizes.clear()

    def end(self) -> None:
        """Note the size of the tensors of this micro-step, after its forward pass."""
        self.most_bytes = max(self.most_bytes, sum(self._sizes.values()))

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor, and return it."""
        if tensor.is_floating_point():
            self.dtypes.add(tensor.dtype)
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if is_plain and (storage := tensor.untyped_storage())._cdata not in self._own:
            self._sizes[storage._cdata] = storage.nbytes()
        return tensor


def _copy(value: Any) -> Any:
    """Return a copy of a tensor, which later statements may change in place."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient


class _RowSums:
    """Sums of the gradients of micro-steps, each times its number of samples."""

    def __init__(self) -> None:
        self._totals: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}  # accumulated gradients before the last micro-step
        self._rows: list[int] = []

    def add(self, parameters: Mapping[str, torch.Tensor], rows: int) -> None:
        """Add the part of the accumulated gradients that the last micro-step has added."""
        self._rows.append(rows)
        for name, one in parameters.items():
            if one.grad is not None:
                gradient = _dense(one.grad).clone()
                nothing = torch.zeros_like(gradient)
                part = gradient - self._before.get(name, nothing)
                self._totals[name] = self._totals.get(name, nothing) + part * rows
                self._before[name] = gradient

    def mean(self) -> dict[str, torch.Tensor]:
        """Return the sums with weights whose mean is 1."""
        factor = len(self._rows) / sum(self._rows)
        return {name: one * factor for name, one in self._totals.items()}


def _compiled(source: str, mode: str) -> Any:
    return compile(source, "<step>", mode)


def _loss(step: Step, namespace: MutableMapping[str, Any]) -> torch.Tensor:
    if step.before:
        exec(_compiled(step.before, "exec"), namespace)  # type: ignore[arg-type]
    loss = eval(_compiled(step.loss, "eval"), namespace)  # type: ignore[arg-type]
    if not isinstance(loss, torch.Tensor):
        raise StepError(
            f"the loss must be a tensor, but {step.loss} is of type {type(loss).__name__}{_remedy(step, loss)}"
        )
    if loss.numel() != 1:
        raise StepError(
            f"the loss must be one number, but {step.loss} has the shape {tuple(loss.shape)}: add .mean() or .sum()"
        )
    if not loss.requires_grad:
        raise StepError(f"{step.loss} has no gradient: no parameter with requires_grad takes part in it")
    return loss


def _remedy(step: Step, outputs: Any) -> str:
    """Return a remedy for outputs of a model that contain the loss, such as those of Hugging Face models."""
    if isinstance(outputs, tuple) and outputs and _is_loss(outputs[0]):
        return f": use {step.loss}[0]"
    if _is_loss(getattr(outputs, "loss", None)):
        return f": use {step.loss}.loss"
    return f": use {step.loss}['loss']" if isinstance(outputs, dict) and _is_loss(outputs.get("loss")) else ""


def _is_loss(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad


@contextlib.contextmanager
def one_process(namespace: MutableMapping[str, Any], world_size: int = 1) -> Iterator[None]:
    """Let code of the user see itself as rank 0: `world_size`, `rank` and the functions of torch.

    Args:
        namespace: the user's variables.
        world_size: number of ranks that the code sees.
    """
    sizes = {id(dist.get_world_size): _one(dist.get_world_size, world_size), id(dist.get_rank): _one(dist.get_rank, 0)}
    names = {name: sizes[id(value)] for name, value in namespace.items() if id(value) in sizes}
    before = {name: namespace[name] for name in names}
    before |= {name: namespace[name] for name in OF_WORLD if isinstance(namespace.get(name), int)}
    functions = dist.get_world_size, dist.get_rank
    environment = {name: os.environ[name] for name in ("WORLD_SIZE", "RANK") if name in os.environ}
    numbers = {"world_size": world_size, "rank": 0, "local_rank": 0}
    try:
        namespace.update({name: numbers[name] for name in before if name in numbers} | names)
        os.environ.update({name: str(numbers[name.lower()]) for name in environment})
        dist.get_world_size, dist.get_rank = (sizes[id(one)] for one in functions)
        yield
    finally:
        dist.get_world_size, dist.get_rank = functions
        os.environ.update(environment)
        namespace.update(before)


def _one(function: Callable[..., int], value: int) -> Callable[..., int]:
    def for_default_group(group: Any = None) -> int:
        return value if group is None or group is dist.group.WORLD else function(group)

    return for_default_group
