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

_LOOP = """
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""
RIGHT = {
    "gan": """
g, d = DDP(torch.nn.Linear(4, 8)), DDP(torch.nn.Linear(8, 1), broadcast_buffers=False)
og, od = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())
for step in range(5):
    od.zero_grad()
    (d(torch.randn(4, 8)).mean() - d(g(torch.randn(4, 4)).detach()).mean()).backward()
    od.step()
    if step % 2 == 0:
        og.zero_grad()
        d(g(torch.randn(4, 4))).mean().backward()
        og.step()
""",
    "frozen layers": "net[0].requires_grad_(False)\nmodel = DDP(net)\n"
    "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n" + _LOOP,
    "LoRA": """
class Lora(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(8, 8).requires_grad_(False)
        self.a, self.b = torch.nn.Parameter(torch.randn(8, 2)), torch.nn.Parameter(torch.zeros(2, 8))

    def forward(self, x):
        return self.base(x) + x @ self.a @ self.b

model = DDP(Lora())
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
"""
    + _LOOP,
    "evaluation and EMA": """
from torch.optim.swa_utils import AveragedModel
ema = AveragedModel(net)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    ema.update_parameters(net)
    with torch.no_grad():
        model.eval()
        ema(torch.ones(4, 8)), model(torch.ones(4, 8)), model.module(torch.ones(2, 8))
        model.train()
    if rank == 0:
        net(torch.ones(1, 8)).detach()
""",
    "one rank": """
if rank == 0:
    alone = torch.nn.Linear(8, 1)
    own = torch.optim.SGD(alone.parameters(), 0.1)
    for step in range(5):
        own.zero_grad()
        alone(torch.randn(4, 8)).mean().backward()
        own.step()
""",
    "few steps of RL": """
policy, value = DDP(torch.nn.Linear(8, 2)), DDP(torch.nn.Linear(8, 1))
both = torch.optim.Adam([*policy.parameters(), *value.parameters()])
for episode in range(2):
    x = torch.randn(16, 8)
    for _ in range(2):
        both.zero_grad()
        p = torch.distributions.Categorical(logits=policy(x))
        v = value(x).squeeze(-1)
        (-(p.log_prob(p.sample()) * (1 - v.detach())).mean() + (1 - v).square().mean()).backward()
        both.step()
""",
    "averaged by hand": """
plain = torch.nn.Linear(8, 1)
own = torch.optim.SGD(plain.parameters(), 0.1)
for step in range(5):
    own.zero_grad()
    plain(torch.randn(4, 8)).mean().backward()
    for p in plain.parameters():
        dist.all_reduce(p.grad)
    own.step()
""",
    "unused on purpose": """
class Half(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.a(x)

model = DDP(Half(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
    + _LOOP,
    "static graph": "model = DDP(torch.nn.Linear(8, 1), static_graph=True)\n"
    "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n" + _LOOP,
    "comm hook": """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
model = DDP(torch.nn.Linear(8, 1))
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
    + _LOOP,
    "ZeRO": "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
    "optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)\n" + _LOOP,
    "LBFGS": """
x, lbfgs = torch.randn(4, 8), torch.optim.LBFGS(model.parameters(), max_iter=3)
def closure():
    lbfgs.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss
for step in range(3):
    lbfgs.step(closure)
""",
    "step in the backward": """
model = DDP(torch.nn.Linear(8, 1))
steps = {p: torch.optim.SGD([p], 0.1) for p in net.parameters()}
for p in net.parameters():
    p.register_post_accumulate_grad_hook(lambda p: [steps[p].step(), steps[p].zero_grad()][:0] or None)
for step in range(4):
    net(torch.randn(4, 8)).mean().backward()
    dist.barrier()
""",
    "warm-up from zero and scheduler": "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: n / 10)\n"
    "optimizer.step()\n" + _LOOP.replace("optimizer.step()", "optimizer.step(); scheduler.step()"),
    "plot of a scheduler": "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)\n"
    "for step in range(5):\n    optimizer.step()\n    scheduler.step()\n",
    "passes of an evaluation": """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
data = TensorDataset(torch.randn(16, 8))
train, test = DistributedSampler(data), DistributedSampler(data)
for epoch in range(3):
    train.set_epoch(epoch)
    loader = DataLoader(data, batch_size=4, sampler=train)
    next(iter(loader))
    for x, in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    for x, in DataLoader(data, batch_size=4, sampler=test):
        with torch.no_grad():
            model(x)
""",
    "checkpointing": """
from torch.utils.checkpoint import checkpoint
class Checkpointed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.b(checkpoint(self.a, x, use_reentrant=False))

model = DDP(Checkpointed())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
    + _LOOP,
    "join": """
from torch.distributed.algorithms.join import Join
with Join([model]):
    for step in range(3 + rank):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).mean().backward()
        optimizer.step()
""",
    "skipped on all ranks": """
for step in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean() * (float("nan") if step == 2 and rank == 1 else 1)
    bad = (~loss.isfinite()).float()
    dist.all_reduce(bad)
    if bad:
        continue
    loss.backward()
    optimizer.step()
""",
    "FSDP2": """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
model = fully_shard(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
torch.manual_seed(10 + rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
    + _LOOP,
    "tensor parallel": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
torch.manual_seed(3)
mesh = init_device_mesh("cpu", (2,))
model = parallelize_module(
    torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)),
    mesh,
    {"0": ColwiseParallel(), "1": RowwiseParallel()},
)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
    + _LOOP,
    "steps in three cells": "optimizer.zero_grad()\nmodel(torch.randn(4, 8)).mean().backward()\n",
    "only a step": "optimizer.step()\n",
    "gradients set by hand": "for p in net.parameters():\n    p.grad = torch.ones_like(p)\noptimizer.step()\n",
}
