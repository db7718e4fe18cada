"""Wrong programs with the expected words, and right programs. `SETUP` runs before them."""

from __future__ import annotations

from typing import NamedTuple

SETUP = """
import torch, torch.distributed as dist, torch.nn as nn
from concurrent.futures import ThreadPoolExecutor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

class Scale(nn.Module):
    def __init__(self, value=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((4,), float(value)))
    def forward(self, x):
        return x * self.w

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Scale(value) for value in (1, 100))
    def forward(self, x, which):
        return self.experts[which](x)

class Stack(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(layers))
    def forward(self, x, order=None):
        for at in order or range(len(self.layers)):
            x = self.layers[at](x)
        return x

class TwoLayers(nn.Module):
    def __init__(self, order='ab'):
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(4, 4))
    def forward(self, x):
        return self.b(self.a(x))

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x, which):
        return (self.up, self.down)[which](x)

def sharded(count):
    return [fully_shard(Scale(10 ** at)) for at in range(count)]

def sharded_stack(layers=3):
    stack = Stack(layers)
    for layer in stack.layers:
        fully_shard(layer)
    return fully_shard(stack)

x = torch.ones(4)
batch = torch.ones(2, 4)
"""


class Wrong(NamedTuple):
    """A program, and words of its error."""

    code: str
    words: tuple[str, ...]
    is_quick: bool = False  # runs in `make test`


_MIXTURE = "so both would get a mixture of the two"
_ORDER = "Create them in the same order on all ranks"

