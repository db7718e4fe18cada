"""Wrong uses that raise no other error are reported, and similar correct ones are not."""

from __future__ import annotations

import itertools
from importlib.metadata import version

import pytest

from ddp_notebook.errors import CellTimeoutError, RankError

_MAKE = """
import os
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
def make(*sizes):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])])
def forget():
    "What earlier cells have done: the first scaled loss, replicated tensor and save of a cell begin anew."
    for name in ("model", "part", "optimizer", "other", "w"): globals().pop(name, None)
    torch.amp.GradScaler("cpu").scale(torch.ones(()))
    DTensor.from_local(torch.ones(1), init_device_mesh("cpu", (2,)), [Replicate()])
    torch.save(0, os.devnull)
x = torch.ones(2, 4)
def train(clip_first, scale=8.0):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        if not clip_first: scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
        "its steps do not change model; create it after fully_shard or parallelize_module"
    )
    assert repr(ranks.check()).splitlines()[-1] == f"wrong on {found}"


def test_a_check_of_a_name_reports_its_mistakes_only(ranks):
    (found,) = mistakes(ranks, f"x, model = 1, make(4, 8, 4)\n{_FIRST}\nfully_shard(model)")
    assert repr(ranks.check("x")) == "2 ranks agree: x"
    assert ranks.check("model", "x").mistakes == ranks.check("optimizer").mistakes == (found,)
    ranks.run("x = torch.ones(2, 4)", quiet=True)


def test_a_finding_is_shown_by_one_check_only(ranks):
    from ddp_notebook.session_commands import compare_variables

    code = (
        "forget()\nimport torch.nn as nn\nnet = nn.Linear(1, 1)\nfor p in net.parameters(): nn.init.constant_(p, rank)"
    )
    ranks.run(code, quiet=True)
    shown = "  net.weight: rank 0 and rank 1 differ by up to 1 (relative 1)"
    assert shown in repr(compare_variables([])).split("\n")
    assert shown in repr(compare_variables(["net"])).split("\n")
    again = repr(compare_variables([])).split("\n")
    assert shown not in again and again[-1] == "1 finding as before: net (%ddp_check NAME shows all)"
    ranks.run("with torch.no_grad(): net.bias += rank", quiet=True)
    assert shown in repr(compare_variables([])).split("\n"), "it has changed"
    ranks.run("del net", quiet=True)


def test_models_of_earlier_cells_come_last(ranks):
    start = (
        "import torch.nn as nn\n{0} = nn.Linear(1, 1); {0}_steps = torch.optim.SGD({0}.parameters(), lr=rank + 1.0)\n"
    )
    step = "{0}(torch.ones(1)).backward(); {0}_steps.step()"
    ranks.run("forget()\n" + start.format("toy") + step.format("toy"), quiet=True)
    ranks.run(start.format("net") + step.format("net"), quiet=True)
    found = ranks.check()
    order = list(dict.fromkeys(str(one).partition(".")[0] for one in found.differences))
    assert order == ["net", "net_steps", "toy", "toy_steps"]
    assert found.earlier == {"toy", "toy_steps"}
    ranks.run("del toy, toy_steps, net, net_steps", quiet=True)


_PARALLEL = f"parallelize_module(model, init_device_mesh('cpu', (2,)), {_ROWS_AND_COLUMNS})"


def test_a_check_of_a_tensor_parallel_model_counts_parameters(ranks):
    """Only one of the four parameters is equal on all ranks: the bias of the rowwise layer."""
    ranks.run(f"forget()\nmodel = make(4, 8, 4); {_PARALLEL}", quiet=True)
    assert repr(ranks.check("model")) == (
        "2 ranks agree: 1 parameter (4 elements); not compared: 3 sharded (model.0.weight, model.0.bias, ...)"
    )


@pytest.mark.parametrize(
    ("how", "advice"),
    [
        (_PARALLEL, "The ranks hold parts of the parameters, and these parts are from different steps now"),
        ("model = DDP(model)", "DDP(model.module) gives all ranks those of rank 0"),
        ("", "Load the last checkpoint, or make the model and the optimizer again"),
    ],
)
def test_advice_after_different_numbers_of_steps_fits_the_model(ranks, how, advice, capsys):
    ranks.run(f"forget()\nmodel = make(4, 8, 4)\n{how}\n{_FIRST}", quiet=True)
    with pytest.raises(RankError, match="in between"):
        ranks.run("model(x).sum().backward()\nif rank == 1: raise ValueError('in between')\noptimizer.step()")
    said = capsys.readouterr().err
    assert "optimizer steps in this cell: 1 on rank 0, 0 on rank 1. " in said and advice in said
    assert ("DDP(model.module)" in said) == ("DDP" in how)


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
    "the root is gathered still": (
        f"model = make(4, 4, 4); fully_shard(model[0]); fully_shard(model); {_FIRST}y = model(x)"
    ),
    "one part frozen": "model = make(4, 8, 4); fully_shard(model); optimizer = torch.optim.SGD(model[1].parameters())",
}


@pytest.mark.parametrize("case", _RIGHT)
def test_what_looks_like_it_and_is_right(ranks, case):
    assert mistakes(ranks, _RIGHT[case]) == ()


@pytest.mark.long
def test_no_false_alarm_over_shapes_and_ways_to_shard(ranks):
    """Programs from combinations of common calls. All are correct, so nothing may be reported."""
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
    assert ranks.check().mistakes  # a cell without scaling changes nothing
    assert mistakes(ranks, f"{start}train(clip_first=False)") == ()
    assert mistakes(ranks, f"{start}train(clip_first=True, scale=1.0)") == ()


def test_a_model_beside_the_scaled_one_is_clipped_rightly(ranks):
    code = f"""model = make(4, 4); {_FIRST}other = make(4, 4); other(x).sum().backward()
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
scaler.scale(model(x).sum()).backward()
torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
scaler.step(optimizer); scaler.update()"""
    assert mistakes(ranks, code) == ()


# ---- averaging


_AVERAGE = """
import torch.distributed as dist
def average():
    for p in model.parameters():
        dist.all_reduce(p.grad); p.grad /= dist.get_world_size()
