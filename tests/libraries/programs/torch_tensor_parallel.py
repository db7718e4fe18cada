"""Tensor parallelism and DTensor on a device mesh of two dimensions, with torch.compile around a collective."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    model = parallelize_module(layers, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    for number in range(4):
        loss = model(torch.ones(2, 8) * number).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item().hex())
    sharded = distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [Shard(0), Replicate()])
    print("product", (sharded @ sharded).full_tensor().sum().item().hex())

    @torch.compile(backend="aot_eager")
    def doubled_sum(tensor):
        return functional_collectives.all_reduce(tensor * 2, "sum", dist.group.WORLD) + 1

    print("compiled", doubled_sum(torch.ones(3)).sum().item().hex())
    dist.destroy_process_group()


main()