WRONG = {
    "an expert for each rank": Wrong(
        "mixture = Mixture()\nfor one in mixture.experts: fully_shard(one)\nmixture(x, rank)",
        ("all-gather of parameters of experts.0 (Scale)", "all-gather of parameters of experts.1 (Scale 2)", _MIXTURE),
        is_quick=True,
    ),
    "an expert for each rank, in a list": Wrong(
        "experts = sharded(2)\nexperts[rank](x)",
        ("rank 0 calls all_gather_single(float32[2], all-gather of parameters of Scale, cell line 2", "of Scale 2,"),
    ),
    "the expert with the largest score": Wrong(
        "experts = sharded(2)\nscores = torch.tensor([rank, 1.0 - rank])\nexperts[int(scores.argmax())](x)",
        ("of Scale 2,", "of Scale,", _MIXTURE),
    ),
    "a sharded root with an expert for each rank": Wrong(
        "mixture = Mixture()\nfor one in mixture.experts: fully_shard(one)\nfully_shard(mixture)\nmixture(x, rank)",
        ("all-gather of parameters of experts.0 (Scale)", "all-gather of parameters of experts.1 (Scale 2)"),
    ),
    "two towers in another order": Wrong(
        "towers = sharded(2)\nfor tower in towers if rank == 0 else towers[::-1]: tower(x)",
        ("of Scale,", "of Scale 2,"),
    ),
    "a layer that one rank drops": Wrong(
        "stack = sharded_stack()\nstack(x, [0, 1, 2] if rank == 0 else [0, 2])",
        ("all-gather of parameters of layers.1 (Scale 2)", "all-gather of parameters of layers.2 (Scale 3)"),
        is_quick=True,
    ),
    "layers dropped at random": Wrong(
        "import random\nrandom.seed(rank)\nstack = sharded_stack(8)\n"
        "for _ in range(5): stack(x, [at for at in range(8) if random.random() > 0.3])",
        ("all-gather of parameters of layers.",),
    ),
    "layers from the last to the first on one rank": Wrong(
        "stack = sharded_stack()\nstack(x, [0, 1, 2] if rank == 0 else [2, 1, 0])",
        ("layers.0 (Scale)", "layers.2 (Scale 3)"),
    ),
    "an early exit on one rank, then another model": Wrong(
        "stack, head = sharded_stack(), fully_shard(Scale())\nhead(stack(x, [0, 1] if rank else [0, 1, 2]))",
        ("layers.2 (Scale 3)", "Scale 4"),
    ),
    "the backward of another loss": Wrong(
        "first, second = sharded(2)\nlosses = first(x).sum(), second(x).sum()\nlosses[rank].backward()",
        ("reduce-scatter of gradients of Scale,", "reduce-scatter of gradients of Scale 2,", _MIXTURE),
    ),
    "another module gathered by hand": Wrong(
        "first, second = sharded(2)\n(first if rank == 0 else second).unshard()",
        ("of Scale,", "of Scale 2,"),
    ),
    "a teacher on one rank and a student on the other": Wrong(
        "teacher, student = fully_shard(Scale()), fully_shard(Scale())\n"
        "with torch.no_grad(): (teacher if rank == 0 else student)(x)",
        ("of Scale,", "of Scale 2,"),
    ),
    "parameters of FSDP registered in another order": Wrong(
        "model = fully_shard(TwoLayers('ab' if rank == 0 else 'ba'))\nmodel(batch)",
        ("a.weight, a.bias, b.weight, b.bias on rank 0; b.weight, b.bias, a.weight, a.bias on rank 1", _ORDER),
    ),
    "one of two models in DDP for each rank": Wrong(
        "models = [DDP(nn.Linear(4, 4)) for _ in range(2)]\nmodels[rank](batch).sum().backward()",
        ("mean of gradients of Linear,", "mean of gradients of Linear 2,", _MIXTURE),
        is_quick=True,
    ),
    "two models in DDP in another order": Wrong(
        "models = [DDP(nn.Linear(4, 4)) for _ in range(2)]\n"
        "for model in models if rank == 0 else models[::-1]: model(batch).sum().backward()",
        ("mean of gradients of Linear,", "mean of gradients of Linear 2,"),
    ),
    "one of two models in DDP after many steps": Wrong(
        "models = [DDP(nn.Linear(4, 4)) for _ in range(2)]\noptimizer = torch.optim.SGD(models[0].parameters(), 0.1)\n"
        "for step in range(60):\n    optimizer.zero_grad(); models[0](batch).sum().backward(); optimizer.step()\n"
        "models[rank](batch).sum().backward()",
        ("mean of gradients of Linear,", "mean of gradients of Linear 2,"),
    ),
    "actor and critic in turns that differ": Wrong(
        "actor, critic = DDP(nn.Linear(4, 4)), DDP(nn.Linear(4, 4))\n"
        "for step in range(2):\n    (actor if (step + rank) % 2 else critic)(batch).sum().backward()",
        ("mean of gradients of Linear,", "mean of gradients of Linear 2,"),
    ),
    "a rank that skips the first model": Wrong(
        "models = [DDP(nn.Linear(4, 4)) for _ in range(3)]\nfor at, model in enumerate(models):\n"
        "    if rank == 1 and at == 0: continue\n    model(batch).sum().backward()",
        ("mean of gradients of Linear,", "mean of gradients of Linear 2,"),
    ),
    "a discriminator that one rank trains twice": Wrong(
        "class D(nn.Linear): pass\nclass G(nn.Linear): pass\nd, g = DDP(D(4, 4)), DDP(G(4, 4))\n"
        "for model in (d, g) if rank == 0 else (d, d, g): model(batch).sum().backward()",
        ("mean of gradients of G,", "parameters or buffers of rank 0, cell line 4"),
    ),
    "parameters of DDP registered in another order": Wrong(
        "model = DDP(TwoLayers('ab' if rank == 0 else 'ba'))\nmodel(batch).sum().backward()",
        ("the parameters of TwoLayers have another order on each rank", _ORDER),
        is_quick=True,
    ),
    "parameters of DDP in the order of a set": Wrong(
        "class Heads(nn.Module):\n    def __init__(self, names):\n        super().__init__()\n"
        "        for name in names: setattr(self, name, nn.Parameter(torch.ones(4)))\n"
        "    def forward(self): return sum(self.parameters()).sum()\n"
        "model = DDP(Heads('qkv' if rank else 'kvq'))\nmodel().backward()",
        ("k, v, q on rank 0; q, k, v on rank 1", _ORDER),
    ),
    "DDP on one rank, gradients averaged by hand on the other": Wrong(
        "net = nn.Linear(4, 4)\nmodel = DDP(net)\n"
        "if rank == 0:\n    model(batch).sum().backward()\n"
        "else:\n"
        "    net(batch).sum().backward(); dist.all_reduce(torch.cat([net.bias.grad, net.weight.grad.flatten()]))",
        ("mean of gradients of Linear, cell line 4", "rank 1 calls all_reduce(float32[20], cell line 6)"),
    ),
    "a layer of tensor parallel for each rank": Wrong(
        "from torch.distributed.tensor import Replicate\nwhole = RowwiseParallel(input_layouts=Replicate())\n"
        "mesh = init_device_mesh('cpu', (2,))\n"
        "model = parallelize_module(Experts(), mesh, {'up': whole, 'down': whole})\n"
        "model(batch, rank)",
        ("of up", "of down"),
    ),
    "two threads with tensors of equal size": Wrong(
        "def average():\n    for _ in range(300): dist.all_reduce(torch.ones(4))\n"
        "with ThreadPoolExecutor(1) as pool:\n    future = pool.submit(average)\n"
        "    for _ in range(300): dist.all_reduce(torch.zeros(4))\n    future.result()",
        ("Two threads use this group, and each rank starts their calls in another order",),
    ),
}

