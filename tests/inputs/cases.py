"""Operations of `torch.distributed`, kinds of tensors, and one attempt of a pair on one rank.

Each tensor is a view of a larger buffer of known values. An attempt compares the result with the expected one, and the
rest of the buffer with its values before. The module needs only torch, so that plain processes and ranks can use it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as with_gradients

WORLD = 2
# Verdicts of an attempt.
RIGHT, WRONG, MEMORY, ERROR = "right", "wrong", "memory", "error"
_MARGIN = 64  # elements of the buffer before and after the tensor, besides as many as the tensor has
_INNER = (2, 3)
_LARGE = 5_000  # factor for the size of tensors that share memory
_GUARD_VALUE = 77


class Made(NamedTuple):
    """A tensor with the buffer around it."""

    tensor: torch.Tensor
    buffer: torch.Tensor | None  # None if the tensor has no memory that can be compared
    outside: torch.Tensor | None  # mask of the elements of the buffer that do not belong to the tensor


# ---- kinds of tensors


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def _permuted(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return the strides of a tensor whose memory has its dimensions in this order, outermost first."""
    inner = _contiguous([shape[at] for at in order])
    return [inner[list(order).index(at)] for at in range(len(shape))]


def _overlapping(shape: Sequence[int]) -> list[int]:
    strides = _contiguous(shape)
    return [strides[0] // 2, *strides[1:]]


_STRIDES: dict[str, Callable[[Sequence[int]], list[int]]] = {
    "contiguous": _contiguous,
    "column": lambda shape: [2 * step for step in _contiguous(shape)],
    "transposed": lambda shape: _permuted(shape, (3, 2, 1, 0)),
    "channels_last": lambda shape: _permuted(shape, (0, 2, 3, 1)),
    "expanded": lambda shape: [0, *_contiguous(shape)[1:]],
    "overlapping": _overlapping,
}


class Kind(NamedTuple):
    """A kind of tensor."""

    title: str
    strides: str = "contiguous"
    of: str = "role"  # the kind applies to a "role", to "all" tensors, to a "list", or to a "pair" of input and output
    dtype: torch.dtype = torch.float32
    ranks: tuple[int, ...] = (0, 1)  # the other ranks pass a contiguous tensor


KINDS = {
    "contiguous": Kind("contiguous"),
    "column": Kind("column view (stride 2)", "column"),
    "transposed": Kind("transposed on all ranks", "transposed"),
    "channels_last": Kind("channels_last on all ranks", "channels_last"),
    "expanded": Kind("expanded (stride 0)", "expanded"),
    "overlapping": Kind("overlapping (`as_strided`)", "overlapping"),
    "transposed_1": Kind("transposed on one rank", "transposed", ranks=(1,)),
    "channels_last_1": Kind("channels_last on one rank", "channels_last", ranks=(1,)),
    "column_1": Kind("column view on one rank", "column", ranks=(1,)),
    "twice": Kind("the same tensor twice in a list", of="list"),
    "overlap_in_list": Kind("overlapping tensors in a list", of="list"),
    "in_place": Kind("input and output share memory in place", of="pair"),
    "shifted": Kind("input and output overlap, shifted", of="pair"),
    "sparse_coo": Kind("sparse COO"),
    "sparse_coo_1": Kind("sparse COO on one rank", ranks=(1,)),
    "sparse_csr": Kind("sparse CSR"),
    "quantised": Kind("quantised", of="all"),
    "complex": Kind("complex", of="all", dtype=torch.complex64),
    "bool": Kind("bool", of="all", dtype=torch.bool),
    "zero": Kind("zero elements", of="all"),
    "requires_grad": Kind("leaf that requires a gradient"),
    "meta": Kind("meta device"),
    "meta_1": Kind("meta device on one rank", ranks=(1,)),
    "conj": Kind("conj bit on all ranks", dtype=torch.complex64),
    "conj_1": Kind("conj bit on one rank", dtype=torch.complex64, ranks=(1,)),
    "neg": Kind("neg bit on all ranks"),
    "neg_1": Kind("neg bit on one rank", ranks=(1,)),
}


def _margin(tensor: torch.Tensor) -> int:
    return _MARGIN + tensor.numel()


def _make(kind: str, shape: Sequence[int], values: torch.Tensor, rank: int) -> Made:
    """Return a tensor of this kind with these values. The values around it differ between ranks."""
    spec = KINDS[kind]
    strides = _STRIDES[spec.strides](shape)
    margin = _margin(values)
    count = 3 * values.numel() + 2 * margin
    guard = torch.full((count,), _GUARD_VALUE + rank).to(values.dtype)
    if values.dtype is torch.bool:
        guard = torch.arange(count) % 3 == rank
    elements = torch.arange(count).as_strided(tuple(shape), tuple(strides), margin)
    outside = torch.ones(count, dtype=torch.bool)
    outside[elements.reshape(-1)] = False
    tensor = guard.as_strided(tuple(shape), tuple(strides), margin)
    if spec.strides in ("expanded", "overlapping"):
        guard[elements.reshape(-1)] = values.reshape(-1)[0]
    else:
        tensor.copy_(values)
    if kind.startswith("conj"):
        tensor.copy_(values.conj())
        return Made(tensor.conj(), guard, outside)
    if kind.startswith("neg"):
        tensor.copy_(-values)
        return Made(torch._neg_view(tensor), guard, outside)
    if kind == "requires_grad":
        return Made(tensor.requires_grad_(), guard, outside)
    if kind.startswith("sparse_coo"):
        return Made(values.to_sparse(), None, None)
    if kind == "sparse_csr":
        return Made(values.reshape(shape[0], -1).to_sparse_csr(), None, None)
    if kind.startswith("meta"):
        return Made(values.to("meta"), None, None)
    return Made(tensor, guard, outside)


# ---- operations


class Operation(NamedTuple):
    """An operation, its tensors and its result.

    `inputs` and `outputs` name the form of the argument, see `_shapes`. An operation without `outputs` changes its
    input, or returns its result if `returns`.
    """

    call: Callable[..., Any]  # (input, output, more keyword arguments) to a work, a list of them, or the result
    inputs: str
    outputs: str
    expected: Callable[[Sequence[Any], int], Any]  # (inputs by rank, rank) to the expected tensors, None if undefined
    has_async: bool = True
    returns: bool = False
    input_ranks: tuple[int, ...] = (0, 1)
    output_ranks: tuple[int, ...] = (0, 1)
    is_object: bool = False  # the tensor is a part of a pickled object
    is_always_async: bool = False


def _sum(inputs: Sequence[Any], rank: int) -> Any:
    return [_total([one[at] for one in inputs]) for at in range(len(inputs[0]))]


def _total(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] | tensors[1] if tensors[0].dtype is torch.bool else tensors[0] + tensors[1]


def _first(inputs: Sequence[Any], rank: int) -> Any:
    return inputs[0]


def _every(inputs: Sequence[Any], rank: int) -> Any:
    return [one for some in inputs for one in some]


def _joined(inputs: Sequence[Any], rank: int) -> Any:
    return [torch.cat([some[at] for some in inputs]) for at in range(len(inputs[0]))]


def _half(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.chunk(WORLD)[rank]


def _batch(i: Any, o: Any) -> list[Any]:
    other = 1 - dist.get_rank()
    return list(dist.batch_isend_irecv([dist.P2POp(dist.isend, i, other), dist.P2POp(dist.irecv, o, other)]))


def _objects(name: str, i: Any) -> Any:
    """Call an operation of objects with this tensor in the object, and return the resulting tensors."""
    rank, box = dist.get_rank(), list[Any]([None, None])
    if name == "broadcast_object_list":
        box = [{"x": i}] if rank == 0 else [None]
        dist.broadcast_object_list(box, 0)
    elif name == "all_gather_object":
        dist.all_gather_object(box, {"x": i})
    elif name == "gather_object":
        dist.gather_object({"x": i}, box if rank == 0 else None, 0)
        box = box if rank == 0 else []
    elif name == "scatter_object_list":
        box = [None]
        dist.scatter_object_list(box, [{"x": i}, {"x": i}] if rank == 0 else [None, None], 0)
    elif rank == 0:
        dist.send_object_list([{"x": i}], 1)
        box = []
    else:
        box = [None]
        dist.recv_object_list(box, 0)
    return [one["x"] for one in box if one is not None]


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


OPERATIONS = {
    "all_reduce": Operation(lambda i, o, **k: dist.all_reduce(i, **k), "part", "", _sum),
    "all_reduce_coalesced": Operation(lambda i, o, **k: dist.all_reduce_coalesced(i, **k), "two", "", _sum),
    "broadcast": Operation(lambda i, o, **k: dist.broadcast(i, 0, **k), "part", "", _first),
    "reduce": Operation(lambda i, o, **k: dist.reduce(i, 0, **k), "part", "", _sum, output_ranks=(0,)),
    "all_gather": Operation(lambda i, o, **k: dist.all_gather(o, i, **k), "part", "parts", _every),
    "all_gather_into_tensor": Operation(
        lambda i, o, **k: dist.all_gather_into_tensor(o, i, **k), "part", "whole", _joined
    ),
    "all_gather_coalesced": Operation(
        lambda i, o, **k: dist.all_gather_coalesced([o[:2], o[2:]], i, **k), "two", "lists", _every
    ),
    "gather": Operation(lambda i, o, **k: dist.gather(i, o, 0, **k), "part", "parts", _every, output_ranks=(0,)),
    "scatter": Operation(
        lambda i, o, **k: dist.scatter(o, i, 0, **k),
        *("parts", "part"),
        lambda inputs, rank: [inputs[0][rank]],
        input_ranks=(0,),
    ),
    "reduce_scatter": Operation(
        lambda i, o, **k: dist.reduce_scatter(o, i, **k),
        *("parts", "part"),
        lambda inputs, rank: [_total([one[rank] for one in inputs])],
    ),
    "reduce_scatter_tensor": Operation(
        lambda i, o, **k: dist.reduce_scatter_tensor(o, i, **k),
        *("whole", "part"),
        lambda inputs, rank: [_half(_total([one[0] for one in inputs]), rank)],
    ),
    "all_to_all": Operation(
        lambda i, o, **k: dist.all_to_all(o, i, **k),
        *("parts", "parts"),
        lambda inputs, rank: [one[rank] for one in inputs],
    ),
    "all_to_all_single": Operation(
        lambda i, o, **k: dist.all_to_all_single(o, i, **k),
        *("whole", "whole"),
        lambda inputs, rank: [torch.cat([_half(one[0], rank) for one in inputs])],
    ),
    "send, recv": Operation(
        lambda i, o: dist.send(i, 1) if dist.get_rank() == 0 else (dist.recv(o, 0), None)[1],
        *("part", "part"),
        _first,
        has_async=False,
        input_ranks=(0,),
        output_ranks=(1,),
    ),
    "send, recv from any": Operation(
        lambda i, o: dist.send(i, 1) if dist.get_rank() == 0 else (dist.recv(o), None)[1],
        *("part", "part"),
        _first,
        has_async=False,
        input_ranks=(0,),
        output_ranks=(1,),
    ),
    "isend, irecv": Operation(
        lambda i, o: dist.isend(i, 1) if dist.get_rank() == 0 else dist.irecv(o, 0),
        *("part", "part"),
        _first,
        has_async=False,
        input_ranks=(0,),
        output_ranks=(1,),
        is_always_async=True,
    ),
    "batch_isend_irecv": Operation(
        lambda i, o: _batch(i, o),
        *("part", "part"),
        lambda inputs, rank: inputs[1 - rank],
        has_async=False,
        is_always_async=True,
    ),
    **{
        name: Operation(
            partial(lambda name, i, o: _objects(name, i), name),
            *("part", ""),
            expected,
            has_async=False,
            returns=True,
            is_object=True,
            output_ranks=ranks,
            input_ranks=senders,
        )
        for name, expected, ranks, senders in (
            ("broadcast_object_list", _first, (0, 1), (0,)),
            ("all_gather_object", _every, (0, 1), (0, 1)),
            ("gather_object", _every, (0,), (0, 1)),
            ("scatter_object_list", _first, (0, 1), (0,)),
            ("send_object_list", _first, (1,), (0,)),
        )
    },
    **{
        f"functional {name}": Operation(call, form, "", expected, has_async=False, returns=True)
        for name, call, form, expected in (
            ("all_reduce", lambda i, o: funcol.all_reduce(i, "sum", _world()), "part", _sum),
            ("all_gather_tensor", lambda i, o: funcol.all_gather_tensor(i, 0, _world()), "part", _joined),
            (
                "reduce_scatter_tensor",
                lambda i, o: funcol.reduce_scatter_tensor(i, "sum", 0, _world()),
                "whole",
                lambda inputs, rank: [_half(_total([one[0] for one in inputs]), rank)],
            ),
            ("broadcast", lambda i, o: funcol.broadcast(i, 0, _world()), "part", _first),
            (
                "all_to_all_single",
                lambda i, o: funcol.all_to_all_single(i, None, None, _world()),
                "whole",
                lambda inputs, rank: [torch.cat([_half(one[0], rank) for one in inputs])],
            ),
            (
                "permute_tensor",
                lambda i, o: funcol.permute_tensor(i, [1, 0], _world()),
                "flat",  # torch raises an error for tensors of more dimensions
                lambda inputs, rank: inputs[1 - rank],
            ),
            ("all_reduce_coalesced", lambda i, o: funcol.all_reduce_coalesced(i, "sum", _world()), "two", _sum),
            (
                "all_gather_into_tensor_coalesced",
                lambda i, o: funcol.all_gather_into_tensor_coalesced(i, _world()),
                "two",
                _joined,
            ),
            (
                "reduce_scatter_tensor_coalesced",
                lambda i, o: funcol.reduce_scatter_tensor_coalesced(i, "sum", [0, 0], _world()),
                "two",
                lambda inputs, rank: [_half(_total([one[at] for one in inputs]), rank) for at in range(2)],
            ),
        )
    },
    **{
        f"nn.functional {name}": Operation(call, form, "", expected, has_async=False, returns=True, output_ranks=ranks)
        for name, call, form, expected, ranks in (
            ("all_reduce", lambda i, o: with_gradients.all_reduce(i), "part", _sum, (0, 1)),
            ("broadcast", lambda i, o: with_gradients.broadcast(i, 0), "part", _first, (0, 1)),
            ("reduce", lambda i, o: with_gradients.reduce(i, 0), "part", _sum, (0,)),
            ("all_gather", lambda i, o: list(with_gradients.all_gather(i)), "part", _every, (0, 1)),
            ("gather", lambda i, o: list(with_gradients.gather(i, 0)), "part", _every, (0,)),
            (
                "reduce_scatter",
                lambda i, o: with_gradients.reduce_scatter(_empty_part(i[0]), i),
                "parts",
                lambda inputs, rank: [_total([one[rank] for one in inputs])],
                (0, 1),
            ),
        )
    },
}


def _empty_part(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=like.dtype)


def rows() -> list[tuple[str, str]]:
    """Return (operation, role) of each row: an operation with separate inputs and outputs has two rows."""
    return [
        (name, role)
        for name, one in OPERATIONS.items()
        for role in (("input", "output") if one.outputs else ("tensor",))
    ]


def is_defined(name: str, role: str, kind: str) -> bool:
    """Return whether an operation can be called with a kind of tensor as this argument."""
    operation, spec = OPERATIONS[name], KINDS[kind]
    if spec.of == "pair":
        is_on_one_rank = bool(set(operation.input_ranks) & set(operation.output_ranks))
        return bool(operation.outputs) and role == "output" and is_on_one_rank
    form = operation.outputs if role == "output" else operation.inputs
    if spec.of == "list":
        return form in ("parts", "two", "lists") and not operation.is_object
    if form == "flat" and spec.strides not in ("contiguous", "column", "expanded"):
        return False
    ranks = operation.output_ranks if role == "output" else operation.input_ranks
    return bool(set(spec.ranks) & set(ranks))


# ---- one attempt


def _shapes(form: str, kind: str, scale: int) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors of an argument.

    Args:
        form: "part" (one tensor), "whole" (one with a part for each rank), "parts" (a list with one for each rank),
            "two" (a list of two), "lists" (a list of two for each rank), "flat" (one with one dimension), or "".
    """
    rows = 0 if kind == "zero" else 2
    part, whole = (rows, *_INNER, 2 * scale), (2 * rows, *_INNER, 2 * scale)
    flat = (rows * 6 * 2 * scale,)
    shapes: dict[str, list[tuple[int, ...]]] = {
        "flat": [flat],
        "part": [part],
        "whole": [whole],
        "parts": [part] * WORLD,
        "two": [part] * 2,
        "lists": [part] * 4,
        "": [],
    }
    return shapes[form]


def _values(shape: Sequence[int], kind: str, mine: str, rank: int, at: int, is_empty: bool) -> torch.Tensor:
    dtype, strides = KINDS[kind].dtype, KINDS[mine].strides
    count = torch.Size(shape).numel()
    if is_empty:
        return torch.full(shape, 55).to(dtype)
    if strides in ("expanded", "overlapping"):
        return torch.full(shape, 1 + 10 * rank + 3 * at).to(dtype)
    if dtype is torch.bool:
        return (torch.arange(count) % (2 + 2 * rank) == 0).reshape(shape)
    values = (torch.arange(count) % 97 + 100 * rank + 200 * at + 1).to(torch.float32).reshape(shape)
    return torch.complex(values, -2 * values) if dtype is torch.complex64 else values


def _logical(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the values of a tensor as a contiguous tensor."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg().contiguous().clone().reshape(shape)


def _quantised(made: Sequence[Made], scale: float) -> list[Made]:
    return [
        Made(torch.quantize_per_tensor(one.tensor.clamp(0, 60 * scale), scale, 0, torch.qint8), None, None)
        for one in made
    ]


def attempt(name: str, role: str, kind: str, is_async: bool, rank: int) -> tuple[str, str]:
    """Call an operation with a kind of tensor on this rank.

    Returns:
        A verdict and its explanation. Every rank of the group calls this with the same arguments.
    """
    warnings.simplefilter("ignore")
    operation, spec = OPERATIONS[name], KINDS[kind]
    inputs, outputs = (_build(name, role, kind, which, rank) for which in ("input", "output"))
    values = [
        [None if one.tensor.is_meta else _logical(one.tensor, one.tensor.shape) for one in inputs_of]
        for inputs_of in (_build(name, role, kind, "input", other) for other in range(WORLD))
    ]
    if spec.of == "pair":
        outputs = _aliased(name, inputs, outputs, rank, kind)
    before = [None if one.buffer is None else one.buffer.detach().clone() for one in (*inputs, *outputs)]
    more = {"async_op": True} if is_async and operation.has_async else {}
    try:
        returned = operation.call(_argument(inputs, operation.inputs), _argument(outputs, operation.outputs), **more)
        results = _waited(returned, operation)
    except Exception as error:
        return ERROR, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    is_changed = not operation.returns and not operation.outputs
    for at, (one, was) in enumerate(zip((*inputs, *outputs), before, strict=True)):
        changed = _changed(one, was, is_output=at >= len(inputs) or is_changed) if spec.of != "pair" else 0
        if changed:
            return MEMORY, f"{changed} elements outside of the result changed"
    if kind.startswith("meta"):
        return RIGHT, "no data"
    if rank not in operation.output_ranks:
        return RIGHT, ""
    found = results if operation.returns else [one.tensor for one in (outputs or inputs)]
    return _compare(found, operation.expected(values, rank))


def _build(name: str, role: str, kind: str, which: str, rank: int) -> list[Made]:
    """Return the tensors for the input or output of a rank."""
    operation, spec = OPERATIONS[name], KINDS[kind]
    form, ranks = operation.inputs, operation.input_ranks
    if which == "output":
        form, ranks = operation.outputs, operation.output_ranks
    if rank not in ranks and operation.outputs:
        return []
    is_kind = spec.of == "all" or role in (which, "tensor")
    mine = kind if is_kind and rank in spec.ranks else "contiguous"
    scale = _LARGE if spec.of == "pair" else 1  # a small input may be sent completely before the output is written
    made = [
        _make(mine, shape, _values(shape, kind, mine, rank, at, which == "output"), rank)
        for at, shape in enumerate(_shapes(form, kind, scale))
    ]
    if kind == "twice" and is_kind:
        made = made[:1] * len(made)
    elif kind == "overlap_in_list" and is_kind and made:
        made = _overlapping_list(made, is_input=which == "input", rank=rank)
    return _quantised(made, 0.5 * (1 + rank)) if kind == "quantised" else made


def _overlapping_list(made: list[Made], is_input: bool, rank: int) -> list[Made]:
    """Return as many tensors in one buffer, each of which starts in the middle of the one before."""
    first = made[0]
    assert first.buffer is not None and first.outside is not None
    count, margin, outside, tensors = first.tensor.numel(), _margin(first.tensor), first.outside.clone(), []
    for at in range(len(made)):
        start = margin + at * (count // 2)
        outside[start : start + count] = False
        tensors.append(first.buffer[start : start + count].view(first.tensor.shape))
    if is_input:
        first.buffer[margin : margin + 2 * count] = torch.arange(2 * count).to(first.buffer.dtype) + 100 * rank
    return [Made(one, first.buffer, outside) for one in tensors]


def _argument(made: list[Made], form: str) -> Any:
    """Return tensors in the form of an argument."""
    if not made:
        return None
    return made[0].tensor if form in ("part", "whole", "flat") else [one.tensor for one in made]


def _waited(returned: Any, operation: Operation) -> Any:
    """Wait for the works or tensors that an operation has returned. Return its results."""
    returned = returned if isinstance(returned, list | tuple) else [returned]
    if operation.is_object:
        return returned
    if operation.returns:
        return [funcol.wait_tensor(one) for one in returned]
    for work in returned:
        if work is not None:
            work.wait()
    return []


def _changed(one: Made, was: torch.Tensor | None, is_output: bool) -> int:
    """Return the number of elements of the buffer that the operation must not change, but has changed."""
    if was is None or one.buffer is None or one.outside is None:
        return 0
    is_other = one.buffer.detach() != was
    return int((is_other & one.outside if is_output else is_other).sum())


def _compare(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> tuple[str, str]:
    """Return the verdict for a result."""
    for one, want in zip(found, expected, strict=True):
        got = _logical(one, want.shape)
        if got.dtype is torch.bool and bool((got.view(torch.uint8) > 1).any()):
            return WRONG, "bytes of a bool that are not 0 or 1"
        if got.dtype != want.dtype or not torch.equal(got, want):
            return WRONG, f"{got.flatten()[:6].tolist()} instead of {want.flatten()[:6].tolist()}"
    return RIGHT, ""


def _aliased(name: str, inputs: list[Made], outputs: list[Made], rank: int, kind: str) -> list[Made]:
    """Return outputs in the memory of the inputs: at the place where the operation puts this rank's data, or shifted.

    The inputs keep their values.
    """
    if not inputs or not outputs:
        return outputs
    first = inputs[0]
    assert first.buffer is not None
    count, margin, made = first.tensor.numel(), _margin(first.tensor), []
    form_in, form_out = OPERATIONS[name].inputs, OPERATIONS[name].outputs
    if kind == "in_place" and form_in == "part" and form_out in ("whole", "parts"):
        start = margin - rank * count  # the input is this rank's part of the output
    elif kind == "in_place" and form_in in ("whole", "parts") and form_out == "part":
        if form_in == "parts":
            return [Made(inputs[rank].tensor, inputs[rank].buffer, None)]
        start = margin + rank * outputs[0].tensor.numel()
    elif kind == "in_place" and form_in == form_out == "parts":
        return [Made(one.tensor, one.buffer, None) for one in inputs]
    else:
        start = margin + (0 if kind == "in_place" else count // 2)
    for at, one in enumerate(outputs):
        size = one.tensor.numel()
        if form_out in ("parts", "lists") and at != (rank if kind == "in_place" else 0):
            made.append(one)
            continue
        at_first = margin if form_out in ("parts", "lists") and kind == "in_place" else start
        made.append(Made(first.buffer[at_first : at_first + size].view(one.tensor.shape), first.buffer, None))
    return made
