"""Collectives of FSDP2, HSDP, DTensor and tensor parallel are named by their module and meaning."""

from __future__ import annotations

from typing import Any

import pytest

_MODELS = """
import torch.nn as nn, torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
                                               parallelize_module)
from torch.utils.checkpoint import checkpoint
mesh = init_device_mesh("cpu", (2,))
class MLP(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
    def forward(self, x):
        return self.down(F.relu(self.up(x)))
class Attention(nn.Module):
    def __init__(self, d=8, heads=2):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.ModuleList(nn.Linear(d, d) for _ in range(3)), nn.Linear(d, d)
    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in self.qkv)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
class Block(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(d), Attention(d), MLP(d)
    def forward(self, x):
        h = x + self.attention(self.norm(x))
        return h + checkpoint(self.mlp, h, use_reentrant=False)
class Net(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.tok, self.blocks, self.head = nn.Embedding(11, 8), nn.ModuleList(blocks), nn.Linear(8, 11)
    def forward(self, ids):
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
torch.manual_seed(0)
ids = torch.arange(12).reshape(2, 6) % 11
"""

_FSDP = [("blocks.0", "gather of parameters"), ("blocks.1", "gather of parameters"), ("(root)", "gather of parameters")]
_CASES = {  # a model, the modules of its forward's collectives, and of its backward's
    "FSDP2": (
        "net = Net([Block(), Block()])\nfor b in net.blocks: fully_shard(b)\nfully_shard(net)",
        _FSDP,
        [*_FSDP[:2], *[(name, "scatter of gradients") for name in ("(root)", "blocks.0", "blocks.1")]],
    ),
    "tensor parallel": (
        "net = Net([MLP(), MLP()])\nfor b in net.blocks: parallelize_module(b, mesh, "
        "{'up': ColwiseParallel(), 'down': RowwiseParallel()})",
        [(f"blocks.{i}.down", "redistribution: partial sums to a whole") for i in range(2)],
        [(f"blocks.{i}.up", "redistribution: partial sums to a whole") for i in range(2)],
    ),
    "sequence parallel": (
        "net = Net([Block()])\nb = net.blocks[0]\n"
        "parallelize_module(net, mesh, {'tok': RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),"
        " 'blocks.0.norm': SequenceParallel(),"
        " 'blocks.0.attention': PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),"
        " 'blocks.0.mlp': PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),"
        " **{f'blocks.0.attention.qkv.{i}': ColwiseParallel() for i in range(3)},"
        " 'blocks.0.attention.out': RowwiseParallel(output_layouts=Shard(1)),"
        " 'blocks.0.mlp.up': ColwiseParallel(), 'blocks.0.mlp.down': RowwiseParallel(output_layouts=Shard(1)),"
        " 'head': ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())})",
        [
            ("tok", "redistribution: partial sums to shards"),
            ("blocks.0.attention", "redistribution: shards to a whole"),
            ("blocks.0.attention.out", "redistribution: partial sums to shards"),
            ("blocks.0.mlp", "redistribution: shards to a whole"),
            ("blocks.0.mlp.down", "redistribution: partial sums to shards"),
            ("head", "redistribution: shards to a whole"),
        ],
        None,
    ),
    "DTensor by hand": (
        """
class Hand(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]))
    def forward(self, x):
        x = DTensor.from_local(x, mesh, [Replicate()])
        return (x @ self.w.redistribute(mesh, [Replicate()])).to_local()
net = Net([Hand(), MLP()])""",
        [("blocks.0", "redistribution: shards to a whole")],
        [],
    ),
}


@pytest.fixture(scope="module")
def ranks(session) -> Any:
    session.run(_MODELS, quiet=True)
    return session


def named(session: Any, *, backward: bool, rank: int = 0) -> list[tuple[str, str]]:
    """Module and meaning of the collectives of the last cell."""
    calls = session.recording.collectives(rank=rank)
    cell = max(call.cell for call in calls)
    ours = [call for call in calls if call.cell == cell]
    return [(call.module, call.meaning) for call in ours if (call.api == "backward") == backward]


@pytest.mark.parametrize("case", _CASES)
def test_each_collective_has_its_modules_name(ranks, case):
    make, forward, backward = _CASES[case]
    ranks.run(make, quiet=True)
    for _ in range(2):  # the second time names are known
        ranks.run("out = net(ids)\nout.sum().backward()", quiet=True)
        for rank in (0, 1):
            assert sorted(set(named(ranks, backward=False, rank=rank))) == sorted(forward)
            back = named(ranks, backward=True, rank=rank)
            assert all(module for module, _ in back)
            if backward is not None:
                assert sorted(set(back)) == sorted(backward)


