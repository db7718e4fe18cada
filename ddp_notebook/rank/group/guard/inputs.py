"""Check the tensors of the user's calls: gloo accepts some of them and computes wrong results without an error.

Some operations move the elements of a tensor in the order of its memory, from its first element on. For a strided view,
this reads or overwrites memory next to the view. Two dense tensors in different orders are mixed up, within a call or
between ranks. Other operations copy to and from contiguous memory.

`docs/reference/inputs.md` lists the result of every operation with every kind of tensor, as measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch.distributed import P2POp, irecv

from ddp_notebook.rank.group.calls import Call
from ddp_notebook.rank.group.kernels.lazy_bits import kept_in
from ddp_notebook.rank.group.operators import flat
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

MEMORY_ORDER = "memory order"
_IN_ORDER = "ordered"  # in the order of memory
_CLONED = "cloned"  # dense tensors in the order of memory, others as contiguous copies
_COPIED = "copied"  # as contiguous copies
# Moves of the input and the output of an operation in gloo. Operations that are not listed copy both.
_MOVES = {
    "all_reduce": (_IN_ORDER, _IN_ORDER),
    "broadcast": (_IN_ORDER, _IN_ORDER),
    "reduce": (_IN_ORDER, _IN_ORDER),
    "scatter": (_IN_ORDER, _IN_ORDER),
    "reduce_scatter": (_CLONED, _IN_ORDER),
    "reduce_scatter_single": (_CLONED, _COPIED),
    "all_to_all_single": (_IN_ORDER, _IN_ORDER),  # torch refuses all but contiguous and channels_last tensors
}
_UNEVEN = {"all_to_all_single"}
_WITH_LAZY_BITS = {"scatter"}  # torch does not resolve tensors in lists of lists
_FILLS_A_LIST = {"all_gather", "gather", "all_gather_coalesced", "all_to_all"}
_MOST_ELEMENTS = 1 << 24  # inputs with more elements are not compared one by one


class Checked(NamedTuple):
    """Result of a check."""

    problem: str  # sentence about a tensor that would give a wrong result, with the fix; "" if there is none
    order: str  # order of the elements that must be the same on all ranks; "" for contiguous tensors


FINE = Checked("", "")


def check(call: Call, rank: int) -> Checked:
    """Check the tensors of a collective.

    Args:
        rank: of this process in the group.
    """
    try:
        order = _moved_order(call, rank)
    except ValueError as error:
        return Checked(str(error), "")
    return Checked("", order) if order else FINE


def _moved_order(call: Call, rank: int) -> str:
    """Return the order in which the elements of a collective are moved.

    Raises:
        ValueError: the result would be wrong.
    """
    kernel, arguments = call.kernel, call.arguments
    name, at_in, at_out = kernel.spec.name, kernel.at_input, kernel.at_output
    if at_in is None or at_out is None:
        return ""
    inputs = flat(arguments[at_in])
    outputs = inputs if at_out == at_in else flat(arguments[at_out])
    if (bit := kept_in(call.thread)) is not None and _gets_result(call, rank):
        _refuse_bit(name, bit)
    is_plain = outputs is inputs or _are_plain(outputs)
    if name in _FILLS_A_LIST:
        _check_list(name, outputs, is_plain)
    if name in _UNEVEN and _overlap(inputs[0], outputs[0]):
        raise ValueError(
            f"{name} would overwrite input that is not sent yet, because the output shares its memory: pass "
            "torch.empty_like(x) as the output"
        )
    if is_plain and _are_plain(inputs) and name not in _WITH_LAZY_BITS:
        return ""
    return _check_each(name, inputs, outputs)


def check_message(call: Call) -> None:
    """Check the tensor of a send or receive.

    Raises:
        ValueError: the result would be wrong. This rank sends nothing.
    """
    kernel = call.kernel
    if (bit := kept_in(call.thread)) is not None:
        _refuse_bit(kernel.spec.name, bit)
    if any(one.is_meta for one in flat(call.arguments[kernel.at_tensors or 0])):
        raise ValueError(
            f"{kernel.spec.name} needs a tensor with data, got one on the meta device: pass "
            "torch.empty_like(x, device='cpu')"
        )


def check_batch(operations: Iterable[P2POp]) -> None:
    """Check the tensors of a `batch_isend_irecv`.

    Raises:
        ValueError: a receive shares memory with another tensor. This rank has sent nothing.
    """
    tensors = [(one.op is irecv, one.tensor) for one in operations]
    for at, (is_receive, tensor) in enumerate(tensors):
        for is_other_receive, other in tensors[:at]:
            if (is_receive or is_other_receive) and _overlap(tensor, other):
                raise ValueError(
                    "batch_isend_irecv would receive into memory of another tensor in the batch: pass a separate "
                    "tensor to each irecv"
                )


def _gets_result(call: Call, rank: int) -> bool:
    """Return whether a rank gets a result from a collective."""
    is_root = call.kernel.root_of(call.arguments[call.kernel.at_rest :]) == rank
    return {"reduce": is_root, "broadcast": not is_root}.get(call.kernel.spec.name, True)


def _refuse_bit(name: str, bit: str) -> NoReturn:
    raise ValueError(f"{name} would not change the tensor, a lazy {bit}: pass x.clone() and copy the result back")


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors have contiguous memory."""
    try:
        for tensor in tensors:
            if not tensor.is_contiguous() or tensor.is_meta:
                return False
    except RuntimeError:  # a sparse tensor
        return False
    return True


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two contiguous tensors share memory."""
    if not _are_plain((one, other)):
        return False
    start, other_start = one.data_ptr(), other.data_ptr()
    return start < other_start + other.nbytes and other_start < start + one.nbytes


def _check_each(name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> str:
    """Check tensors of which at least one is not contiguous. Return the order in which their elements are moved."""
    every = [*inputs, *outputs]
    if any(one.is_meta for one in every):
        if all(one.is_meta for one in every):
            return "meta device"
        raise ValueError(f"{name} got tensors on the meta device and on another one: pass tensors on one device")
    moves_in, moves_out = _MOVES.get(name, (_COPIED, _COPIED))
    orders: dict[str, torch.Tensor] = {}
    # The elements of one tensor that is changed in place stay equal where they share memory.
    roles = (
        ((inputs, moves_in, moves_in is _IN_ORDER),)
        if outputs is inputs
        else ((outputs, moves_out, True), (inputs, moves_in, False))
    )
    for tensors, moves, is_output in roles:
        for tensor in tensors:
            _check_one(name, tensor, moves, is_output)
            if (order := _order_of(tensor, moves, is_uneven=name in _UNEVEN)) is not None:
                orders.setdefault(order, tensor)
    if len(orders) > 1:
        if any(one.layout is not torch.strided for one in orders.values()):
            raise ValueError(f"{name} would mix sparse and dense tensors: pass x.to_dense()")
        parts = " and ".join(map(_strides, orders.values()))
        raise ValueError(
            f"{name} would mix up the elements of tensors in different memory orders ({parts}): pass x.contiguous()"
        )
    return next(iter(orders), "")


def _check_one(name: str, tensor: torch.Tensor, moves: str, is_output: bool) -> None:
    if tensor.layout is not torch.strided:
        return
    if name in _WITH_LAZY_BITS and tensor.is_neg():
        raise ValueError(f"{name} would not negate the values of the tensor, a lazy negation: pass x.resolve_neg()")
    if tensor.is_contiguous():
        return
    strides = _strides(tensor)
    if moves is _IN_ORDER and _order(tensor) is None:
        if is_output:
            raise ValueError(
                f"{name} would change memory next to the tensor ({strides}): pass x.contiguous() and copy the result "
                "back"
            )
        raise ValueError(f"{name} would read memory next to the tensor ({strides}): pass x.contiguous()")
    if moves is _COPIED and is_output and _share_elements([tensor]):
        raise ValueError(f"{name} would write several elements to one address ({strides}): pass a contiguous output")


def _order_of(tensor: torch.Tensor, moves: str, is_uneven: bool) -> str | None:
    """Return the order in which the elements of a tensor are moved; None if it does not matter.

    Args:
        is_uneven: ranks may have other numbers of rows. Then the order within a row matters, if rows are not scattered.
    """
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if moves is _COPIED:
        return None
    if is_uneven and tensor.numel() and _order(tensor[0]) is not None:
        tensor = tensor[0]
    return "" if tensor.is_contiguous() else _order(tensor) or ""


def _strides(tensor: torch.Tensor) -> str:
    return f"shape {list(tensor.shape)}, stride {list(tensor.stride())}"


def _order(tensor: torch.Tensor) -> str | None:
    """Return the dimensions of a tensor in the order of its memory, outermost first.

    Returns None unless the tensor fills its memory without gaps and overlaps.
    """
    dimensions = [
        (stride, size, at)
        for at, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if size != 1
    ]
    dimensions.sort()
    step = 1
    for stride, size, _ in dimensions:
        if stride != step:
            return None
        step *= size
    return f"{MEMORY_ORDER} {[at for _, _, at in reversed(dimensions)]}"


def _check_list(name: str, outputs: Sequence[torch.Tensor], is_plain: bool) -> None:
    """Check that the tensors of an output list have their own memory. Otherwise it would keep only the last result."""
    if is_plain:
        end = 0
        for start, nbytes in sorted([(one.data_ptr(), one.nbytes) for one in outputs]):
            if start < end:
                break
            end = start + nbytes
        else:
            return
    dense = [one for one in outputs if one.layout is torch.strided and not one.is_meta and one.numel()]
    if _share_elements(dense):
        raise ValueError(
            f"{name} needs a separate tensor for each result, but some of the {len(dense)} tensors share memory, as in "
            "[torch.zeros(2)] * world_size: pass [torch.zeros(2) for _ in range(world_size)]"
        )


def _share_elements(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether two elements have one address. Returns False if there is no tensor, or if they are too large."""
    if not tensors or sum(one.numel() for one in tensors) > _MOST_ELEMENTS:
        return False
    addresses = []
    for tensor in tensors:
        offsets = torch.zeros((), dtype=torch.int64)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
        addresses.append(tensor.data_ptr() + offsets.reshape(-1) * tensor.element_size())
    every = torch.cat(addresses)
    return bool(every.unique().numel() < every.numel())