def average_flat():
    gradients = [p.grad for p in model.parameters()]
    flat = torch._utils._flatten_dense_tensors(gradients)
    dist.all_reduce(flat); flat /= dist.get_world_size()
    for g, mean in zip(gradients, torch._utils._unflatten_dense_tensors(flat, gradients)): g.copy_(mean)
def step(how, is_late, scaler, factor=1.0):
    "One step; the loss is multiplied by the factor."
    optimizer.zero_grad()
    scaler.scale(factor * model(x).sum()).backward()
    if not is_late: how()
    scaler.unscale_(optimizer)
    if is_late: how()
    count = torch.ones(()); dist.all_reduce(count)  # of something else
    scaler.step(optimizer); scaler.update()
torch.manual_seed(0); model = make(4, 4); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.mark.parametrize("how", ["average", "average_flat"])
def test_averaging_after_unscale(ranks, how):
    ranks.run(f"forget()\n{_AVERAGE}", quiet=True)
    scaler = "scaler = torch.amp.GradScaler('cpu', init_scale=8.0)"
    ranks.run(f"{scaler}\nfor _ in range(3): step({how}, True, scaler)", quiet=True)
    (found,) = ranks.check().mistakes
    assert found == (
        "ranks 0,1: gradients were averaged by all_reduce 3 times after scaler.unscale_(optimizer), which checks for "
        "inf on each rank alone. A rank with inf skips its step, and the others do not; average before unscale_"
    )
    for right in (
        f"{scaler}\nfor _ in range(3): step({how}, False, scaler)",
        f"from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n"
        f"scaler = ShardedGradScaler(device='cpu', init_scale=8.0)\nstep({how}, True, scaler)",
        f"scaler = torch.amp.GradScaler('cpu', enabled=False)\nstep({how}, True, scaler)",
    ):
        ranks.run(right, quiet=True)
        assert ranks.check().mistakes == (), right


def test_averaging_after_unscale_spreads_inf_to_the_weights(ranks):
    """An inf on rank 0: if averaged too late, it reaches the weights of rank 1 only; if averaged before, all ranks
    skip."""
    ranks.run(f"forget()\n{_AVERAGE}" + "start = model[0].weight.detach().clone()", quiet=True)
    step = "scaler = torch.amp.GradScaler('cpu', init_scale=8.0)\nstep(average, {}, scaler, float('inf') ** (1 - rank))"
    ranks.run(step.format(False) + "\nis_start = bool((model[0].weight == start).all())", quiet=True)
    assert list(ranks["is_start"].values()) == [True, True]
    ranks.run(step.format(True) + "\nis_finite = bool(model[0].weight.isfinite().all())", quiet=True)
    assert list(ranks["is_finite"].values()) == [True, False]


