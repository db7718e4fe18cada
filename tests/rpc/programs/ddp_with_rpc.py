"""Two trainers with a dense layer in DDP, over an embedding on a parameter server. A master starts them.

Each trainer steps the embedding at any time. The gradients are sparse, so no trainer overwrites changes of the other.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import optim
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef, TensorPipeRpcBackendOptions
from torch.nn.parallel import DistributedDataParallel as DDP

WORDS, WIDTH, CLASSES = 20, 6, 3
TRAINERS = [0, 1]


class Words(torch.nn.EmbeddingBag):
    def __init__(self, *sizes, **options):
        torch.manual_seed(6)
        super().__init__(*sizes, **options)


class HybridModel(torch.nn.Module):
    def __init__(self, remote_emb_module):
        super().__init__()
        self.remote_emb_module = remote_emb_module
        torch.manual_seed(5)
        self.fc = DDP(torch.nn.Linear(WIDTH, CLASSES), process_group=trainers)

    def forward(self, indices, offsets):
        return self.fc(self.remote_emb_module.forward(indices, offsets))


def _run_trainer(remote_emb_module, rank):
    model = HybridModel(remote_emb_module)
    parameter_rrefs = model.remote_emb_module.remote_parameters()
    parameter_rrefs.extend(RRef(parameter) for parameter in model.fc.parameters())
    optimizer = DistributedOptimizer(optim.SGD, parameter_rrefs, lr=0.5)
    chance = torch.Generator().manual_seed(rank)
    for _ in range(4):
        words = torch.randint(WORDS // 2, (12,), generator=chance) * 2 + rank  # each trainer changes different words
        target = torch.randint(CLASSES, (4,), generator=chance)
        with dist_autograd.context() as context:
            output = model(words, torch.arange(0, 12, 3))
            loss = torch.nn.functional.cross_entropy(output, target)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
            gradient = dist_autograd.get_gradients(context)[model.fc.module.weight]
        print(loss.item().hex(), gradient.square().sum().item().hex())


def run_worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29500"
    global trainers
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    trainers = dist.new_group(TRAINERS)
    options = TensorPipeRpcBackendOptions(init_method="tcp://localhost:29501")
    if rank == 2:
        rpc.init_rpc("master", rank=rank, world_size=world_size, rpc_backend_options=options)
        remote_emb_module = RemoteModule("ps", Words, args=(WORDS, WIDTH), kwargs={"mode": "sum", "sparse": True})
        futures = [rpc.rpc_async(f"trainer{to}", _run_trainer, args=(remote_emb_module, to)) for to in TRAINERS]
        for future in futures:
            future.wait()
        weight = remote_emb_module.remote_parameters()[0].to_here()
        print(weight.sum().item().hex())
    elif rank in TRAINERS:
        rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    else:
        rpc.init_rpc("ps", rank=rank, world_size=world_size, rpc_backend_options=options)
    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = 4
    mp.spawn(run_worker, args=(world_size,), nprocs=world_size)
