"""Parts of a model or a tensor on each rank: as data, compared with the ranks' tensors, and as a picture."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_notebook import lessons
from ddp_notebook.errors import UsageError
from ddp_notebook.run.sharding.placements import placements_of

_MAKE = """
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
def of(*shape): return torch.arange(float(torch.Size(shape).numel())).reshape(shape)
"""
_CASES = [  # sizes of the mesh, its placements, the shape of the tensor
    ((4,), "[Shard(0)]", (8, 3)),
    ((4,), "[Shard(1)]", (3, 10)),
    ((4,), "[Shard(0)]", (5, 2)),
    ((4,), "[Replicate()]", (4, 4)),
    ((2, 2), "[Shard(0), Shard(1)]", (4, 6)),
    ((2, 2), "[Shard(0), Shard(0)]", (9, 2)),
    ((2, 2), "[Replicate(), Shard(1)]", (3, 5)),
    ((4, 1), "[Shard(2), Replicate()]", (2, 3, 7)),
]


def test_control_characters_of_names_are_escaped():
    part: dict[str, object] = {"name": "w\x1b[2J\ud800", "dtype": "float32", "shape": [1], "placements": [], "mesh": []}
    part |= {"offset": [0], "size": [1], "nbytes": 4}
    shown = repr(placements_of("m\x1b]0;", {rank: {"parts": [part]} for rank in range(2)}))
    assert shown.isascii() and "\x1b" not in shown and "w\\x1b[2J\\ud800" in shown


@pytest.fixture(scope="module")
def ranks(waiting_host_server):
    from ddp_notebook import api

    waiting_host_server()
    with api.start(4) as session:
        session.run(_MAKE, quiet=True)
        yield session


@pytest.mark.parametrize("case", range(len(_CASES)))
def test_each_rank_has_the_part_that_is_told(ranks, case):
    mesh, placements, shape = _CASES[case]
    names = ("rows", "columns")[: len(mesh)]
    ranks.run(
        f"mesh = init_device_mesh('cpu', {mesh}, mesh_dim_names={names})\n"
        f"x = distribute_tensor(of(*{shape}), mesh, {placements}); part = x.to_local().clone()",
        quiet=True,
    )
    whole = np.arange(float(np.prod(shape)), dtype=np.float32).reshape(shape)
    (tensor,) = ranks.placement("x").tensors
    assert tensor.mesh == tuple(zip(names, mesh, strict=True)) and tensor.shape == shape
    parts = ranks["part"]
    for rank, part in tensor.parts.items():
        there = tuple(slice(at, at + n) for at, n in zip(part.offset, part.size, strict=True))
        assert np.array_equal(whole[there].reshape(part.size), parts[rank].numpy().reshape(part.size))
        assert part.nbytes == parts[rank].numpy().nbytes


def test_a_model_in_fsdp_and_a_part_of_it(ranks):
    ranks.run("net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))\nfully_shard(net)", quiet=True)
    found = ranks.placement("net")
    assert found.is_sharded and [one.name for one in found.tensors] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert repr(found).splitlines()[0] == "net: 76 B + 76 B + 76 B + 76 B = 304 B"
    assert ranks.placement("net.1.weight").tensors[0].parts[2].offset == (2, 0)


def test_tensor_parallel_and_a_model_that_is_whole(ranks):
    ranks.run(
        "net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))\nwhole = nn.Linear(4, 4)\n"
        "parallelize_module(net, init_device_mesh('cpu', (4,)), {'0': ColwiseParallel(), '1': RowwiseParallel()})",
        quiet=True,
    )
    up, down = (ranks.placement("net").tensors[at] for at in (0, 2))
    assert [up.parts[1].offset, down.parts[1].offset] == [(2, 0), (0, 2)]
    assert repr(ranks.placement("whole")).startswith("whole is not sharded: 4 ranks * 80 B = 320 B")


def test_partial_sums_and_tensors_of_ranks_own(ranks):
    ranks.run(
        "y = DTensor.from_local(torch.ones(2, 2), init_device_mesh('cpu', (4,)), [Partial()])\n"
        "z = torch.ones(rank + 1)",
        quiet=True,
    )
    assert ranks.placement("y").tensors[0].is_partial
    assert [part.size for part in ranks.placement("z").tensors[0].parts.values()] == [(1,), (2,), (3,), (4,)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "ranks 0-3: undefined variable 'nothing'"),
        ("net.9", "net has no '9'"),
        ("rank", "placement needs a model or a tensor, but rank is of type int"),
    ],
)
def test_what_has_no_placement_is_named(ranks, name, words):
    ranks.run("net = nn.Sequential(nn.Linear(1, 1))", quiet=True)
    with pytest.raises(UsageError, match=words):
        ranks.placement(name)


def test_a_model_of_the_notebooks_is_no_name(ranks):
    with pytest.raises(
        UsageError, match=r'name must be the name of a variable, e\.g\. placement\("model"\), got a list'
    ):
        ranks.placement([1])


def test_the_picture_fills_what_each_rank_has(ranks):
    ranks.run("net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))\nfully_shard(net)", quiet=True)
    figure = lessons.placement("net")
    axes = figure.axes[0]
    filled = [one for one in axes.patches if one.get_label() == "part"]
    assert len(filled) == 4 * 4
    assert figure._repr_png_()[0].startswith(b"\x89PNG")