RIGHT = {
    "all experts on all ranks": "mixture = Mixture()\nfor one in mixture.experts: fully_shard(one)\n"
    "for which in (0, 1): mixture(x, which).sum().backward()",
    "experts below a sharded root": "mixture = Mixture()\nfor one in mixture.experts: fully_shard(one)\n"
    "fully_shard(mixture)\nfor which in (1, 0, 1): mixture(x, which).sum().backward()",
    "the same branch on all ranks": "experts = sharded(2)\nfor step in range(4): experts[step % 2](x).sum().backward()",
    "layers dropped by a common seed": "import random\nrandom.seed(7)\nstack = sharded_stack(6)\n"
    "for _ in range(4): stack(x, [0, *[at for at in range(1, 6) if random.random() > 0.3]]).sum().backward()",
    "equal models that are sharded in two branches": "if rank == 0:\n    model = fully_shard(Scale(1))\nelse:\n"
    "    model = fully_shard(Scale(2))\nfor _ in range(3): model(x).sum().backward()",
    "equal models in DDP, created in two branches": "if rank == 0:\n    model = DDP(nn.Linear(4, 4))\nelse:\n"
    "    print('loading')\n    model = DDP(nn.Linear(4, 4))\nfor _ in range(3): model(batch).sum().backward()",
    "a model that only one rank has in addition": "extra = [fully_shard(Scale()) for _ in range(rank)]\n"
    "model = fully_shard(Scale())\nfor _ in range(3): model(x).sum().backward()",
    "more models on one rank, the last one used": "models = [fully_shard(Scale()) for _ in range(1 + rank)]\n"
    "for _ in range(3): models[-1](x).sum().backward()",
    "other names of equal parameters": "class Named(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        setattr(self, 'left' if rank else 'right', nn.Linear(4, 4))\n"
    "    def forward(self, x): return next(self.children())(x)\n"
    "model = DDP(Named())\nfor _ in range(3): model(batch).sum().backward()",
    "a model in a wrapper on one rank": "net = nn.Linear(4, 4)\nmodel = DDP(nn.Sequential(net) if rank else net)\n"
    "for _ in range(3): model(batch).sum().backward()",
    "an adversarial pair": "class D(nn.Linear): pass\nclass G(nn.Linear): pass\nd, g = DDP(D(4, 4)), DDP(G(4, 4))\n"
    "for _ in range(20):\n    d(g(batch).detach()).sum().backward()\n    g(batch).sum().backward()",
    "a model trained through another one": "d, g = DDP(nn.Linear(4, 4)), DDP(nn.Linear(4, 4))\n"
    "for _ in range(4):\n    d(g(batch).detach()).sum().backward()\n    d(g(batch)).sum().backward()",
    "a forward for the log on one rank": "a, b = DDP(nn.Linear(4, 4)), DDP(nn.Linear(4, 4))\n"
    "for _ in range(3):\n    b(batch).sum().backward()\n    out = b(batch)\n    if rank == 0: a(batch)\n"
    "    out.sum().backward()",
    "gradient accumulation": "model = DDP(nn.Linear(4, 4))\nfor step in range(6):\n"
    "    if step % 3:\n        with model.no_sync(): model(batch).sum().backward()\n"
    "    else:\n        model(batch).sum().backward()",
    "rebuilt buckets": "model = DDP(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), bucket_cap_mb=0.02)\n"
    "optimizer = torch.optim.SGD(model.parameters(), 0.1)\nfor _ in range(25):\n"
    "    optimizer.zero_grad(); model(torch.ones(2, 64)).sum().backward(); optimizer.step()",
    "unused parameters": "model = DDP(TwoLayers(), find_unused_parameters=True)\nfor step in range(4):\n"
    "    model.module.forward = model.module.b if (step + rank) % 2 else model.module.a\n"
    "    model(batch).sum().backward()",
    "Join with less data on one rank": "from torch.distributed.algorithms.join import Join\n"
    "model = DDP(nn.Linear(4, 4))\n"
    "with Join([model]):\n    for _ in range(3 + 2 * rank): model(batch).sum().backward()",
    "other lines for one collective": "if rank == 0:\n    dist.all_reduce(torch.ones(2))\nelse:\n"
    "    dist.all_reduce(torch.zeros(2))",
    "an asynchronous operation between buckets": "model = DDP(nn.Linear(4, 4))\nfor _ in range(3):\n"
    "    work = dist.all_reduce(torch.ones(3), async_op=True)\n    model(batch).sum().backward()\n    work.wait()",
    "tensor parallel": "mesh = init_device_mesh('cpu', (2,))\n"
    "model = parallelize_module(TwoLayers(), mesh, {'a': ColwiseParallel(), 'b': RowwiseParallel()})\n"
    "for _ in range(3): model(batch).sum().backward()",
    "replicas of shards": "mesh = init_device_mesh('cpu', (1, 2), mesh_dim_names=('replicas', 'shards'))\n"
    "model = fully_shard(TwoLayers(), mesh=mesh)\nfor _ in range(3): model(batch).sum().backward()",
    "a group for each thread": "groups = [dist.new_group() for _ in range(2)]\n"
    "def average(group):\n    for _ in range(50): dist.all_reduce(torch.ones(3 + groups.index(group)), group=group)\n"
    "with ThreadPoolExecutor(2) as pool: list(pool.map(average, groups))",
    "a checkpoint in its own group": "import tempfile, torch.distributed.checkpoint as dcp\n"
    "folder = [tempfile.mkdtemp()]; dist.broadcast_object_list(folder)\ngroup = dist.new_group()\n"
    "model = sharded_stack()\n"
    "for step in range(3):\n"
    "    future = dcp.async_save({'model': model.state_dict()}, checkpoint_id=f'{folder[0]}/{step}',"
    " process_group=group)\n    for _ in range(3): model(x).sum().backward()\n    future.result()\n"
    "dist.barrier()\nimport shutil; shutil.rmtree(folder[0], ignore_errors=True)",
    "one thread after the other": "with ThreadPoolExecutor(1) as pool:\n    for _ in range(5):\n"
    "        pool.submit(dist.all_reduce, torch.ones(3)).result()\n        dist.all_reduce(torch.ones(5))",
    "a thread that only loads": "model = DDP(nn.Linear(4, 4))\nwith ThreadPoolExecutor(1) as pool:\n"
    "    following = pool.submit(torch.randn, 2, 4)\n    for _ in range(5):\n"
    "        data, following = following.result(), pool.submit(torch.randn, 2, 4)\n"
    "        model(data).sum().backward()",
    "a checkpoint of a sharded model": "import tempfile, shutil, torch.distributed.checkpoint as dcp\n"
    "folder = [tempfile.mkdtemp()]; dist.broadcast_object_list(folder)\nmodel = sharded_stack()\n"
    "model(x).sum().backward()\n"
    "dcp.save({'model': model.state_dict()}, checkpoint_id=folder[0])\n"
    "dcp.load({'model': model.state_dict()}, checkpoint_id=folder[0])\ndist.barrier()\n"
    "shutil.rmtree(folder[0], ignore_errors=True)",
    "models created again and again": "for _ in range(4):\n    model = fully_shard(Scale())\n"
    "    model(x).sum().backward()\n"
    "    net = DDP(nn.Linear(4, 4)); net(batch).sum().backward()",
}
RIGHT["another model first on one rank"] = (
    "models = [fully_shard(Scale()) for _ in ['copy'] * rank + ['a', 'b']]\n"
    "for _ in range(3):\n    for model in models[-2:]: model(x).sum().backward()"
)
QUICK = (
    "all experts on all ranks",
    "equal models that are sharded in two branches",
    "an adversarial pair",
    "tensor parallel",
)

