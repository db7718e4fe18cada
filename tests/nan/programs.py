"""Training programs for ranks, with a fault that is put in at a step of one rank."""

SETUP = """
import torch, torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import fully_shard

class Sqrt(nn.Module):
    def forward(self, x):
        return x.abs().sqrt()  # at 0 its gradient is infinite

class Log(nn.Module):
    def forward(self, x):
        return x.log()

class Faulty(nn.Module):
    # Calls its inner module with zeros, while it is on.
    def __init__(self, inner):
        super().__init__()
        self.inner, self.is_on = inner, False
    def forward(self, x):
        return self.inner(x * 0) if self.is_on else x

class Block(nn.Module):
    def __init__(self, odd):
        super().__init__()
        self.linear, self.odd, self.norm = nn.Linear(16, 16), odd, nn.BatchNorm1d(16)
        self.register_buffer("count", torch.zeros(3))
        self.calls, self.divides = 0, False
    def forward(self, x):
        self.calls += 1
        self.count += 1
        x = self.linear(x)
        if self.divides:
            x = x / 0
        self.last = x.detach()
        return F.dropout(self.norm(self.odd(x)), 0.2)

class Net(nn.Module):
    def __init__(self, odd):
        super().__init__()
        self.layers = nn.ModuleList([Block(nn.ReLU()), Block(Faulty(odd)), Block(nn.ReLU())])
        self.head = nn.Linear(16, 4)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def shard(net):
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net)

def train(fault="", at=3, steps=6, wrap=DDP, scaler=None, optimizer=torch.optim.SGD, guilty=1):
    global net, model, opt, kept
    torch.manual_seed(0)
    net = Net(Sqrt() if fault == "sqrt" else Log())
    model = wrap(net)
    opt = optimizer(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for step in range(steps):
        x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
        hits = rank == guilty and step == at and fault
        net.layers[1].odd.is_on = hits and fault in ("sqrt", "log")
        net.layers[1].divides = hits and fault == "code"
        if hits and fault == "input":
            x[3, 2] = float("nan")
        opt.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y)
        if hits and fault == "loss":
            loss = loss + (out - out).abs().sqrt().sum() * 0
        if scaler is None:
            loss.backward()
            kept = state()
            opt.step()
        else:
            scaler.scale(loss * (1e38 if hits else 1)).backward()
            scaler.step(opt)
            scaler.update()

def state():
    # Everything that a repeated forward could change.
    import copy, random
    import numpy
    tensors = [one.detach().clone() for one in (*net.parameters(), *net.buffers(), *(b.last for b in net.layers))]
    gradients = [None if p.grad is None else p.grad.detach().clone() for p in net.parameters()]
    attributes = [{n: id(v) for n, v in vars(module).items()} for module in net.modules()]
    return tensors, gradients, attributes, torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())

def same(before, after):
    def equal(a, b):
        return (a is None) == (b is None) and (a is None or a.numpy().tobytes() == b.numpy().tobytes())
    tensors = all(map(equal, before[0], after[0])) and all(map(equal, before[1], after[1]))
    return bool(tensors and before[2] == after[2] and torch.equal(before[3], after[3]) and before[4:] == after[4:])
"""
