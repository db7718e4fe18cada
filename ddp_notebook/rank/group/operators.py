"""Operators of the torch collectives, sends and receives, and the meaning of their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ddp_notebook.records.schema import REDUCE_OPS
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401


class OperatorSpec(NamedTuple):
    """Meaning of an operator."""

    name: str  # name of the user's function
    input: str  # argument with the input tensors
    output: str  # argument with the output tensors
    shows_output: bool = False  # the output, not the input, has the same shape on all ranks
    uneven: bool = False  # shapes may differ between ranks
    kind: str = "collective"


SPECS = {
    "allreduce_": OperatorSpec("all_reduce", "tensors", "tensors"),
    "allreduce_coalesced_": OperatorSpec("all_reduce_coalesced", "tensors", "tensors"),
    "broadcast_": OperatorSpec("broadcast", "tensors", "tensors"),
    "reduce_": OperatorSpec("reduce", "tensors", "tensors"),
    "gather_": OperatorSpec("gather", "input_tensors", "output_tensors"),
    "gather_into_tensor_": OperatorSpec("gather_single", "input_tensor", "output_tensor"),  # from torch 2.14 on
    "scatter_": OperatorSpec("scatter", "input_tensors", "output_tensors", shows_output=True),
    "allgather_": OperatorSpec("all_gather", "input_tensors", "output_tensors"),
    "_allgather_base_": OperatorSpec("all_gather_single", "input_tensor", "output_tensor"),
    "allgather_coalesced_": OperatorSpec("all_gather_coalesced", "input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": OperatorSpec("all_gather_single_coalesced", "inputs", "outputs"),
    "reduce_scatter_": OperatorSpec("reduce_scatter", "input_tensors", "output_tensors", shows_output=True),
    "_reduce_scatter_base_": OperatorSpec("reduce_scatter_single", "input_tensor", "output_tensor", shows_output=True),
    "reduce_scatter_tensor_coalesced_": OperatorSpec(
        "reduce_scatter_single_coalesced", "inputs", "outputs", shows_output=True
    ),
    "alltoall_base_": OperatorSpec("all_to_all_single", "input", "output", uneven=True),
    "alltoall_": OperatorSpec("all_to_all", "input_tensors", "output_tensors", uneven=True),
    "barrier": OperatorSpec("barrier", "", ""),
    "monitored_barrier_": OperatorSpec("monitored_barrier", "", ""),
    "send": OperatorSpec("send", "tensors", "", kind="send"),
    "recv_": OperatorSpec("recv", "", "tensors", shows_output=True, kind="recv"),
    "recv_any_source_": OperatorSpec("recv", "", "tensors", shows_output=True, kind="recv"),
}


def prepare() -> None:
    """Create what torch caches at the first use of each operator. Called before a fork."""
    for name in SPECS:
        if hasattr(torch.ops.c10d, name):
            Operator(name)


class Operator:
    """Argument positions of one operator. All operators take tensors, then the group, then the rest.

    Args:
        name: name of the operator, a key of `SPECS`.
    """

    def __init__(self, name: str) -> None:
        operator = getattr(torch.ops.c10d, name).default
        arguments = operator._schema.arguments
        places = {argument.name: at for at, argument in enumerate(arguments)}
        self.spec = SPECS[name]
        self.at_input = places.get(self.spec.input)
        self.at_output = places.get(self.spec.output)
        self.at_tensors = self.at_output if self.spec.shows_output else self.at_input
        self.at_rest = places["process_group"] + 1
        places = {name: at - self.at_rest for name, at in places.items()}
        self._at_reduce_op = places.get("reduce_op")
        self._at_tag = places.get("tag")
        self._at_limit = places.get("timeout")
        self._at_root = next((places[word] for word in ("root_rank", "src", "dst") if word in places), None)
        self.at_async = places.get("async_op")
        self._at_facts = tuple(at for at in (self._at_tag, self._at_root, self.at_async) if at is not None)
        self.returns = len(operator._schema.returns)
        self.arguments = arguments
        # Skips the Python frame of `operator.redispatch`, which takes 0.6 us.
        self.redispatch = getattr(getattr(operator, "_handle", None), "redispatch_boxed", operator.redispatch)

    # `rest` holds the arguments after the group. Trailing arguments with default values may be missing.

    def root_of(self, rest: tuple[Any, ...]) -> int | None:
        at = self._at_root
        return rest[at] if at is not None and at < len(rest) else None

    def defaults_from(self, first: int, named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments from position `first` on: those passed by name, else their default values."""
        return tuple(named.get(one.name, one.default_value) for one in self.arguments[first:])

    def tag_of(self, rest: tuple[Any, ...]) -> int:
        at = self._at_tag
        return rest[at] if at is not None and at < len(rest) else 0

    def limit_of(self, rest: tuple[Any, ...]) -> float | None:
        """Return the time limit among the arguments in seconds; None if there is none."""
        at = self._at_limit
        milliseconds = rest[at] if at is not None and at < len(rest) else 0
        return milliseconds / 1000 if milliseconds > 0 else None

    def with_limit(self, arguments: tuple[Any, ...], milliseconds: int) -> tuple[Any, ...] | None:
        """Return all arguments with another time limit; None if the operator has no such argument."""
        if self._at_limit is None:
            return None
        at = self._at_limit + self.at_rest
        defaults = tuple(one.default_value for one in self.arguments[len(arguments) : at])
        return (*arguments[:at], *defaults, milliseconds, *arguments[at + 1 :])

    def reduce_op_of(self, rest: tuple[Any, ...]) -> str:
        at = self._at_reduce_op
        return "" if at is None else REDUCE_OPS[1 + int(rest[at].op())]

    def facts_of(self, rest: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the reduction, tag, root and async flag, to compare calls."""
        op = None if (at := self._at_reduce_op) is None else rest[at].op()
        return op, *[rest[at] for at in self._at_facts if at < len(rest)]

    def blocks(self, rest: tuple[Any, ...]) -> bool:
        """Return whether the caller waits for the operation."""
        at = self.at_async
        return not self.returns or (at is not None and at < len(rest) and not rest[at])

    def shapes_of(
        self, arguments: tuple[Any, ...]
    ) -> tuple[torch.dtype | None, Sequence[torch.Size], Sequence[torch.Size]]:
        """Return the dtype, the input shapes and the output shapes of a call with these arguments."""
        at_in, at_out = self.at_input, self.at_output
        if at_in == at_out:
            if at_in is None:
                return None, (), ()
            tensors = arguments[at_in]
            if len(tensors) == 1:
                tensor = tensors[0]
                shapes: Sequence[torch.Size] = (tensor.shape,)
                return tensor.dtype, shapes, shapes
            shapes = [tensor.shape for tensor in tensors]
            return tensors[0].dtype if tensors else None, shapes, shapes
        inputs = () if at_in is None else flat(arguments[at_in])
        outputs = () if at_out is None else flat(arguments[at_out])
        some = inputs or outputs
        dtype = some[0].dtype if some else None
        return dtype, [one.shape for one in inputs], [one.shape for one in outputs]


def flat(value: Any) -> Sequence[torch.Tensor]:
    """Return the tensors of an argument: a tensor, a list, or a list of lists."""
    if type(value) is not list:
        return (value,)
    if not value or type(value[0]) is not list:
        return value
    return [tensor for part in value for tensor in flat(part)]


def nbytes(shapes: Sequence[torch.Size], dtype: torch.dtype | None) -> int:
    """Return the size in bytes of tensors with these shapes."""
    return 0 if dtype is None else dtype.itemsize * sum(shape.numel() for shape in shapes)


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the size of a tensor's data in bytes. torch's own `nbytes` raises for sparse tensors."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes
