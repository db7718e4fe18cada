"""Collectives of FSDP2, HSDP, DTensor and tensor parallel have their module and purpose as name."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ddp_notebook.rank.group.calls import KEPT, Call
from ddp_notebook.rank.group.sequences import Known, Moment, Sequence, name_modules
from ddp_notebook.rank.record.value_sampling import FIRST_STEPS, spread

_PERIOD = 16  # the period of a loop whose values are thinned
_STEPS = 70

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

_FSDP = [
    ("blocks.0", "all-gather of parameters"),
    ("blocks.1", "all-gather of parameters"),
    ("(root)", "all-gather of parameters"),
]
_CASES = {  # a model, the modules of its forward's collectives, and of its backward's
    "FSDP2": (
        "net = Net([Block(), Block()])\nfor b in net.blocks: fully_shard(b)\nfully_shard(net)",
        _FSDP,
        [*_FSDP[:2], *[(name, "reduce-scatter of gradients") for name in ("(root)", "blocks.0", "blocks.1")]],
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
    """Return module and purpose of the collectives of the last cell."""
    calls = session.recording.collectives(rank=rank)
    cell = max(call.cell for call in calls)
    ours = [call for call in calls if call.cell == cell]
    return [(call.module, call.meaning) for call in ours if (call.api == "backward") == backward]


@pytest.mark.parametrize("case", _CASES)
def test_each_collective_has_its_modules_name(ranks, case):
    make, forward, backward = _CASES[case]
    ranks.run(make, quiet=True)
    for _ in range(2):  # the names are known the second time
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


@pytest.mark.long
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


# A loop whose values are thinned after its first steps, always alike. Forwards are then not marked either.
_LOOP = f"""
import os, threading, time
from torch.distributed.tensor._api import _FromTorchTensor
from torch.distributed.tensor._redistribute import Redistribute
from ddp_notebook.rank.engine import RankEngine
engine = RankEngine.instance()._rank
thinning = engine._core.recording.event_buffer.thinning
thinning._choose_period = lambda seconds: setattr(thinning, "period", {_PERIOD})
class Some(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.used = nn.ModuleList([MLP() for _ in range(3)]), [0, 1]
        for b in self.blocks: parallelize_module(b, mesh, {{'up': ColwiseParallel(), 'down': RowwiseParallel()}})
    def forward(self, x):
        for i in self.used: x = self.blocks[i](x)
        return x
model, x = Some(), torch.ones(4, 8, requires_grad=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
mark, are_marked = (_FromTorchTensor.forward, Redistribute.forward), []
def train(steps, before_forward=lambda step: None, before_backward=lambda step: None):
    for step in range(steps):
        before_forward(step)
        loss = model(x).sum()
        before_backward(step)
        loss.backward()
        are_marked.append((_FromTorchTensor.forward, Redistribute.forward) == mark)
        optimizer.step()
"""
_UNLIKE = FIRST_STEPS + 4  # a step that is not marked


@pytest.fixture
def loop(ranks):
    ranks.run(_LOOP, quiet=True)
    yield ranks
    ranks.run("del thinning._choose_period", quiet=True)


def by_step(session: Any, rank: int) -> list[tuple[str, ...]]:
    """Return the modules of the collectives in each step of the last cell."""
    calls = session.recording.collectives(rank=rank)
    cell = max(call.cell for call in calls)
    steps: dict[int, list[str]] = {}
    for call in calls:
        if call.cell == cell:
            steps.setdefault(call.step, []).append(call.module)
    return [tuple(steps[step]) for step in sorted(steps)]


def is_marked(step: int) -> bool:
    return step < FIRST_STEPS or spread(step) % _PERIOD == 0


@pytest.mark.long
def test_a_long_loop_has_names_in_all_steps_and_marks_in_few(loop):
    loop.run(f"train({_STEPS})", quiet=True)
    for rank in (0, 1):
        assert by_step(loop, rank) == _STEPS * [("blocks.0.down", "blocks.1.down", "blocks.1.up", "blocks.0.up")]
        assert loop["are_marked"][rank] == [is_marked(step) for step in range(_STEPS)]
    loop.run("are_marked.clear(); train(1)", quiet=True)
    assert loop["are_marked"][0] == loop["are_marked"][1] == [True], "another cell"


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "blocks"),
    [
        ("model.used = [0, 2]", [0, 2]),  # equal shapes: only the names of the forward distinguish them
        ("model.used = [1, 0]", [1, 0]),
        ("model.used = [0, 1, 2]", [0, 1, 2]),
        ("globals().update(x=torch.ones(5, 8, requires_grad=True))", [0, 1]),
    ],
    ids=["another block", "another order", "one more", "another shape"],
)
def test_a_backward_has_no_names_of_another_sequence(loop, change, blocks):
    loop.run(f"def before(step):\n    if step == {_UNLIKE}: {change}\ntrain({_STEPS}, before)", quiet=True)
    forward = tuple(f"blocks.{i}.down" for i in blocks)
    named = (*forward, *[f"blocks.{i}.up" for i in reversed(blocks)])
    unnamed = (*forward, *["" for _ in blocks])
    until = next(step for step in range(_UNLIKE, _STEPS) if is_marked(step))  # when its own names are known
    for rank in (0, 1):
        steps = by_step(loop, rank)
        assert steps[:_UNLIKE] == _UNLIKE * [("blocks.0.down", "blocks.1.down", "blocks.1.up", "blocks.0.up")]
        assert steps[_UNLIKE:until] == (until - _UNLIKE) * [unnamed]
        assert steps[until:] == (_STEPS - until) * [named]


def test_what_is_under_way_in_a_step_without_marks_is_named(loop, tmp_path):
    seen = str(tmp_path / "seen")
    loop.run(
        f"""
found, until = [""], time.monotonic() + 60
def before(step):  # rank 0 waits in its backward meanwhile
    while step == {_UNLIKE} and rank == 1 and not os.path.exists({seen!r}) and time.monotonic() < until:
        time.sleep(0.01)
def look():
    while " of blocks" not in found[-1] and time.monotonic() < until:  # what marked steps tell is known within a second
        time.sleep(0.01)
        under_way = [call for call in engine._network.recorder.operations() if call.backward is not None]
        found.extend(call.describe().meaning for call in under_way if call.moment.step == {_UNLIKE})
    open({seen!r}, "w").close()
watcher = threading.Thread(target=look)
if rank == 0: watcher.start()
train({_UNLIKE + 1}, before_backward=before)
if rank == 0: watcher.join()
""",
        quiet=True,
    )
    assert loop["found"][0][-1] == "redistribution: partial sums to a whole of blocks.1.up"
    assert len({*loop["found"][0][1:-1]}) <= 1, "nothing else before"
    assert not loop["are_marked"][0][_UNLIKE]


class _Kernel:
    """An operator whose arguments are the shape of its tensor."""

    at_rest = 1

    def shapes_of(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return torch.float32, arguments, arguments

    def facts_of(self, rest: tuple[Any, ...]) -> tuple[Any, ...]:
        return rest


_KERNEL, _GROUP, _WHERE = cast(Any, _Kernel()), cast(Any, SimpleNamespace(serial=0)), compile("", "cell", "exec")


def sequence(known: Known, *calls: str, is_marked: bool) -> tuple[Sequence, list[Call]]:
    """Start calls of a step: modules of a forward, or ">" and modules of a backward."""
    one, made = Sequence(known, is_marked=is_marked), []
    for words in calls:
        call = Call(_KERNEL, _GROUP, 0, (torch.Size((1,)),), 0, 0)
        call.backward = cast(Any, object()) if words.startswith(">") else None
        call.moment = Moment(1, 1, 0, KEPT, one)
        call.site = "dtensor", None, _WHERE, 0, None, words.removeprefix(">"), 0
        one.add(call)
        made.append(call)
    return one, made


def end(one: Sequence) -> None:
    one.is_over = True
    one.end()


def names(calls: list[Call]) -> list[str]:
    return [call.site[5] for call in calls]


def test_a_running_step_is_identified_by_its_first_calls():
    known = Known()
    end(sequence(known, "a", ">x", ">y", is_marked=True)[0])
    end(sequence(known, "a", ">x", ">z", ">z", is_marked=True)[0])
    one, calls = sequence(known, "a", ">", ">", is_marked=False)
    one.name()
    assert names(calls) == ["a", "x", ""]
    end(one)
    assert names(calls) == ["a", "x", "y"], "a whole step is the one of so many calls"


def test_steps_that_are_alike_and_have_other_names_have_none():
    known = Known()
    for name in ("x", "z", "z"):
        end(sequence(known, "a", f">{name}", ">y", is_marked=True)[0])
    one, calls = sequence(known, "a", ">", ">", is_marked=False)
    end(one)
    assert names(calls) == ["a", "", "y"]


def test_a_name_that_is_known_in_a_backward_must_be_the_same():
    known = Known()
    end(sequence(known, "a", ">a", ">y", is_marked=True)[0])  # simulates a forward that runs again in the backward
    one, calls = sequence(known, "a", ">b", ">", is_marked=False)
    end(one)
    assert names(calls) == ["a", "b", ""]


@pytest.mark.long
def test_a_step_that_is_over_keeps_no_calls():
    known = Known()
    one, calls = sequence(known, "a", ">x", is_marked=True)
    one.is_over = True
    name_modules([*calls, one])
    gc.collect()
    gc.disable()
    try:
        del one, calls
        assert gc.collect() == 0, "no cycle is left"
    finally:
        gc.enable()


def test_marks_that_come_and_go_compile_nothing_again(ranks):
    ranks.run(
        """
from torch._dynamo.testing import CompileCounter
from ddp_notebook.rank.engine import RankEngine
modules, counter = RankEngine.instance()._rank._core.recording.event_buffer.modules, CompileCounter()
@torch.compile(backend=counter)
def compiled(x):
    return DTensor.from_local(x, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local()
for on in (True, False, True, False):
    modules.mark(on)
    compiled(torch.ones(2, 2))
count = counter.frame_count
""",
        quiet=True,
    )
    assert list(ranks["count"].values()) == [1, 1]


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
            *[(name, "reduce-scatter of gradients") for name in names],
            *[(name, "sum of gradients over replicas") for name in names],
        ]
    )
