"""Local tensors of partial DTensors from which a loss is computed, although no operation has added the summands."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import torch

from ddp_notebook.rank.findings.reductions import REDUCED
from ddp_notebook.stdlib import math, re

_MOST_NODES = 64
_SUMS = "sum", "avg"
_TO_LOCAL, _FROM_LOCAL = "_ToTorchTensor", "_FromTorchTensor"
# Operations of autograd's nodes. A linear function of a sum is the sum of the functions, so a sum may stay partial.
_LINEAR = {
    *("Add", "Sub", "Neg", "Sum", "Mean", "Div", "Mul", "View", "UnsafeView", "ReshapeAlias", "T", "Transpose"),
    *("Permute", "Squeeze", "Unsqueeze", "Clone", "Alias", "ToCopy", "Select", "Slice", "NllLoss"),
}
_PRODUCTS = {"Div", "Mul"}  # linear if one factor is constant
_NOT_LINEAR = {
    *("Pow", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropyWithLogits", "LogSoftmax", "Softmax", "Exp"),
    *("Log", "Logsumexp", "NativeLayerNorm", "Relu", "LeakyRelu", "Elu", "Gelu", "Silu", "Softplus", "Tanh", "Sigmoid"),
}
_END = re.compile(r"Backward\d*$")


def has_partial(outputs: Sequence[torch.Tensor], summed: Collection[int]) -> bool:
    """Return whether a loss is a function of the local part of a partial DTensor, and not a linear one.

    Each rank then computes the function of its summand, and the sum of these values is not that of the sum. Nodes of
    an unknown kind end the search, since they may add the summands of all ranks.

    Args:
        outputs: the tensors whose gradients are computed.
        summed: numbers of elements of tensors that the user has summed over ranks outside of autograd, such as `.data`.
    """
    waiting: deque[tuple[Any, bool]] = deque((one.grad_fn, False) for one in outputs if one.grad_fn is not None)
    for _ in range(_MOST_NODES):
        if not waiting:
            return False
        node, is_function = waiting.popleft()
        name = _END.sub("", node.name())
        if name == _TO_LOCAL and is_function and _is_partial(node, summed):
            return True
        inputs = [one for one, _ in node.next_functions if one is not None]
        is_product = name in _PRODUCTS and len(inputs) > 1
        if is_product or (name not in _LINEAR and name not in _NOT_LINEAR) or REDUCED in node.metadata:
            continue
        is_function |= name in _NOT_LINEAR
        waiting += [(one, is_function) for one in inputs]
    return False


def _is_partial(node: Any, summed: Collection[int]) -> bool:
    """Return whether a call of `to_local` got a partial DTensor that an operation has made, of more than one rank."""
    if node.grad_placements is not None or REDUCED in node.metadata:
        return False
    if any(one is not None and _END.sub("", one.name()) == _FROM_LOCAL for one, _ in node.next_functions):
        return False  # the user has made the DTensor of this local tensor
    mesh, placements = node.dtensor_spec.mesh, node.dtensor_spec.placements
    shards = math.prod(mesh.size(dim) for dim, one in enumerate(placements) if one.is_shard())
    if math.prod(node.dtensor_spec.shape) // shards in summed:
        return False
    return any(getattr(one, "reduce_op", "") in _SUMS and mesh.size(dim) > 1 for dim, one in enumerate(placements))