# ---- inputs of tensor parallel


_TP = "model = parallelize_module(make(4, 8, 4), init_device_mesh('cpu', (2,)), %s)\n" % _ROWS_AND_COLUMNS  # noqa: UP031


def test_other_inputs_of_a_tensor_parallel_module(ranks):
    (found,) = mistakes(ranks, f"torch.manual_seed(0)\n{_TP}torch.manual_seed(rank)\ny = model(torch.randn(3, 4))")
    assert found.startswith("ranks 0,1: module 0 got different inputs (float32 (3, 4), relative difference ")
    assert found.endswith(
        "), and tensor parallel takes them for the same: give all ranks of a group the same batch and seed, and no "
        "part of a sharded output"
    )
    ranks.run(
        "torch.manual_seed(0); w = [p.full_tensor() for p in model.parameters()]; torch.manual_seed(rank)\n"
        "z = torch.randn(3, 4) @ w[0].T + w[1]; z = z @ w[2].T + w[3]; apart = float((y - z).abs().max())",
        quiet=True,
    )
    # neither rank has the result of a single process, so it is a real mistake
    assert min(ranks["apart"].values()) > 1e-3


@pytest.mark.parametrize(
    "inputs",
    [
        "torch.manual_seed(1); y = model(torch.randn(3, 4))",
        "torch.manual_seed(1); y = model(torch.randn(3, 4) * (1 + rank * 1e-6))",  # different rounding
        "y = model(torch.full((3, 4), float('nan')))",
        "y = model(torch.zeros(3, 4))",
    ],
)
def test_the_same_inputs_of_a_tensor_parallel_module(ranks, inputs):
    assert mistakes(ranks, f"torch.manual_seed(0)\n{_TP}{inputs}") == ()


@pytest.mark.skipif(version("torch").startswith("2.11."), reason="FSDP has meshes of its own before torch 2.12")
def test_each_rank_has_its_data_if_fsdp_and_dtensor_share_a_mesh(ranks):
    code = (
        "from torch.distributed.fsdp import DataParallelMeshDims\n"
        "from torch.distributed.tensor import distribute_module\n"
        "mesh = init_device_mesh('cpu', (2, 1), mesh_dim_names=('dp', 'tp'))\n"
        "model = distribute_module(make(4, 4), mesh)\n"
        "fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard='dp')); torch.manual_seed(rank)\n"
        "model(DTensor.from_local(torch.randn(2, 4), mesh, [Replicate()] * 2, run_check=False)).sum().backward()"
    )
    assert mistakes(ranks, code) == ()


@pytest.mark.skipif(version("torch").startswith("2.11."), reason="its `to_local` makes gradients in another way")
def test_other_layers_behind_a_tensor_parallel_module(ranks):
    code = (
        "model = make(4, 8, 4); {}\n"
        "way = {{'0': ColwiseParallel(output_layouts=Replicate())}}\n"
        "parallelize_module(model, init_device_mesh('cpu', (2,)), way); model(x).sum().backward()"
    )
    (found,) = mistakes(ranks, code.format("torch.manual_seed(rank); model[1].reset_parameters()"))
    assert found.startswith("ranks 0,1: gradients of what to_local gave differ (float32 (2, 8), relative difference ")
    assert found.endswith(
        "), and DTensor takes them for the same: after a tensor-parallel module all ranks of a group need the same "
        "layers, batch and targets"
    )
    assert mistakes(ranks, code.format("")) == ()


def test_other_parameters_that_are_said_to_be_replicated(ranks):
    make = "DTensor.from_local(torch.tensor([{}]), init_device_mesh('cpu', (2,)), [Replicate()])"
    (found,) = mistakes(ranks, "w = " + make.format("7 + rank"))
    assert found == (
        "ranks 0,1: DTensor.from_local got different tensors as Replicate() (int64 (1,), relative difference "
        "0.1), and it takes them for the same: make them the same on all ranks"
    )
    assert mistakes(ranks, "w = " + make.format("7")) == ()
    # `run_check=True` makes the tensors equal.
    checked = make.format("7 + rank").replace("[Replicate()]", "[Replicate()], run_check=True")
    assert mistakes(ranks, f"w = {checked}") == ()


# ---- checkpoints


_SHARDED = "model = make(4, 8); fully_shard(model); import torch.distributed.checkpoint as dcp\n"


