"""A model in two shards on two ranks. A third rank sends it a batch, whole and in two micro-batches, which overlap."""

import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

BATCH = 8


class Shard(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        torch.manual_seed(len(layers))
        self._lock, self.net = threading.Lock(), nn.Sequential(*(make(*sizes) for make, *sizes in layers))

    def forward(self, x_rref):
        x = x_rref.to_here()
        with self._lock:
            return self.net(x)

    def parameter_rrefs(self):
        return [RRef(parameter) for parameter in self.parameters()]


class Pipeline(nn.Module):
    def __init__(self, split_size, workers):
        super().__init__()
        self.split_size = split_size
        self.p1_rref = rpc.remote(workers[0], Shard, args=((nn.Linear, 4, 6), (nn.ReLU,)))
        self.p2_rref = rpc.remote(workers[1], Shard, args=((nn.Linear, 6, 3),))

    def forward(self, xs):
        out_futures = []
        for x in xs.split(self.split_size):
            y_rref = self.p1_rref.remote().forward(RRef(x))
            out_futures.append(self.p2_rref.rpc_async().forward(y_rref))
        return torch.cat(torch.futures.wait_all(out_futures))

    def parameter_rrefs(self):
        of_both = (shard.remote().parameter_rrefs().to_here() for shard in (self.p1_rref, self.p2_rref))
        return [rref for of_one in of_both for rref in of_one]


def run_master(split_size):
    model = Pipeline(split_size, ["worker1", "worker2"])
    optimizer = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=0.1)
    chance = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(BATCH, 4, generator=chance)
        with dist_autograd.context() as context:
            output = model(x)
            loss = nn.functional.cross_entropy(output, x[:, :3].argmax(1))
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        print(loss.item().hex(), output.sum().item().hex())


def run_worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29500"
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=64, rpc_timeout=300)
    if rank == 0:
        rpc.init_rpc("master", rank=rank, world_size=world_size, rpc_backend_options=options)
        for micro_batches in (1, 2):
            run_master(BATCH // micro_batches)
    else:
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    rpc.shutdown()


if __name__ == "__main__":
    world_size = 3
    mp.spawn(run_worker, args=(world_size,), nprocs=world_size)
