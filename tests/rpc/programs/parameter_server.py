"""A model on a parameter server. The first trainer that requests it creates it, and trainers train it in turn."""

import os
from threading import Lock

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer

param_server = None
global_lock = Lock()


def call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method, rref, *args, **kwargs):
    return rpc.rpc_sync(rref.owner(), call_method, args=[method, rref, *args], kwargs=kwargs)


class ParameterServer(nn.Module):
    def __init__(self, width):
        super().__init__()
        torch.manual_seed(4)
        self.model = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.model(x)

    def get_dist_gradients(self, context):
        gradients = dist_autograd.get_gradients(context)
        return [gradients[parameter] for parameter in self.model.parameters()]

    def get_param_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]

    def get_calls(self):
        return self.calls


def get_parameter_server(width=0):
    global param_server
    with global_lock:
        if not param_server:
            param_server = ParameterServer(width)
        return param_server


class TrainerNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.param_server_rref = rpc.remote("parameter_server", get_parameter_server, args=(width,))

    def get_global_param_rrefs(self):
        return remote_method(ParameterServer.get_param_rrefs, self.param_server_rref)

    def forward(self, x):
        return remote_method(ParameterServer.forward, self.param_server_rref, x)


def train(rank, world_size):
    net = TrainerNet(width=5)
    param_rrefs = net.get_global_param_rrefs()
    optimizer = DistributedOptimizer(optim.SGD, param_rrefs, lr=0.05)
    points = torch.randn(3, 8, 2, generator=torch.Generator().manual_seed(rank))
    for x in points:
        with dist_autograd.context() as context:
            loss = nn.functional.mse_loss(net(x), x.prod(1, keepdim=True))
            dist_autograd.backward(context, [loss])
            of_server = remote_method(ParameterServer.get_dist_gradients, net.param_server_rref, context)
            optimizer.step(context)
        calls = remote_method(ParameterServer.get_calls, net.param_server_rref)
        print(float(calls).hex(), loss.item().hex(), *(one.sum().item().hex() for one in of_server))
    if rank + 1 < world_size:
        rpc.rpc_sync(f"trainer_{rank + 1}", train, args=(rank + 1, world_size))


def run_worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29500"
    name = f"trainer_{rank}" if rank else "parameter_server"
    rpc.init_rpc(name, rank=rank, world_size=world_size)
    if rank == 1:
        train(rank, world_size)
    rpc.shutdown()


if __name__ == "__main__":
    world_size = 3
    mp.spawn(run_worker, args=(world_size,), nprocs=world_size)
