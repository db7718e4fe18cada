"""Errors of DTensor and of tensor parallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch

from ddp_notebook.rank.torch_errors import parameter_names
from ddp_notebook.rank.torch_errors.known_error import KnownError, Values
from ddp_notebook.rank.torch_errors.raised import Raised, variables

_TENSOR = r"^torch\.distributed\.tensor\."
_NUMBERS = r"^torch\.nn\."


def _modules(raised: Raised) -> list[torch.nn.Module]:
    """Return the modules whose forwards are in the traceback, the outermost first."""
    found: list[torch.nn.Module] = []
    for frame in raised.frames:
        module: Any = variables(frame).get("self")
        if issubclass(type(module), torch.nn.Module) and not any(one is module for one in found):
            found.append(module)
    return found


def _columnwise(root: torch.nn.Module) -> Iterator[tuple[str, int, int]]:
    """Yield the modules that compute a part of their output features: name, all features, number of ranks."""
    for name, module in root.named_modules():
        weight: Any = module._parameters.get("weight")
        if not parameter_names.is_sharded(weight) or type(module).__name__.startswith("FSDP"):
            continue
        if type(module).__name__.endswith("Linear") and weight.placements == (_shard_0(),):
            yield name, weight.size(0), weight.device_mesh.size()


def _shard_0() -> Any:
    from torch.distributed.tensor import Shard

    return Shard(0)


def _part_of_output(raised: Raised, got: int, wanted: int) -> Values | None:
    """Return the columnwise modules whose part of the output has `got` of `wanted` features."""
    modules = _modules(raised)
    if not modules or not got:
        return None
    found = [(name, ranks) for name, all_, ranks in _columnwise(modules[0]) if all_ == wanted == got * ranks]
    if not found:
        return None
    where = " or ".join(name for name, _ in found)
    return {"part": where, "got": got, "wanted": wanted, "size": found[0][1]}


def _product(raised: Raised, found: Mapping[str, str]) -> Values | None:
    values = _part_of_output(raised, int(found["columns"]), int(found["rows"]))
    modules = _modules(raised)
    return None if values is None else {**values, "module": parameter_names.name_of(modules[-1], modules[:1])}


def _norm(raised: Raised, found: Mapping[str, str]) -> Values | None:
    wanted, got = (found[name].split(",")[-1].strip() for name in ("wanted", "got"))
    if not wanted.isdigit() or not got.isdigit():
        return None
    values, modules = _part_of_output(raised, int(got), int(wanted)), _modules(raised)
    return None if values is None else {**values, "module": parameter_names.name_of(modules[-1], modules[:1])}


def _view(raised: Raised, found: Mapping[str, str]) -> Values | None:
    numbers = [int(one) for one in found["shape"].split(",") if one.strip().lstrip("-").isdigit()]
    modules = _modules(raised)
    if not modules or not numbers or min(numbers) < 0:
        return None
    got, wanted = int(found["got"]), prod(numbers)
    of = [
        (name, size)
        for name, features, size in _columnwise(modules[-1])
        if wanted == got * size and not got % (features // size) and not wanted % features
    ]
    if not of:
        return None
    return {"part": " or ".join(name for name, _ in of), "size": of[0][1]}


def _rowwise(raised: Raised, found: Mapping[str, str]) -> Values | None:
    given, weight = (found[name].split(",") for name in ("given", "weight"))
    modules = _modules(raised)
    if not modules:
        return None
    own: Any = modules[-1]._parameters.get("weight")
    if not parameter_names.is_sharded(own) or int(given[-1]) != int(weight[0]) * own.device_mesh.size():
        return None
    return {
        "module": parameter_names.name_of(modules[-1], modules[:1]),
        "wanted": int(weight[0]),
        "given": int(given[-1]),
        "size": own.device_mesh.size(),
    }


def _not_linear(raised: Raised, _: Mapping[str, str]) -> Values | None:
    module = raised.local(_TENSOR + r"parallel\.style:\w+\._apply$", "module")
    return {"module": type(module).__name__} if isinstance(module, torch.nn.Module) else None


def _whole_mesh(raised: Raised, _: Mapping[str, str]) -> Values | None:
    mesh = raised.local(_TENSOR + r"parallel\.api:parallelize_module$", "device_mesh")
    return {"shape": list(mesh.shape), "names": mesh.mesh_dim_names or ""} if mesh is not None else None


def _logits(raised: Raised, _: Mapping[str, str]) -> Values | None:
    return {} if raised.has(_TENSOR + r"parallel\.loss:") else None


ENTRIES = (
    KnownError(
        name="operator without sharding",
        text="Operator {operator} does not have a sharding strategy registered.",
        kind="NotImplementedError",
        where=_TENSOR + "_sharding_prop:",
        cause="torch has no rule for {operator} on shards",
        fix="call it on d.full_tensor(), which all ranks gather, or on d.to_local() if each shard can be treated alone",
    ),
    KnownError(
        name="operands on different meshes",
        text="Cannot run {operator} on inputs with different meshes: got {one} and {two}\n",
        kind="RuntimeError",
        where=_TENSOR,
        cause="the operands of {operator} are on two meshes, {one} and {two}",
        fix="use one mesh for both tensors, or parts of it",
        other_texts=("All operands in {operator} must have the same mesh, but got {one} and {two}.",),
    ),
    KnownError(
        name="view of uneven shards",
        text="Cannot {verb} unevenly sharded tensor: {}dimension {dim:d} (size {length:d}) is not evenly divisible by "
        "mesh "
        "dimension {} (size {size:d}).",
        kind="RuntimeError",
        where=_TENSOR,
        cause="{length} rows in dimension {dim} have no equal parts for {size} ranks, and this view needs equal parts",
        fix="call d.redistribute(placements=[Replicate()]) before, or pad to a multiple of {size}",
    ),
    KnownError(
        name="change to partial sums",
        text="Can not redistribute from {before} to {after}, redistributing to Partial is for internal use only!",
        kind="RuntimeError",
        where=_TENSOR,
        cause="a tensor becomes a partial sum only as the result of an operation",
        fix="use Replicate() or Shard(dim), or DTensor.from_local(x, mesh, [Partial()]) for sums of your own",
        other_texts=("Can not redistribute to Partial!",),
    ),
    KnownError(
        name="part of a columnwise output",
        text="mat1 and mat2 shapes cannot be multiplied ({:d}x{columns:d} and {rows:d}x{:d})",
        kind="RuntimeError",
        where=_NUMBERS,
        facts=_product,
        cause="module {part} is columnwise parallel and gives {got} of its {wanted} features on each of {size} ranks, "
        "and "
        "module {module} needs all",
        fix="pass ColwiseParallel(output_layouts=Replicate()) for {part}, or make {module} RowwiseParallel",
    ),
    KnownError(
        name="part of a columnwise output in another columnwise module",
        text="a and b must have same reduction dim, but got [{:d}, {columns:d}] X [{rows:d}, {:d}].",
        kind="RuntimeError",
        where=_TENSOR + "_dispatch:",
        facts=_product,
        cause="module {part} is columnwise parallel and gives {got} of its {wanted} features on each of {size} ranks, "
        "and module {module} needs all",
        fix="pass ColwiseParallel(output_layouts=Replicate()) for {part}, or make {module} RowwiseParallel",
    ),
    KnownError(
        name="columnwise output in a norm",
        text="Given normalized_shape=[{wanted}], expected input with shape {}, but got input of size[{got}]",
        kind="RuntimeError",
        where=_NUMBERS,
        facts=_norm,
        cause="module {part} is columnwise parallel and gives {got} of its {wanted} features on each of {size} ranks, "
        "and "
        "module {module} needs all",
        fix="pass ColwiseParallel(output_layouts=Replicate()) for {part}",
    ),
    KnownError(
        name="view of a columnwise output",
        text="shape '[{shape}]' is invalid for input of size {got:d}",
        kind="RuntimeError",
        where="",
        facts=_view,
        cause="module {part} is columnwise parallel, so each rank has 1/{size} of its features, and the view "
        "expects all",
        fix="divide the heads by {size} in the view, or pass ColwiseParallel(output_layouts=Replicate())",
    ),
    KnownError(
        name="whole input of a rowwise module",
        text="a and b must have same reduction dim, but got [{given}] X [{weight}].",
        kind="RuntimeError",
        where="^torch",
        facts=_rowwise,
        cause="module {module} is rowwise parallel, so each of {size} ranks passes 1/{size} of its {wanted} inputs, "
        "and "
        "here each passed all",
        fix="make the module before it ColwiseParallel, or pass RowwiseParallel(input_layouts=Replicate())",
    ),
    KnownError(
        name="parallel style of another module",
        text="{style} currently only support nn.Linear and nn.Embedding!",
        kind="NotImplementedError",
        where=_TENSOR + r"parallel\.style:",
        facts=_not_linear,
        cause="{style} splits nn.Linear and nn.Embedding, and this module is {module}",
        fix="leave it out of the plan, or use SequenceParallel for norms and dropouts",
    ),
    KnownError(
        name="tensor parallel on a whole mesh",
        text="`placements` must have the same length as `device_mesh.ndim`!",
        kind="ValueError",
        where=_TENSOR,
        facts=_whole_mesh,
        cause="parallelize_module takes a mesh of one dimension, and this one has the shape {shape}",
        fix="pass the dimension for tensor parallel, such as mesh['tp']",
    ),
    KnownError(
        name="logits for loss_parallel",
        text="loss_parallel() requires exactly one mesh dim to shard tensor dimension {dim:d}, but got placements "
        "{given} "
        "with ",
        kind="ValueError",
        where=_TENSOR + r"parallel\.loss:",
        cause="loss_parallel needs logits that are sharded by classes, Shard({dim}), and these are {given}",
        fix="pass ColwiseParallel(output_layouts=Shard(-1), use_local_output=False) for the last layer",
    ),
    KnownError(
        name="DTensor as a local tensor",
        text="the local_tensor argument only accepts torch.Tensor but got ",
        kind="RuntimeError",
        where=_TENSOR,
        cause="DTensor.from_local got a DTensor, and it takes the part of one rank",
        fix="use d.redistribute(mesh, placements) for another placement",
    ),
)
