"""Programs for the tests of findings. Each has a fault that a seed places, or none."""

from __future__ import annotations

MODEL = """
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
torch.manual_seed(10 + rank)
"""