def test_one_distributed_checkpoint_in_two_places(ranks, tmp_path):
    for save in (
        "save(model.state_dict(), checkpoint_id=where)",
        "async_save(model.state_dict(), checkpoint_id=where).result()",
        "save(model.state_dict(), storage_writer=dcp.FileSystemWriter(where))",
    ):
        (found,) = mistakes(ranks, f"{_SHARDED}where = f'{tmp_path}/{{rank}}'; dcp.{save}")
        assert found == (
            f"ranks 0,1 saved one checkpoint to different paths: {tmp_path}/0 on rank 0, {tmp_path}/1 on rank 1. None "
            "of these can be loaded, because each has only some of its parts; pass the same path on all ranks"
        )
        assert mistakes(ranks, f"{_SHARDED}where = '{tmp_path}/both'; dcp.{save}") == ()
    with pytest.raises(RankError, match="CheckpointException"):  # the reason for it
        ranks.run(f"dcp.load(model.state_dict(), checkpoint_id='{tmp_path}/0')", quiet=True)


def test_a_checkpoint_that_is_refused_was_saved_nowhere(ranks, tmp_path):
    code = (
        "import torch.distributed.checkpoint as dcp\nfrom torch.distributed.tensor import Partial\n"
        "sums = DTensor.from_local(torch.ones(2), init_device_mesh('cpu', (2,)), [Partial()])\n"
        f"try: dcp.save({{'sums': sums}}, checkpoint_id=f'{tmp_path}/{{rank}}')\n"
        "except dcp.api.CheckpointException as error: refused = str(error)"
    )
    assert mistakes(ranks, code) == ()
    assert "not supported" in ranks["refused"][0]


def test_a_checkpoint_that_some_ranks_do_not_save(ranks, tmp_path):
    (found,) = mistakes(ranks, f"{_SHARDED}if rank == 0: torch.save(model.state_dict(), '{tmp_path}/model.pt')")
    assert found == (
        f"rank 0: torch.save wrote this rank's part of 2 tensors to {tmp_path}/model.pt, and rank 1 saved none. Save "
        "with torch.distributed.checkpoint on all ranks, or save the result of get_model_state_dict with "
        "StateDictOptions(full_state_dict=True)"
    )
    assert mistakes(ranks, f"{_SHARDED}torch.save(model.state_dict(), f'{tmp_path}/model{{rank}}.pt')") == ()
    whole = (
        f"{_SHARDED}from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict\n"
        "state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))\n"
        f"if rank == 0: torch.save(state, '{tmp_path}/whole.pt')"
    )
    assert mistakes(ranks, whole) == ()
    assert (
        mistakes(ranks, f"model = DDP(make(4, 8))\nif rank == 0: torch.save(model.state_dict(), '{tmp_path}/a.pt')")
        == ()
    )


def test_ranks_that_save_over_each_other(ranks, tmp_path):
    (found,) = mistakes(ranks, f"model = DDP(make(4, 8)); torch.save(model.state_dict(), '{tmp_path}/model.pt')")
    assert found == (
        f"ranks 0,1: all of them saved to {tmp_path}/model.pt, one over the other: let one rank save, or put the "
        "rank into the name"
    )
    assert mistakes(ranks, f"torch.save(x, f'{tmp_path}/{{rank}}.pt')") == ()
    ranks.run(f"if rank == 0: torch.save(x, '{tmp_path}/0.pt')", quiet=True)
    ranks.run(f"if rank == 1: torch.save(x, '{tmp_path}/0.pt')", quiet=True)  # later, on purpose
    assert ranks.check().mistakes == ()


