"""Tensors that may differ between ranks by design: those of pipeline stages, and those that no library synchronizes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.stdlib import contextlib, gc

_OUTSIDE = "outside DistributedDataParallel"
_IGNORED = "ignored by DistributedDataParallel"
_MARKED = "marked as local to the rank"
_BUFFERS_OF_DDP = "DistributedDataParallel sends buffers of rank 0 at the next forward pass, not after it"
_OWN_BUFFERS = "DistributedDataParallel was created with broadcast_buffers=False"
_BUFFERS_OF_FSDP = "FSDP does not synchronize buffers"


class ByDesign:
    """Parameters, buffers and modules of this rank that may differ from those of other ranks.

    Args:
        variables: variables of the user.

    Example:
        >>> ByDesign({"model": torch.nn.Linear(1, 1)}).reasons
        {}
    """

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self.stages: dict[int, str] = {}  # "stage 0 of 2" by id of a module, parameter or buffer
        self.reasons: dict[int, str] = {}  # reason by id of a parameter or buffer
        for stage in _stages():
            with contextlib.suppress(Exception):  # attributes of torch that a version may lack
                self._add_stage(stage.submod, f"stage {stage.stage_index} of {stage.num_stages}")
        for value in variables.values():
            if issubclass(type(value), torch.nn.Module):
                with contextlib.suppress(Exception):  # a module of the user may raise anything
                    self._add_model(value)

    def _add_stage(self, module: torch.nn.Module, name: str) -> None:
        for part in torch.nn.Module.modules(module):
            self.stages[id(part)] = name
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                if tensor is not None:
                    self.stages[id(tensor)] = name

    def _add_model(self, model: torch.nn.Module) -> None:
        wrapped: set[int] = set()  # ids of parameters in DistributedDataParallel
        for part in torch.nn.Module.modules(model):
            if issubclass(type(part), DistributedDataParallel):
                wrapped |= self._add_wrapped(part)
            elif hasattr(part, "unshard") and hasattr(part, "reshard"):  # an FSDPModule
                self._add_buffers(part, _BUFFERS_OF_FSDP)
        for parameter in torch.nn.Module.parameters(model):
            if getattr(parameter, "allreduce", True) is False or getattr(parameter, "tensor_model_parallel", False):
                self.reasons[id(parameter)] = _MARKED  # conventions of Megatron and DeepSpeed
            elif wrapped and id(parameter) not in wrapped:
                self.reasons.setdefault(id(parameter), _OUTSIDE)

    def _add_wrapped(self, ddp: Any) -> set[int]:
        """Add the buffers of a DDP model, and the tensors that it ignores. Return the ids of its parameters."""
        self._add_buffers(ddp, _BUFFERS_OF_DDP if ddp.broadcast_buffers else _OWN_BUFFERS)
        ignored = set(ddp.parameters_to_ignore)
        named = (*torch.nn.Module.named_parameters(ddp.module), *torch.nn.Module.named_buffers(ddp.module))
        for name, tensor in named:
            if name in ignored:
                self.reasons[id(tensor)] = _IGNORED
        return {id(parameter) for parameter in torch.nn.Module.parameters(ddp)}

    def _add_buffers(self, module: torch.nn.Module, reason: str) -> None:
        for buffer in torch.nn.Module.buffers(module):
            self.reasons[id(buffer)] = reason


def _stages() -> Iterator[Any]:
    """Yield the stages of pipelines. They can only exist if torch's module was imported."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    base = getattr(module, "_PipelineStageBase", None) or getattr(module, "PipelineStage", None)
    if base is not None:
        yield from (one for one in gc.get_objects() if issubclass(type(one), base))
