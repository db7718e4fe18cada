"""Errors of collectives and messages, from torch and from gloo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import get_backend, get_rank, is_initialized

from ddp_notebook.rank.torch_errors import parameter_names
from ddp_notebook.rank.torch_errors.known_error import KnownError, Values
from ddp_notebook.rank.torch_errors.raised import Raised, variables

_C10D = r"^torch\.distributed\.distributed_c10d:"
_ROOT = _C10D + "_canonicalize_group_rank$"


def _root(raised: Raised) -> tuple[str, int] | None:
    """Return the name and the value of the argument that names a root rank."""
    for name in ("src", "dst", "group_src", "group_dst"):
        if isinstance(value := raised.argument(name), int):
            return name.removeprefix("group_"), value
    return None


def _group(raised: Raised) -> Any:
    return raised.argument("group")


def _outside(raised: Raised, _: Mapping[str, str]) -> Values | None:
    root, ranks = _root(raised), parameter_names.ranks_of(_group(raised))
    if root is None or root[1] in ranks:
        return None
    return {"argument": root[0], "first": ranks[0], "ranks": parameter_names.ranks(_group(raised))}


def _outside_of_group(raised: Raised, _: Mapping[str, str]) -> Values | None:
    return {"ranks": parameter_names.ranks(raised.local(_C10D + "get_group_rank$", "group"))}


def _named(raised: Raised, _: Mapping[str, str]) -> Values | None:
    for argument in ("src", "dst"):
        if any(argument in variables(frame) for frame in raised.frames if frame.f_code.co_name == raised.operation):
            return {"operation": raised.operation, "argument": argument}
    return None


def _invalid_root(raised: Raised, found: Mapping[str, str]) -> Values | None:
    size = len(parameter_names.ranks_of(_group(raised)))
    return {"size": size, "ranks": parameter_names.ranks(_group(raised))} if int(found["root"]) >= size else None


def _with_operation(raised: Raised, _: Mapping[str, str]) -> Values | None:
    return {"operation": raised.operation, "here": get_rank()} if raised.operation else None


def _strided(raised: Raised, _: Mapping[str, str]) -> Values | None:
    tensor = raised.argument("tensor", "input", "input_tensor", "output")
    if not isinstance(tensor, torch.Tensor) or tensor.is_contiguous():
        return None
    return {"operation": raised.operation, "shape": list(tensor.shape), "strides": list(tensor.stride())}


def _with_root(raised: Raised, _: Mapping[str, str]) -> Values | None:
    root = _root(raised)
    return None if root is None else {"here": get_rank(), "root": root[1], "operation": raised.operation}


def _list_of_reduce_scatter(raised: Raised, _: Mapping[str, str]) -> Values | None:
    given, size = raised.argument("input_list"), len(parameter_names.ranks_of(_group(raised)))
    return {"got": len(given), "size": size} if isinstance(given, list) and len(given) != size else None


def _sizes_of_gather(raised: Raised, _: Mapping[str, str]) -> Values | None:
    output, given = raised.argument("output_tensor"), raised.argument("input_tensor")
    size = len(parameter_names.ranks_of(_group(raised)))
    if not isinstance(output, torch.Tensor) or output.numel() == size * given.numel():
        return None
    return {"out": output.numel(), "each": given.numel(), "size": size, "wanted": size * given.numel()}


def _dtypes_of_gather(raised: Raised, _: Mapping[str, str]) -> Values | None:
    output, given = raised.argument("output_tensor"), raised.argument("input_tensor")
    if not isinstance(output, torch.Tensor) or output.dtype is given.dtype:
        return None
    return {"out": output.dtype, "each": given.dtype}


def _sizes_of_scatter(raised: Raised, _: Mapping[str, str]) -> Values | None:
    output, given = raised.argument("output"), raised.argument("input")
    size = len(parameter_names.ranks_of(_group(raised)))
    if not isinstance(output, torch.Tensor) or output.numel() * size == given.numel():
        return None
    return {"out": output.numel(), "each": given.numel(), "size": size, "wanted": size * output.numel()}


def _sizes_of_exchange(raised: Raised, _: Mapping[str, str]) -> Values | None:
    output, given = raised.argument("output"), raised.argument("input")
    if not isinstance(output, torch.Tensor) or output.numel() == given.numel():
        return None
    return {"out": output.numel(), "each": given.numel()}


def _split_count(raised: Raised, _: Mapping[str, str]) -> Values | None:
    size = len(parameter_names.ranks_of(_group(raised)))
    for name in ("input_split_sizes", "output_split_sizes"):
        given = raised.argument(name)
        if given and len(given) != size:
            return {"name": name, "given": list(given), "count": len(given), "size": size}
    return None


def _split_sum(raised: Raised, _: Mapping[str, str]) -> Values | None:
    for name, of in (("input_split_sizes", "input"), ("output_split_sizes", "output")):
        given, tensor = raised.argument(name), raised.argument(of)
        if given and isinstance(tensor, torch.Tensor) and sum(given) != tensor.size(0):
            return {"name": name, "given": list(given), "sum": sum(given), "rows": tensor.size(0), "tensor": of}
    return None


def _on_gloo(_: Raised, __: Mapping[str, str]) -> Values | None:
    return {} if is_initialized() and "gloo" in get_backend() else None


def _dtype(raised: Raised, _: Mapping[str, str]) -> Values | None:
    tensor = raised.argument("tensor", "input_tensor", "input")
    if not isinstance(tensor, torch.Tensor) or not raised.operation:
        return None
    return {"operation": raised.operation, "dtype": str(tensor.dtype).removeprefix("torch.")}


def _layout(raised: Raised, found: Mapping[str, str]) -> Values | None:
    layout = found["layout"].removesuffix("CPU").removesuffix("CUDA")
    return {"layout": layout} if layout.startswith("Sparse") else None


def _wrong_type(raised: Raised, _: Mapping[str, str]) -> Values | None:
    given = raised.local(_C10D + "_check_(single_tensor|tensor_list)$", "param")
    return None if given is None else {"operation": raised.operation, "type": type(given).__name__}


def _seconds(raised: Raised, found: Mapping[str, str]) -> Values:
    return {"seconds": f"{int(found['ms']) / 1000:g}", "operation": raised.operation}


def _received(raised: Raised, found: Mapping[str, str]) -> Values | None:
    root = raised.argument("src")
    return None if not isinstance(root, int) else {**_seconds(raised, found), "source": root}


def _sent(raised: Raised, found: Mapping[str, str]) -> Values | None:
    root = raised.argument("dst")
    return None if not isinstance(root, int) else {**_seconds(raised, found), "target": root}


def _peer(raised: Raised, _: Mapping[str, str]) -> Values | None:
    root = _root(raised) if raised.operation in ("send", "isend", "recv", "irecv") else None
    return None if root is None else {"peer": root[1]}


def _pickled(raised: Raised, _: Mapping[str, str]) -> Values | None:
    operation = raised.operation
    return {"operation": operation} if "object" in operation else None


ENTRIES = (
    KnownError(
        name="root outside the group",
        text="Global rank {rank:d} is not part of group ",
        kind="ValueError",
        where=_C10D + "get_group_rank$",
        facts=_outside,
        cause="{argument} counts the ranks of the session, and this group has {ranks} of them",
        fix="pass {argument}={first}, or group_{argument}=0 for the first rank of the group",
    ),
    KnownError(
        name="rank outside the group",
        text="Global rank {rank:d} is not part of group ",
        kind="ValueError",
        where=_C10D + "get_group_rank$",
        facts=_outside_of_group,
        cause="rank {rank} of the session is not in this group, which has the ranks {ranks}",
        fix="pass one of these ranks, or call it only on them",
    ),
    KnownError(
        name="root of a group too large",
        text="ProcessGroupGloo::{operation}: invalid root rank: {root:d}",
        kind="RuntimeError",
        where=_C10D,
        facts=_invalid_root,
        cause="ranks within this group count from 0, and it has {size}: the ranks {ranks} of the session",
        fix="pass a number below {size}, or src= or dst= with one of these",
    ),
    KnownError(
        name="two roots",
        text="Can't specify both group_rank and global_rank",
        kind="ValueError",
        where=_ROOT,
        facts=_named,
        cause="{operation} got both {argument}, a rank of the session, and group_{argument}, a rank within the group",
        fix="pass one of them",
    ),
    KnownError(
        name="no root",
        text="Must specify global_rank or group_rank",
        kind="ValueError",
        where=_ROOT,
        facts=_named,
        cause="{operation} needs the rank that it sends from or to",
        fix="pass {argument}=0, or another rank of the session",
    ),
    KnownError(
        name="message to itself",
        text="Invalid {} rank: {direction} rank should not be the same as the rank of the current process.",
        kind="ValueError",
        where=_C10D + "_check_not_self_rank$",
        facts=_with_operation,
        cause="rank {here} passed itself as the {direction} of {operation}",
        fix="pass another rank, such as (rank + 1) % world_size",
    ),
    KnownError(
        name="list of all_gather",
        text="ProcessGroupGloo::allgather: invalid output tensor list at index 0 (expected length {size:d}, got "
        "{got:d})",
        kind="RuntimeError",
        where=_C10D + "all_gather$",
        cause="all_gather fills one tensor for each of the {size} ranks of the group, and its list has {got}",
        fix="pass [torch.empty_like(x) for _ in range({size})]",
    ),
    KnownError(
        name="shapes of all_gather",
        text="ProcessGroupGloo::allgather: invalid tensor size at index {index:d} (expected ({wanted}), got ({got}))",
        kind="RuntimeError",
        where=_C10D + "all_gather$",
        cause="tensor {index} of the list has the shape ({got}), and the input has ({wanted})",
        fix="give all tensors the shape of the input, equal on all ranks; pad shorter inputs",
    ),
    KnownError(
        name="output of all_gather_into_tensor",
        text="ProcessGroupGloo::allgather: invalid tensor size at index {index:d} (expected ",
        kind="RuntimeError",
        where=_C10D + "all_gather_(into_tensor|single)$",
        facts=_sizes_of_gather,
        cause="{size} ranks * {each} elements = {wanted}, and the output has {out}",
        fix="make the output {size} times as large as the input in its first dimension",
    ),
    KnownError(
        name="dtype of all_gather_into_tensor",
        text="ProcessGroupGloo::allgather: invalid tensor type at index {index:d} (expected TensorOptions(",
        kind="RuntimeError",
        where=_C10D + "all_gather_(into_tensor|single)$",
        facts=_dtypes_of_gather,
        cause="the input is {each}, and the output is {out}",
        fix="make the output with dtype={each}",
    ),
    KnownError(
        name="mixed dtypes",
        text="Invalid usage of tensors with different dtypesFound {one} and  {two}",
        kind="ValueError",
        where=_C10D + "_ensure_all_tensors_same_dtype$",
        facts=_with_operation,
        cause="the tensors of this {operation} are {one} and {two}",
        fix="make the outputs with the dtype of the input",
    ),
    KnownError(
        name="strided message",
        text="input tensor has to be contiguous",
        kind="RuntimeError",
        where=_C10D,
        facts=_strided,
        cause="{operation} got a view of shape {shape} with strides {strides}",
        fix="send x.contiguous(), or receive into a new tensor and copy it into the view",
        other_texts=("Tensors must be contiguous",),
    ),
    KnownError(
        name="no scatter_list",
        text="Argument ``scatter_list`` must be specified on source rank.",
        kind="ValueError",
        where=_C10D + "scatter$",
        facts=_with_root,
        cause="rank {here} is the source of this scatter, and it passed no scatter_list",
        fix="pass scatter_list with one tensor for each rank on rank {here}, and None on the others",
    ),
    KnownError(
        name="scatter_list on another rank",
        text="Argument ``scatter_list`` must NOT be specified on non-source ranks.",
        kind="ValueError",
        where=_C10D + "scatter$",
        facts=_with_root,
        cause="rank {here} passed a scatter_list, and rank {root} is the source",
        fix="pass scatter_list=parts if rank == {root} else None",
    ),
    KnownError(
        name="length of scatter_list",
        text="ProcessGroupGloo::scatter: Incorrect input list size {got:d}. Input list size should be {size:d}",
        kind="RuntimeError",
        where=_C10D + "scatter$",
        cause="scatter sends one tensor to each of the {size} ranks of the group, and scatter_list has {got}",
        fix="pass {size} tensors, such as list(x.chunk({size}))",
    ),
    KnownError(
        name="shapes of scatter_list",
        text="ProcessGroupGloo::scatter: invalid tensor size at index {index:d} (expected ({wanted}), got ({got}))",
        kind="RuntimeError",
        where=_C10D + "scatter$",
        cause="tensor {index} of scatter_list has the shape ({got}), and the output has ({wanted})",
        fix="all parts have the shape of the output; pad the last one, or use scatter_object_list",
    ),
    KnownError(
        name="no gather_list",
        text="Argument ``gather_list`` must be specified on destination rank.",
        kind="ValueError",
        where=_C10D + "_validate_output_list_for_rank$",
        facts=_with_operation,
        cause="rank {here} is the destination of this {operation}, and it passed no list for the results",
        fix="pass a list with one entry for each rank, and None on other ranks",
    ),
    KnownError(
        name="gather_list on another rank",
        text="Argument ``gather_list`` must NOT be specified on non-destination ranks.",
        kind="ValueError",
        where=_C10D + "_validate_output_list_for_rank$",
        facts=_with_root,
        cause="rank {here} passed a list for the results of this {operation}, and rank {root} is the destination",
        fix="pass the list if rank == {root}, else None",
    ),
    KnownError(
        name="list of reduce_scatter",
        text="invalid input tensor list size, must be world size",
        kind="RuntimeError",
        where=_C10D + "reduce_scatter$",
        facts=_list_of_reduce_scatter,
        cause="reduce_scatter takes one tensor for each of the {size} ranks of the group, and its list has {got}",
        fix="pass list(x.chunk({size})), or use reduce_scatter_tensor(output, x)",
    ),
    KnownError(
        name="sizes of reduce_scatter_tensor",
        text="{}Check failed: outputShape[0] * worldSize == inputShape[0]",
        kind="RuntimeError",
        where=_C10D + "reduce_scatter_(tensor|single)$",
        facts=_sizes_of_scatter,
        cause="{size} ranks * {out} elements = {wanted}, and the input has {each}",
        fix="pad dimension 0 of the input to a multiple of {size}, and make the output 1/{size} of it",
    ),
    KnownError(
        name="dimension of a functional reduce_scatter",
        text="input dimension {dim:d} ({length:d} must be a multiple of group_size {size:d})",
        kind="AssertionError",
        where=r"^torch\.distributed\._functional_collectives:reduce_scatter_(tensor|single)$",
        cause="dimension {dim} has {length} rows, which {size} ranks cannot share equally",
        fix="pad it to a multiple of {size}",
        other_texts=("input dimension 0 ({length:d} must be a multiple of group_size {size:d}",),
    ),
    KnownError(
        name="list of all_to_all",
        text="ProcessGroupGloo::alltoall: input tensor list size {got:d} does not match world size {size:d}",
        kind="RuntimeError",
        where=_C10D + "all_to_all$",
        cause="all_to_all sends one tensor to each of the {size} ranks of the group, and its list has {got}",
        fix="pass {size} tensors in both lists",
    ),
    KnownError(
        name="sizes of all_to_all_single",
        text="{}enforce fail at {}alltoall.cc:{:d}] in->size == out->size",
        kind="RuntimeError",
        where=_C10D + "all_to_all_single$",
        facts=_sizes_of_exchange,
        cause="without split sizes, input and output have equal sizes, and here they have {each} and {out} elements",
        fix="make the output like the input, or pass input_split_sizes and output_split_sizes",
    ),
    KnownError(
        name="number of split sizes",
        text="Number of tensor splits not equal to group size",
        kind="RuntimeError",
        where=_C10D + "all_to_all_single$",
        facts=_split_count,
        cause="{name}={given} has {count} numbers, and the group has {size} ranks",
        fix="pass {size} numbers",
    ),
    KnownError(
        name="sum of split sizes",
        text="Split sizes doesn't match total dim 0 size",
        kind="RuntimeError",
        where=_C10D + "all_to_all_single$",
        facts=_split_sum,
        cause="{name}={given} adds up to {sum}, and {tensor} has {rows} rows",
        fix="pass numbers that add up to {rows}",
    ),
    KnownError(
        name="no future",
        text="Work::getFuture not implemented",
        kind="RuntimeError",
        where="^$|^torch",
        facts=_on_gloo,
        cause="gloo has no future for this operation; it has none for send, recv and reduce_scatter",
        fix="call work.wait(), or use all_reduce and slice the result",
    ),
    KnownError(
        name="operation of a P2POp",
        text="Invalid ``op``. Expected ``op`` to be of type ``torch.distributed.isend`` or "
        "``torch.distributed.irecv``.",
        kind="ValueError",
        where=_C10D + "_check_op$",
        cause="a batch of messages consists of dist.isend and dist.irecv",
        fix="pass dist.isend or dist.irecv itself, without calling it; call collectives on their own",
    ),
    KnownError(
        name="batch without P2POps",
        text="Invalid ``p2p_op_list``. Each op is expected to to be of type ``torch.distributed.P2POp``.",
        kind="ValueError",
        where=_C10D + "_check_p2p_op_list$",
        cause="batch_isend_irecv takes a list of dist.P2POp objects",
        fix="pass [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)]",
        other_texts=("Invalid ``p2p_op_list``. Each op is expected to be of type ``torch.distributed.P2POp``.",),
    ),
    KnownError(
        name="empty batch",
        text="list index out of range",
        kind="IndexError",
        where=_C10D + "_check_p2p_op_list$",
        cause="batch_isend_irecv got an empty list on this rank",
        fix="call it only on ranks that have messages",
    ),
    KnownError(
        name="reduction of complex numbers",
        text="all_reduce does not support {op} on complex tensors",
        kind="ValueError",
        where=_C10D + "all_reduce(_coalesced)?$",
        cause="complex numbers have no order, so only SUM, AVG and PREMUL_SUM exist for them",
        fix="reduce torch.view_as_real(x), or its absolute values",
    ),
    KnownError(
        name="reduction that gloo lacks",
        text="Cannot use ReduceOp.{op} with Gloo",
        kind="RuntimeError",
        where=_C10D,
        cause="gloo has no reduction {op}",
        fix="multiply before or after a SUM",
    ),
    KnownError(
        name="bits of real numbers",
        text="Cannot use ReduceOp.{op} with non-integral dtype",
        kind="RuntimeError",
        where=_C10D,
        facts=_dtype,
        cause="{op} works on the bits of integers, and the tensor is {dtype}",
        fix="convert it with .int() or .bool(), or use MAX, MIN or SUM",
    ),
    KnownError(
        name="dtype that gloo lacks",
        text="Invalid scalar type",
        kind="RuntimeError",
        where=_C10D,
        facts=_dtype,
        cause="gloo has no {operation} for {dtype}",
        fix="convert the tensor, for example with .float() or .int(), and convert the result back",
    ),
    KnownError(
        name="sparse tensor",
        text="Could not run 'c10d::{operator}_' with arguments from the '{layout}' backend.",
        kind="NotImplementedError",
        where=_C10D,
        facts=_layout,
        cause="{operator} takes no tensor with the layout {layout}",
        fix="pass x.to_dense(); all_reduce takes sparse tensors",
    ),
    KnownError(
        name="no tensor",
        text="Invalid function argument. Expected parameter `{parameter}` of type torch.Tensor",
        kind="TypeError",
        where=_C10D + "_check_single_tensor$",
        facts=_wrong_type,
        cause="{operation} needs a tensor as its argument {parameter}, and got {type}",
        fix="pass torch.as_tensor(value), or send Python objects with all_gather_object or broadcast_object_list",
    ),
    KnownError(
        name="no list of tensors",
        text="Invalid function argument. Expected parameter `{parameter}` of type List[torch.Tensor]",
        kind="TypeError",
        where=_C10D + "_check_tensor_list$",
        facts=_wrong_type,
        cause="{operation} needs a list with one tensor per rank in {parameter}, and got {type}",
        fix="pass [torch.empty_like(x) for _ in range(world_size)], or use the form with _into_tensor or _tensor",
    ),
    KnownError(
        name="nothing received",
        text="{}Timed out waiting {ms:d}ms for recv operation to complete",
        kind="RuntimeError",
        where=_C10D + "i?recv$",
        facts=_received,
        cause="no message of rank {source} arrived within {seconds} s, the timeout of the group",
        fix="check that rank {source} reaches its send, or set a longer timeout in new_group",
    ),
    KnownError(
        name="message not received",
        text="{}Timed out waiting {ms:d}ms for send operation to complete",
        kind="RuntimeError",
        where=_C10D + "i?send$",
        facts=_sent,
        cause="rank {target} did not receive the message within {seconds} s, the timeout of the group",
        fix="check that rank {target} reaches its recv, or set a longer timeout in new_group",
    ),
    KnownError(
        name="timeout of a collective",
        text="{}Timed out waiting {ms:d}ms for {direction} operation to complete",
        kind="RuntimeError",
        where=_C10D + r"(?!monitored_barrier)\w+$",
        facts=_seconds,
        cause="this {operation} got no data from another rank of the group within {seconds} s",
        fix="check that every rank of the group calls it, or set a longer timeout in new_group",
    ),
    KnownError(
        name="timeout of a wait",
        text="{}Timed out waiting {ms:d}ms for {direction} operation to complete",
        kind="RuntimeError",
        where="",
        facts=_seconds,
        cause="the operation of this wait did not complete within {seconds} s",
        fix="check that the other rank calls the matching operation, or set a longer timeout in new_group or wait()",
    ),
    KnownError(
        name="monitored barrier",
        text="[Rank {here:d}]: Rank {missing:d} failed to pass monitoredBarrier in {ms:d} ms",
        kind="RuntimeError",
        where=_C10D + "monitored_barrier$",
        facts=_seconds,
        cause="rank {missing} did not reach monitored_barrier within {seconds} s",
        fix="check what rank {missing} does at that time, or pass a longer timeout",
    ),
    KnownError(
        name="connection closed by a known rank",
        text="{}Connection closed by peer ",
        kind="RuntimeError",
        where=_C10D + "i?(send|recv)$",
        facts=_peer,
        cause="the process of rank {peer} has ended, or has destroyed this group",
        fix="%ddp_status shows ranks that have died; call destroy_process_group only after the last operation of all "
        "ranks",
        other_texts=("{}Connection reset by peer ",),
    ),
    KnownError(
        name="connection closed",
        text="{}Connection closed by peer ",
        kind="RuntimeError",
        where="^$|" + _C10D,
        cause="the process at the other end has ended, or has destroyed its group",
        fix="%ddp_status shows ranks that have died; call destroy_process_group only after the last operation of all "
        "ranks",
        other_texts=("{}Connection reset by peer ",),
    ),
    KnownError(
        name="object that cannot be pickled",
        text="Can't pickle {object}: attribute lookup {} on {} failed",
        kind="PicklingError",
        where=_C10D + "_object_to_tensor$",
        facts=_pickled,
        cause="{operation} sends pickled objects, and other ranks find functions and classes only by their name",
        fix="define it with def or class at the top level of a cell or module",
        other_texts=("Can't pickle {object}: it's not found as ",),
    ),
    KnownError(
        name="local class or function in an object",
        text="Can't pickle local object '{object}'",
        kind="AttributeError PicklingError",
        where=_C10D + "_object_to_tensor$",
        facts=_pickled,
        cause="{operation} sends pickled objects, and {object} is defined inside a function",
        fix="define it at the top level of a cell or module",
        other_texts=("Can't get local object '{object}'", "Can't pickle local object <{}{object}>"),
    ),
    KnownError(
        name="list of scatter_object_list",
        text="Expected argument scatter_object_output_list to be a list of size at least 1.",
        kind="ValueError",
        where=_C10D + "scatter_object_list$",
        cause="scatter_object_list writes its result into the first entry of its output list",
        fix="pass out = [None], and read out[0]",
    ),
    KnownError(
        name="no backend for the device",
        text="No backend type associated with device type {device}",
        kind="RuntimeError",
        where=_C10D,
        facts=_with_operation,
        cause="the group of this {operation} has no backend for tensors on {device}",
        fix="move the tensor to the device of the group, or make the group with backend='cpu:gloo,cuda:nccl'",
    ),
)
