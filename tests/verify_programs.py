"""Code of cells for tests of `%ddp_verify`."""

SETUP = """
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
def net(norm=False):
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(32) if norm else nn.GELU()
    return nn.Sequential(nn.Linear(20, 32), middle, nn.Dropout(0.3), nn.Linear(32, 4))
def sharded(**options):
    model = net()
    fully_shard(model[0], **options)
    return fully_shard(model, **options)
torch.manual_seed(10 + rank)
x, y = torch.randn(8, 20), torch.randint(0, 4, (8,))
"""

STATE = """
import hashlib
import random as pyrandom
import numpy as np
def digest():
    found = hashlib.sha256()
    def add(tensor):
        if tensor is None:
            found.update(b"none")
            return
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(repr((local.dtype, tuple(local.shape), local.requires_grad)).encode())
        found.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    for name, parameter in model.named_parameters():
        found.update(f"{name} {type(parameter).__name__}".encode())
        add(parameter)
        add(parameter.grad)
    for buffer in model.buffers():
        add(buffer)
    for name, module in model.named_modules():
        hooks = sorted(module._forward_hooks), sorted(module._forward_pre_hooks)
        flags = getattr(module, "require_backward_grad_sync", 0), getattr(module, "require_forward_param_sync", 0)
        found.update(repr((name, module.training, hooks, flags)).encode())
    states = torch.get_rng_state().tolist(), pyrandom.getstate(), np.random.get_state()
    found.update(repr(states).encode())
    add(x)
    add(y)
    found.update(repr((sorted(k for k in globals() if k[0] != "_"), counter, world_size, rank)).encode())
    return found.hexdigest()
"""