_SHAPE_NAMES = (
    *("a stack", "a transformer", "nested", "one part called twice", "branches"),
    "lists of lists that return a dictionary",
)
_SHAPES = """
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.head = MLP(), nn.Linear(8, 3)
    def forward(self, x):
        return self.head(self.shared(self.shared(x)))
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.ways, self.scale = nn.ModuleDict({"left": MLP(), "right": MLP()}), nn.Parameter(torch.ones(1))
    def forward(self, x):
        return self.scale * sum(way(x) for way in self.ways.values())
class Returns(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.ModuleList([nn.ModuleList([MLP(), MLP()]), nn.ModuleList([MLP()])])
    def forward(self, x):
        return {"out": [self.inside[1][0](self.inside[0][1](self.inside[0][0](x)))]}
shapes = {
    "a stack": lambda: (nn.Sequential(*[MLP() for _ in range(3)]), torch.ones(4, 8)),
    "a transformer": lambda: (Net([Block(), Block()]), ids),
    "nested": lambda: (nn.Sequential(nn.Sequential(MLP(), nn.Sequential(MLP())), MLP()), torch.ones(2, 8)),
    "one part called twice": lambda: (Twice(), torch.ones(4, 8)),
    "branches": lambda: (Branches(), torch.ones(4, 5, 8)),
    "lists of lists that return a dictionary": lambda: (Returns(), torch.ones(1, 8)),
}
def make(shape, how):
    net, x = shapes[shape]()
    parts = {name: part for name, part in net.named_modules() if isinstance(part, MLP)}
    if how == "FSDP2":
        inside = {id(p) for part in parts.values() for p in part.parameters()}
        expected = [*parts, *["(root)"] * any(id(p) not in inside for p in net.parameters())]
        for part in parts.values(): fully_shard(part)
        fully_shard(net)
    else:
        expected = [f"{name}.down" for name in parts]
        for part in parts.values(): parallelize_module(part, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net, x, sorted(expected)
"""


@pytest.mark.parametrize("how", ["FSDP2", "tensor parallel"])
@pytest.mark.parametrize("shape", _SHAPE_NAMES)
def test_every_forward_collective_has_its_modules_name(ranks, shape, how):
    ranks.run(f"{_SHAPES}\nnet, x, expected = make({shape!r}, {how!r})", quiet=True)
    ranks.run("for _ in range(2): out = net(x)", quiet=True)
    for rank in (0, 1):
        found = named(ranks, backward=False, rank=rank)
        assert sorted({module for module, _ in found}) == ranks["expected"][rank]


def test_a_module_that_is_called_alone_and_then_in_its_model(ranks):
    ranks.run(
        "net = nn.Sequential(MLP())\n"
        "parallelize_module(net, mesh, {'0.up': ColwiseParallel(), '0.down': RowwiseParallel()})",
        quiet=True,
    )
    ranks.run("y = net[0](torch.ones(2, 8)).sum()", quiet=True)
    assert named(ranks, backward=False) == [("down", "redistribution: partial sums to a whole")]
    ranks.run("y = net(torch.ones(2, 8)).sum()\ndel net", quiet=True)
    assert named(ranks, backward=False) == [("0.down", "redistribution: partial sums to a whole")]


def test_collectives_of_the_users_own_have_no_meaning(ranks):
    ranks.run("import torch.distributed as dist\nx = torch.ones(1); dist.all_reduce(x)", quiet=True)
    assert named(ranks, backward=False) == [("", "")]


def test_compiled_code_keeps_dtensors_functions_whole(ranks):
    ranks.run(
        """
from torch.distributed.tensor._redistribute import Redistribute
def f(x):
    return DTensor.from_local(x, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local()
explained = torch._dynamo.explain(f)(torch.ones(2, 2)).graph_break_count
""",
        quiet=True,
    )
    assert list(ranks["explained"].values()) == [0, 0]


def test_hsdp_on_a_mesh_of_two_by_two(make_session_alone):
    session = make_session_alone(4)
    session.run(_MODELS, quiet=True)
    session.run(
        "two = init_device_mesh('cpu', (2, 2), mesh_dim_names=('replica', 'shard'))\n"
        "net = Net([MLP(), MLP()])\nfor b in net.blocks: fully_shard(b, mesh=two)\nfully_shard(net, mesh=two)\n"
        "net(ids).sum().backward()",
        quiet=True,
    )
    names = ("(root)", "blocks.0", "blocks.1")
    assert sorted(named(session, backward=False)) == sorted(_FSDP)
    assert sorted(set(named(session, backward=True))) == sorted(
        [
            *_FSDP[:2],
            *[(name, "scatter of gradients") for name in names],
            *[(name, "sum of gradients over replicas") for name in names],
        ]
    )
