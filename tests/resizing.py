"""A training run whose losses do not depend on the number of ranks that share its batches, for tests of resizing."""

from __future__ import annotations

import ast

# With equal shares, the mean of the means of all ranks is the mean of the whole batch: 60 is divisible by 1 to 6.
TRAINING = """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
torch.manual_seed(0)
width = {width}
layers = torch.nn.Linear(width, 2 * width), torch.nn.Tanh(), torch.nn.Linear(2 * width, width)
net = torch.nn.Sequential(*layers).double()
model = torch.nn.parallel.DistributedDataParallel(net)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(opt, 5, 0.9)
data = torch.randn(240, width).double()
dataset = TensorDataset(data)
sampler = DistributedSampler(dataset, shuffle=False)
steps, mine = 0, torch.ones(1) * rank

def train(count):
    global steps
    losses = []
    for _ in range(count):
        share = data[60 * (steps % 4) :][:60][rank::world_size]
        opt.zero_grad()
        loss = (model(share) - share.roll(1, 1)).pow(2).mean()
        loss.backward()
        opt.step()
        scheduler.step()
        steps += 1
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append((total / world_size).item())
    return losses
"""


def losses(session, count: int) -> list[float]:
    """Return the losses of further steps, which are equal on all ranks."""
    result = session.run(f"train({count})", quiet=True, timeout_s=60)
    every = [ast.literal_eval(str(result[rank].result)) for rank in range(session.world_size)]
    assert all(one == every[0] for one in every), every
    return every[0]
