"""Ranks with different numbers of batches: the join context with DDP and ZeroRedundancyOptimizer, no_sync, and
loaders with workers."""

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train():
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    with Join([model, optimizer]):
        for number in range(5 + rank):
            model(torch.ones(2, 4) * (number + 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    print("joined", model.module.weight.sum().item().hex())
    data = TensorDataset(torch.randn(64, 4))
    sampler = DistributedSampler(data, seed=3)
    model = DistributedDataParallel(torch.nn.Linear(4, 1), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2, persistent_workers=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (batch,) in enumerate(loader):
            with contextlib.nullcontext() if number % 2 else model.no_sync():
                loss = model(batch).pow(2).mean()
                loss.backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        print("loss", loss.item().hex())


def main():
    dist.init_process_group("gloo")
    train()  # models in DDP that are deleted after their group may hang in torch itself
    dist.destroy_process_group()


main()
