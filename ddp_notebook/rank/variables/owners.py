"""Modules that hold a parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_notebook.stdlib import gc

_KEEPER = "FSDPParam"  # class of FSDP that holds a sharded parameter


def is_in_a_module(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether a module of this process has one of these parameters, or FSDP holds it for a gathered module.

    After a forward pass without a backward pass, the root module or the whole model stays gathered.
    """
    parameters = [p for p in parameters if isinstance(p, torch.nn.Parameter)]
    if not parameters:
        return True  # plain tensors of the user
    wanted = {id(p) for p in parameters}
    for one in gc.get_objects():
        if issubclass(type(one), torch.nn.Module) and any(id(p) in wanted for p in one._parameters.values()):
            return True
        if type(one).__name__ == _KEEPER and id(getattr(one, "sharded_param", None)) in wanted:
            return True
    return False
