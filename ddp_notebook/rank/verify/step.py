"""Evaluate the loss of a training step and its gradients, in the user's namespace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ddp_notebook.rank.verify import batches
from ddp_notebook.rank.verify.coverage import Coverage
from ddp_notebook.stdlib import contextlib, os


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
    """

    before: str = ""
    loss: str
    after: str = ""
    batch: Sequence[str]
    selects: bool = False
    micro: int = 1


@dataclass(kw_only=True)
class Run:
    """Result of one evaluation.

    Attributes:
        loss: value of the loss, the mean of all micro-steps.
        gradients: gradients by parameter name. Parameters without a gradient are missing.
        dtypes: types of the tensors that autograd has saved, such as bfloat16 in autocast.
        drew_random: random numbers were drawn.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    dtypes: set[torch.dtype] = field(default_factory=set)
    drew_random: bool = False


def evaluate(
    step: Step,
    namespace: MutableMapping[str, Any],
    coverage: Coverage,
    values: Mapping[str, Any],
    *,
    syncs: Callable[[bool], object] = lambda _: None,
    runs_after: bool = False,
) -> Run:
    """Compute the gradients of one step.

    Args:
        values: the part of the batch, by name.
        syncs: called before each micro-step, with whether it is the last one.
        runs_after: also run the statements after `backward`.

    Raises:
        StepError: the loss is no scalar tensor with a gradient.
        Exception: any error of the user's code.
    """
    parameters = coverage.parameters()
    for parameter in parameters.values():
        parameter.grad = None
    total, dtypes = 0.0, set[torch.dtype]()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            dtypes.add(tensor.dtype)
        return tensor

    pieces = batches.split(values, step.micro)
    for number, piece in enumerate(pieces, 1):
        syncs(number == len(pieces))
        namespace.update(piece)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = _loss(step, namespace)
            coverage.note_leaves(loss, piece)
            total += float(loss.detach()) / len(pieces)
            (loss / len(pieces) if len(pieces) > 1 else loss).backward()
    if runs_after and step.after:
        exec(_compiled(step.after, "exec"), namespace)  # type: ignore[arg-type]
    parameters = coverage.parameters()  # with those of the graph
    # Copies: with gradient_as_bucket_view, DDP overwrites them.
    found = {name: one.grad.detach().clone() for name, one in parameters.items() if one.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return Run(loss=total, gradients=found, dtypes=dtypes)


def _compiled(source: str, mode: str) -> Any:
    return compile(source, "<step>", mode)


def _loss(step: Step, namespace: MutableMapping[str, Any]) -> torch.Tensor:
    if step.before:
        exec(_compiled(step.before, "exec"), namespace)  # type: ignore[arg-type]
    loss = eval(_compiled(step.loss, "eval"), namespace)  # type: ignore[arg-type]
    if not isinstance(loss, torch.Tensor):
        raise StepError(f"the loss must be a tensor, but {step.loss} is of type {type(loss).__name__}")
    if loss.numel() != 1:
        raise StepError(
            f"the loss must be one number, but {step.loss} has the shape {tuple(loss.shape)}: add .mean() or .sum()"
        )
    if not loss.requires_grad:
        raise StepError(f"{step.loss} has no gradient: no parameter with requires_grad takes part in it")
    return loss


@contextlib.contextmanager
def one_process(namespace: MutableMapping[str, Any]) -> Iterator[None]:
    """Let code of the user see a world of one rank: `world_size`, `rank` and the functions of torch."""
    sizes = {id(dist.get_world_size): _one(dist.get_world_size, 1), id(dist.get_rank): _one(dist.get_rank, 0)}
    names = {name: sizes[id(value)] for name, value in namespace.items() if id(value) in sizes}
    before = {name: namespace[name] for name in names}
    numbers = {"world_size": 1, "rank": 0, "local_rank": 0}
    before |= {name: namespace[name] for name in numbers if isinstance(namespace.get(name), int)}
    functions = dist.get_world_size, dist.get_rank
    environment = {name: os.environ[name] for name in ("WORLD_SIZE", "RANK") if name in os.environ}
    try:
        namespace.update({name: numbers[name] for name in before if name in numbers} | names)
        os.environ.update({name: {"WORLD_SIZE": "1", "RANK": "0"}[name] for name in environment})
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
