"""Wrong uses that nothing else complains about are said, and right ones that look like them are not."""

from __future__ import annotations

import itertools

import pytest

from ddp_notebook.errors import RankError

_MAKE = """
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
def make(*sizes):
    return nn.Sequential(*[nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])])
def forget():
    for name in ("model", "part", "optimizer", "other", "w"): globals().pop(name, None)
x = torch.ones(2, 4)
def train(clip_first, scale=8.0):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        if not clip_first: scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
        scaler.step(optimizer); scaler.update()
"""
_FIRST = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1); "


@pytest.fixture(scope="module")
def ranks(session):
    session.run(_MAKE, quiet=True)
    return session


def mistakes(session, code: str) -> tuple[str, ...]:
    session.run(f"forget()\n{code}", quiet=True)
    return session.check().mistakes


_ROWS_AND_COLUMNS = "{'0': ColwiseParallel(), '1': RowwiseParallel()}"


@pytest.mark.parametrize(
    "how",
    [
        "fully_shard(model)",
        "for part in model: fully_shard(part)",
        f"parallelize_module(model, init_device_mesh('cpu', (2,)), {_ROWS_AND_COLUMNS})",
    ],
)
def test_an_optimizer_made_before_the_model_was_sharded(ranks, how):
    (found,) = mistakes(ranks, f"model = make(4, 8, 4)\n{_FIRST}\n{how}")
    assert found == (
        "ranks 0,1: optimizer holds 4 parameters that no model uses: it was made before model was sharded, so "
        "its steps change nothing of model; make it after fully_shard or parallelize_module"
    )
    assert repr(ranks.check()).splitlines()[-1] == f"wrong on {found}"


_RIGHT = {
    "made after": "model = make(4, 8, 4); fully_shard(model); " + _FIRST,
    "no shards": "model = make(4, 8, 4); " + _FIRST,
    "in DDP": "model = make(4, 8, 4); optimizer = torch.optim.SGD(model.parameters()); model = DDP(model)",
    "the model is in an object": (
        "class Trainer: pass\nother = Trainer(); other.model = make(4, 8); model = make(4, 8); fully_shard(model)\n"
        "optimizer = torch.optim.SGD(other.model.parameters())"
    ),
    "a tensor of the user's": (
        "model = make(4, 8); fully_shard(model); w = torch.ones(8, 4, requires_grad=True)\n"
        "optimizer = torch.optim.SGD([w])"
    ),
    "another model, of another shape, that is gone": (
        "model = make(4, 8); fully_shard(model); optimizer = torch.optim.SGD(make(5, 5).parameters())"
    ),
    "one part frozen": "model = make(4, 8, 4); fully_shard(model); optimizer = torch.optim.SGD(model[1].parameters())",
}


@pytest.mark.parametrize("case", _RIGHT)
def test_what_looks_like_it_and_is_right(ranks, case):
    assert mistakes(ranks, _RIGHT[case]) == ()


def test_no_false_alarm_over_shapes_and_ways_to_shard(ranks):
    """Programs made of what users combine; each is right, so nothing may be said of it."""
    ways = (
        *("fully_shard(model)", "[fully_shard(part) for part in model]; fully_shard(model)", "model = DDP(model)"),
        "fully_shard(model, mesh=init_device_mesh('cpu', (2, 1), mesh_dim_names=('replica', 'shard')))",
        "parallelize_module(model, init_device_mesh('cpu', (2,)), {'0': ColwiseParallel(output_layouts=Replicate())})",
    )
    sizes = ((4, 6), (4, 5, 4), (4, 2, 7, 4), (4, 4, 4, 4))
    kinds = ("SGD(model.parameters(), lr=0.1)", "AdamW(model.parameters())", "SGD([model[0].weight], lr=0.1)")
    for way, size, kind in itertools.product(ways, sizes, kinds):
        made = kind.replace("model[0]", "getattr(model, 'module', model)[0]")
        code = (
            f"model = make(*{size}); {way}\noptimizer = torch.optim.{made}\nmodel(x).sum().backward(); optimizer.step()"
        )
        assert mistakes(ranks, code) == (), code


def test_clipping_before_unscale(ranks):
    start = f"model = make(4, 4); {_FIRST}"
    (found,) = mistakes(ranks, f"{start}train(clip_first=True)")
    assert found == (
        "ranks 0,1: gradients were clipped by clip_grad_norm_ 3 times while a GradScaler had them scaled: call "
        "scaler.unscale_(optimizer) before"
    )
    assert ranks.check().mistakes  # a cell that scales nothing changes nothing
    assert mistakes(ranks, f"{start}train(clip_first=False)") == ()
    assert mistakes(ranks, f"{start}train(clip_first=True, scale=1.0)") == ()


def test_a_model_beside_the_scaled_one_is_clipped_rightly(ranks):
    code = f"""model = make(4, 4); {_FIRST}other = make(4, 4); other(x).sum().backward()
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
scaler.scale(model(x).sum()).backward()
torch.nn.utils.clip_grad_norm_(list(other.parameters()), 1.0)
scaler.step(optimizer); scaler.update()"""
    assert mistakes(ranks, code) == ()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "init_device_mesh('cpu', (3, 2))",
            r"a mesh of 3 \* 2 = 6 ranks != world_size 2: its sizes have to multiply to 2",
        ),
        ("init_device_mesh(device_type='cpu', mesh_shape=(3,))", r"a mesh of 3 = 3 ranks != world_size 2"),
        (
            "distribute_tensor(torch.ones(4, 3), init_device_mesh('cpu', (2,)), [Shard(2)])",
            r"Shard\(2\) of a tensor of shape \(4, 3\): it has 2 dimensions, 0 to 1",
        ),
        (
            "distribute_tensor(torch.ones(4, 3), init_device_mesh('cpu', (2,)), [Shard(0), Shard(1)])",
            r"2 placements .* != 1 dimensions of the mesh \(2,\): one placement for each of them",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_its_numbers_and_the_group_stays_usable(ranks, code, words):
    imports = "from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh"
    with pytest.raises(RankError, match=words):
        ranks.run(f"{imports}\n{code}", quiet=True)
    ranks.run("import torch.distributed as dist\ny = torch.ones(1); dist.all_reduce(y)", quiet=True)
    assert ranks["y"][1].item() == 2
