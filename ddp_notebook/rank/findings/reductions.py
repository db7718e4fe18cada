"""Losses that the user's collectives change before `backward()`, and averaged gradients that they sum again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ddp_notebook.rank.findings.optimizer_parameters import OptimizerParameters, has_several_ranks, ranks_of
from ddp_notebook.rank.findings.tensor_checks import sample
from ddp_notebook.rank.group.calls import Call
from ddp_notebook.rank.group.operators import flat
from ddp_notebook.stdlib import weakref

REDUCED = "ddp_notebook reduced"  # key in the metadata of a node: a collective has changed its result
_REDUCES = "all_reduce", "all_reduce_coalesced", "reduce"
_SUM = "SUM"
_MOST = 64  # sums of a cell that are looked at
_MOST_NODES = 8
# Nodes whose result has the value of their input
_SAME_VALUE = {"UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "ViewBackward0", "CloneBackward0"}
_SAME_VALUE |= {"MeanBackward0", "SumBackward0", "ReshapeAliasBackward0", "AliasBackward0"}  # of one element
_PRODUCTS = {"DivBackward0", "MulBackward0"}
_SUMS = {"AddBackward0", "SubBackward0", "NegBackward0"}
_TOLERANCE = 1e-4


class _Sum:
    """A gradient that DDP has averaged, before the user sums it.

    Args:
        parameter: its parameter.
        model: the DDP model.
        size: number of ranks.
    """

    def __init__(self, parameter: torch.Tensor, model: Any, size: int) -> None:
        assert parameter.grad is not None
        self.parameter, self.model, self.size = weakref.ref(parameter), weakref.ref(model), size
        self.before = sample(parameter.grad.detach()).clone()

    @property
    def is_multiplied(self) -> bool:
        """Return whether the gradient is the one before, multiplied by the number of ranks."""
        parameter = self.parameter()
        if parameter is None or parameter.grad is None or not bool(self.before.any()):
            return False
        wanted, now = self.before * self.size, sample(parameter.grad.detach())
        return now.shape == wanted.shape and torch.allclose(now, wanted, rtol=_TOLERANCE, atol=0.0)


class Reductions:
    """Sums of the running cell.

    Args:
        note: keeps a fact.
        averaged: returns the DDP models whose gradients the last backward has averaged completely.
        title: returns the name of a model.
    """

    def __init__(
        self, note: Callable[..., None], averaged: Callable[[], list[Any]], title: Callable[[Any], str]
    ) -> None:
        self._note, self._averaged, self._title = note, averaged, title
        self.are_used = False  # no collective since then
        self._left = _MOST
        self._has_reduced = False  # a loss of the cell
        self._divided: tuple[str, list[int]] | None = None  # collective and ranks, of the loss of a backward
        self._candidate: tuple[str, int, Any] | None = None  # with the number of ranks and the model
        self._sum: _Sum | None = None  # since the last step
        self.sums_without_graph: set[int] = set()  # numbers of elements, since the last step

    def begin_cell(self) -> None:
        """Forget the sums of the last cell."""
        self.are_used = False
        self._left = _MOST
        self._has_reduced = False
        self._divided = self._candidate = self._sum = None
        self.sums_without_graph.clear()

    def begun(self, call: Call) -> None:
        """Look at a collective of the user before it begins."""
        self.are_used = True
        kernel = call.kernel
        if kernel.spec.name not in _REDUCES or kernel.at_tensors is None:
            return
        tensors = flat(call.arguments[kernel.at_tensors])
        is_sum = kernel.reduce_op_of(call.arguments[kernel.at_rest :]) == _SUM
        ranks = sorted(call.group.ranks)
        for tensor in tensors:
            node: Any = tensor.grad_fn
            if node is not None:
                node.metadata[REDUCED] = kernel.spec.name, ranks, is_sum
                self._has_reduced = True
            elif is_sum:
                self.sums_without_graph.add(tensor.numel())
        if is_sum and self._sum is None and self._left and len(tensors) == 1 and len(ranks) > 1 and tensors[0].is_cpu:
            self._left -= 1
            self._look_for_gradient(tensors[0], ranks)

    def _look_for_gradient(self, tensor: torch.Tensor, ranks: list[int]) -> None:
        for model in self._averaged():
            if sorted(ranks_of(model)) == ranks and not model._comm_hooks:  # a hook may not divide
                for parameter in model.parameters():
                    if parameter.grad is tensor:
                        self._sum = _Sum(parameter, model, len(ranks))
                        return

    def backward_begins(self, outputs: Sequence[torch.Tensor]) -> None:
        """Look at the loss of a backward."""
        self._divided = self._candidate = None
        if self._has_reduced and len(outputs) == 1:
            self._divided = _divided(outputs[0].grad_fn)

    def backward(self, models: Sequence[Any], roots: Iterator[Any]) -> None:
        """Note the end of a backward.

        Args:
            models: DDP models with averaged gradients.
            roots: roots of FSDP models that average gradients.
        """
        if self._divided is None:
            return
        function, ranks = self._divided
        averaging = [one for one in models if has_several_ranks(one) and not one._comm_hooks]
        some = list(roots)
        if len(some) > 1:  # it is not known which of them this backward has reached
            return
        for model in (*averaging, *some):
            if sorted(ranks_of(model)) == ranks:
                self._candidate = function, len(ranks), weakref.ref(model)
                return

    def step_begins(self, held: OptimizerParameters, step: int, *, is_only_backward: bool) -> None:
        """Look at the sums before a step.

        Args:
            held: parameters of the optimizer.
            step: number of the step.
            is_only_backward: one backward has run since the last step of the optimizer.
        """
        self.sums_without_graph.clear()
        found, self._sum = self._sum, None
        if found is not None and found.is_multiplied and (model := found.model()) is not None:
            self._note("summed-again", step, model=self._title(model), size=found.size)
        if (candidate := self._candidate) is not None and is_only_backward:
            function, size, reference = candidate
            model = reference()
            if model is not None and any(id(p) in held.ids and p.grad is not None for p in model.parameters()):
                self._note("averaged-loss", step, model=self._title(model), function=function, size=size)


def _divided(node: Any) -> tuple[str, list[int]] | None:
    """Return the collective that has summed a loss, and its ranks, if the loss was then divided by their number.

    Args:
        node: node of the loss.
    """
    factor = 1.0
    for _ in range(_MOST_NODES):
        if node is None:
            return None
        if (reduced := node.metadata.get(REDUCED)) is not None:
            function, ranks, is_sum = reduced
            is_divided = is_sum and len(ranks) > 1 and abs(factor * len(ranks) - 1) < _TOLERANCE
            return (function, ranks) if is_divided and not _may_be_multiplied(node) else None
        inputs = [one for one, _ in node.next_functions if one is not None]
        name = node.name()
        if len(inputs) != 1 or name not in _SAME_VALUE | _PRODUCTS:
            return None
        if name not in _SAME_VALUE:
            # Hooks of the user, such as those of a checkpoint, may compute the tensor again.
            if getattr(getattr(node, "_raw_saved_other", None), "unpack_hook", node) is not None:
                return None
            other = node._saved_other
            if not isinstance(other, torch.Tensor) or other.numel() != 1 or not other.is_cpu or not other.item():
                return None
            factor = factor / other.item() if name[0] == "D" else factor * other.item()
        node = inputs[0]
    return None


def _may_be_multiplied(node: Any) -> bool:
    """Return whether a loss, or a summand of it, was multiplied or divided before it was summed over the ranks.

    The number of ranks may be the factor, so that the gradients are right.

    Args:
        node: node of the loss.
    """
    waiting = [node]
    for _ in range(_MOST_NODES):
        if not waiting:
            return False
        one = waiting.pop(0)
        if (name := one.name()) in _PRODUCTS:
            return True
        if name in _SAME_VALUE | _SUMS:
            waiting += [other for other, _ in one.next_functions if other is not None]
    return bool(waiting)
