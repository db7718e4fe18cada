"""Training programs for ranks, with a fault that is put in at a step of one rank."""

SETUP = """
import torch, torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

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

def flatten(net, use_orig_params=False):
    return FullyShardedDataParallel(
        net,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )

def split(net):
    columns = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(net, init_device_mesh("cpu", (2,)), {"layers.*.linear": columns})

def alone(net):
    return net

def average(net):
    for p in net.parameters():
        torch.distributed.all_reduce(p.grad)
        p.grad /= world_size

def train(
    fault="", at=3, steps=6, wrap=DDP, scaler=None, optimizer=torch.optim.SGD, guilty=1, seed=None, by_hand=False
):
    global net, model, opt, kept
    torch.manual_seed(0)
    net = Net(Sqrt() if fault == "sqrt" else Log())
    model = wrap(net)
    opt = optimizer(model.parameters(), lr=0.01)
    torch.manual_seed(rank if seed is None else seed)
    for step in range(steps):
        x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
        hits = (guilty is None or rank == guilty) and step == at and fault
        net.layers[1].odd.is_on = hits and fault in ("sqrt", "log")
        getattr(net.layers[1], "_fsdp_wrapped_module", net.layers[1]).divides = hits and fault == "code"
        if hits and fault == "input":
            x[3, 2] = float("nan")
        opt.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y)
        if hits and fault == "loss":
            loss = loss + (out - out).abs().sqrt().sum() * 0
        if scaler is None:
            loss.backward()
            if by_hand:
                average(net)
            kept = state()
            opt.step()
        else:
            scaler.scale(loss * (1e38 if hits else 1)).backward()
            scaler.step(opt)
            scaler.update()

# In `Marked` the fault depends on the data, so it comes again in a repeated forward.
class Marked(nn.Module):
    def __init__(self, odd):
        super().__init__()
        self.first, self.odd, self.head = nn.Linear(16, 16), odd, nn.Linear(16, 4)
    def forward(self, x):
        return self.head(self.odd(self.first(x).abs() * (x[:, :1] < 50)))

def batch(is_bad):
    x = torch.randn(8, 16)
    if is_bad:
        x[2, 0] = 99
    return x

def accumulate(wrap=DDP, syncs_all=False, bad=1, micro=3):
    import contextlib
    torch.manual_seed(0)
    model = wrap(Marked(Sqrt()))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for step in range(5):
        opt.zero_grad()
        for number in range(micro):
            syncs = syncs_all or number == micro - 1
            if wrap is fully_shard:
                model.set_requires_gradient_sync(syncs)
            with model.no_sync() if wrap is DDP and not syncs else contextlib.nullcontext():
                model(batch(step == 3 and rank == 1 and number == bad)).square().mean().backward()
        opt.step()

def closures():
    torch.manual_seed(0)
    model = DDP(Marked(Sqrt()))
    opt = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=4)
    torch.manual_seed(rank)
    for step in range(5):
        calls = []
        def closure():
            calls.append(1)
            opt.zero_grad()
            loss = model(batch(step == 3 and rank == 1 and len(calls) == 3)).square().mean()
            loss.backward()
            return loss
        opt.step(closure)

def compiled(how):
    torch.manual_seed(0)
    net = Marked(Sqrt())
    if how == "outside":
        model = torch.compile(DDP(net), backend="eager")
    elif how == "inside":
        model = DDP(torch.compile(net, backend="eager"))
    else:
        model = torch.compile(net, backend="eager", fullgraph=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for step in range(5):
        opt.zero_grad()
        model(batch(step == 3 and rank == 1)).square().mean().backward()
        if how == "whole":
            average(model)
        opt.step()

def adversaries(bad):
    global generator, critic
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(16, 16), Marked(Sqrt() if bad == "generator" else nn.ReLU()))
    critic = nn.Sequential(nn.Linear(4, 16), Marked(Sqrt() if bad == "critic" else nn.ReLU()))
    generates, criticizes = DDP(generator), DDP(critic)
    first, second = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (criticizes, generates))
    torch.manual_seed(rank)
    for step in range(5):
        x = torch.randn(8, 16)
        if step == 3 and rank == 1:  # the first layer then gives a mark
            (generator if bad == "generator" else critic)[0].weight.data[0] = 0
            (generator if bad == "generator" else critic)[0].bias.data[0] = 99
        made = generates(x)
        first.zero_grad()
        (criticizes(torch.randn(8, 4)) - criticizes(made.detach())).square().mean().backward()
        first.step()
        second.zero_grad()
        criticizes(made).square().mean().backward()
        second.step()

def state():
    # Everything that a repeated forward could change.
    import copy, random
    import numpy
    def copied(one):
        return None if one is None else getattr(one, "to_local", lambda: one)().detach().clone()
    hidden = [b.last for b in net.layers]
    tensors = [copied(one) for one in (*net.parameters(), *net.buffers(), *hidden)]
    gradients = [copied(p.grad) for p in net.parameters()]
    attributes = [{n: id(v) for n, v in vars(module).items()} for module in net.modules()]
    return tensors, gradients, attributes, torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())

def same(before, after):
    def equal(a, b):
        return (a is None) == (b is None) and (a is None or a.numpy().tobytes() == b.numpy().tobytes())
    tensors = all(map(equal, before[0], after[0])) and all(map(equal, before[1], after[1]))
    return bool(tensors and before[2] == after[2] and torch.equal(before[3], after[3]) and before[4:] == after[4:])
"""