def test_the_card_says_that_a_checkpoint_takes_all_ranks(ranks, tmp_path):
    with pytest.raises(CellTimeoutError, match=r"rank 0: waiting in all_gather .*plan of a checkpoint"):
        ranks.run(
            f"forget()\n{_SHARDED}if rank == 0: dcp.save(model.state_dict(), checkpoint_id='{tmp_path}/a')",
            quiet=True,
            timeout_s=3,
        )
    assert ranks.check().mistakes == ()  # it was not saved


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "init_device_mesh('cpu', (3, 2))",
            r"a mesh of 3 \* 2 = 6 ranks != world_size 2: the product of its sizes must be 2",
        ),
        ("init_device_mesh(device_type='cpu', mesh_shape=(3,))", r"a mesh of 3 = 3 ranks != world_size 2"),
        (
            "distribute_tensor(torch.ones(4, 3), init_device_mesh('cpu', (2,)), [Shard(2)])",
            r"Shard\(2\) of a tensor of shape \(4, 3\): it has 2 dimensions, 0 to 1",
        ),
        (
            "distribute_tensor(torch.ones(4, 3), init_device_mesh('cpu', (2,)), [Shard(0), Shard(1)])",
            r"2 placements .* != 1 dimensions of the mesh \(2,\): pass one placement for each dimension",
        ),
        (
            "DTensor.from_local(torch.ones(4, 3), init_device_mesh('cpu', (2,)), [Shard(2)])",
            r"Shard\(2\) of a tensor of shape \(4, 3\): it has 2 dimensions, 0 to 1",
        ),
        (
            "DTensor.from_local(torch.ones(4, 3), init_device_mesh('cpu', (2,)), [Shard(0), Shard(1)])",
            r"2 placements .* != 1 dimensions of the mesh \(2,\): pass one placement for each dimension",
        ),
        (
            "whole = distribute_tensor(torch.ones(4, 3), init_device_mesh('cpu', (2,)), [Shard(0)])\n"
            "whole.redistribute(placements=[Shard(5)])",
            r"Shard\(5\) of a tensor of shape \(4, 3\): it has 2 dimensions, 0 to 1",
        ),
        (
            "whole = distribute_tensor(torch.ones(4, 3), init_device_mesh('cpu', (2,)), [Shard(0)])\n"
            "whole.redistribute(placements=[Shard(0), Shard(1)])",
            r"2 placements .* != 1 dimensions of the mesh \(2,\): pass one placement for each dimension",
        ),
        (
            "fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh('cpu', (1,)))",
            r"rank 1 is not in the mesh of 1 = 1 ranks != world_size 2: the product of its sizes must be 2, or only",
        ),
    ],
)
def test_mismatched_sharding_raises_an_error_with_its_numbers(ranks, code, words):
    imports = "from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh"
    with pytest.raises(RankError, match=words):
        ranks.run(f"{imports}\n{code}", quiet=True)
    ranks.run("import torch.distributed as dist\ny = torch.ones(1); dist.all_reduce(y)", quiet=True)
    assert ranks["y"][1].item() == 2


def test_placements_may_come_from_an_iterator_as_in_plain_torch(ranks):
    ranks.run(
        "from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh\n"
        "parts = distribute_tensor(torch.ones(4), init_device_mesh('cpu', (2,)), [Shard(0)])\n"
        "whole = parts.redistribute(placements=(Replicate() for _ in range(1))).to_local()",
        quiet=True,
    )
    assert ranks["whole"][1].tolist() == [1.0] * 4


def test_what_refuses_to_be_looked_at_is_saved_all_the_same(ranks, tmp_path):
    ranks.run(
        "class Lazy(dict):\n    def values(self): raise KeyError('not loaded')\n"
        f"torch.save(Lazy(x=1), f'{tmp_path}/{{rank}}.pt')\n"
        f"again = torch.load(f'{tmp_path}/{{rank}}.pt', weights_only=False)['x']",
        quiet=True,
    )
    assert ranks["again"][1] == 1


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("make(4, 4).unshard()", "this Sequential is not sharded: 2 ranks * 80 B = 160 B; call fully_shard"),
        ("DDP(make(4, 4)).set_requires_gradient_sync(False)", "this DistributedDataParallel is not sharded: 2 ranks"),
        (
            "fully_shard(make(4, 4, 4))[0].reshard()",
            "fully_shard was not called on this Linear, although its parameters are DTensors: call reshard on a model "
            "that was passed to fully_shard, or call fully_shard on this Linear first",
        ),
        ("make(4, 4)[0].weight.full_tensor()", "this tensor of shape (4, 4) is a plain tensor, not a DTensor"),
    ],
)
def test_a_value_that_is_not_sharded_is_named_in_the_error(ranks, code, words):
    with pytest.raises(RankError) as raised:
        ranks.run(code, quiet=True)
    assert words in str(raised.value)
    ranks.run("y = torch.ones(1); dist.all_reduce(y)", quiet=True)
    assert ranks["y"][1].item() == 2


def test_another_attribute_that_is_missing_has_no_such_note(ranks):
    calls = ("make(4, 4).unsharded()", "fully_shard(make(4, 4)).gather()", "x.whole_tensor()", "make.unshard()")
    for code in calls:
        with pytest.raises(RankError, match="has no attribute") as raised:
            ranks.run(code, quiet=True)
        assert "sharded:" not in str(raised.value)