# On three ranks, in groups that overlap. Each rank has two of three equal models.
SETUP_OF_THREE = (
    SETUP
    + """
from torch.distributed.device_mesh import DeviceMesh

lists = [0, 1], [1, 2], [0, 2]
groups = [group for members in lists for group in [dist.new_group(members)] if rank in members]
meshes = [DeviceMesh.from_group(group, 'cpu') for group in groups]

def parallel(mesh):
    return parallelize_module(TwoLayers(), mesh, {'a': ColwiseParallel(), 'b': RowwiseParallel()})

def train(models):
    for _ in range(3):
        for model in models: model(batch).sum().backward()
"""
)
RIGHT_OF_THREE = {
    "DDP in groups that overlap": "train([DDP(nn.Linear(4, 4), process_group=group) for group in groups])",
    "FSDP in groups that overlap": "train([fully_shard(nn.Linear(4, 4), mesh=mesh) for mesh in meshes])",
    "tensor parallel in groups that overlap": "train([parallel(mesh) for mesh in meshes])",
    "tensor parallel in groups that overlap, in one model": "model = nn.Sequential(*map(parallel, meshes))\n"
    "model(batch)\ntrain(model)",
    "several layers for each group, in one model": "counts = {1: (1, 3), 2: (3, 1)}.get(rank, (1, 1))\n"
    "layers = [parallel(mesh) for mesh, count in zip(meshes, counts) for _ in range(count)]\n"
    "model = nn.Sequential(*layers)\nmodel(batch)\ntrain(model)",
}
WRONG_OF_THREE = {
    "two models of one of the groups in another order": Wrong(
        "models = [[DDP(nn.Linear(4, 4), process_group=group) for _ in range(2)] for group in groups]\n"
        "train([*models[0][:: -1 if rank == 1 else 1], *models[1]])",
        ("group [0,1]", "rank 0 calls all_reduce(float32[20], mean of gradients of Linear,", "of Linear 2,", _MIXTURE),
    ),
    "a layer of tensor parallel for each rank of a group": Wrong(
        "from torch.distributed.tensor import Replicate\nwhole = RowwiseParallel(input_layouts=Replicate())\n"
        "models = [parallelize_module(Experts(), mesh, {'up': whole, 'down': whole}) for mesh in meshes]\n"
        "models[0](batch, int(rank == 1))",
        ("rank 0 calls", "of up", "of down"),
    ),
}

# On four ranks.
RIGHT_OF_FOUR = {
    "tensor parallel in FSDP": "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\n"
    "model = parallelize_module(TwoLayers(), mesh['tp'], {'a': ColwiseParallel(), 'b': RowwiseParallel()})\n"
    "fully_shard(model, mesh=mesh['dp'])\nfor _ in range(3): model(batch).sum().backward()",
    "replicas of shards": "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('replicas', 'shards'))\n"
    "model = sharded_stack()\nother = fully_shard(TwoLayers(), mesh=mesh)\n"
    "for _ in range(3): model(x).sum().backward(); other(batch).sum().backward()",
    "another stage in each half": "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('pp', 'dp'))\n"
    "stage = fully_shard(Scale(rank // 2) if rank < 2 else TwoLayers(), mesh=mesh['dp'])\n"
    "for _ in range(3): stage(batch).sum().backward()",
    "another expert in each half": "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('ep', 'dp'))\n"
    "experts = [fully_shard(Scale(at), mesh=mesh['dp']) for at in range(2)]\n"
    "for _ in range(3): experts[rank // 2](x).sum().backward()",
}
