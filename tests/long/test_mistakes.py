"""No false alarms: `%ddp_check` reports nothing about correct programs of torch's parallel libraries.

The models are those of torch's tests of FSDP and tensor parallel, and generated ones. torch's DDP tests use their own
models (`tests/libraries/torchs_own`). The lessons are included, except for their intentional errors.
"""

from __future__ import annotations

import ast
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.libraries import torchs_own
from tests.libraries.bare_ranks import LIMIT_S
from tests.long.conftest import Tally

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

_START = """
import os, torch.nn as nn, torch.nn.functional as F
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
                                               loss_parallel, parallelize_module)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.common_fsdp import DoubleLinear, MLP, MLPStack
from torch.testing._internal.distributed._tensor.common_dtensor import MLPModule, MLPStacked, ModelArgs, Transformer
def train(model, batches, scaler=None, clips=False, average=()):
    "Steps on batches that were made before; the mean of gradients is computed by hand of those parameters."
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch)
        loss = (loss.full_tensor() if isinstance(loss, DTensor) else loss).float().square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        for p in average: dist.all_reduce(p.grad); p.grad /= world_size
        if scaler is not None: scaler.unscale_(optimizer)
        kinds = {getattr(p, "device_mesh", None) for p in model.parameters()} if clips else ()  # torch mixes no two
        for kind in kinds:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if getattr(p, "device_mesh", None) == kind], 1.0)
        if scaler is None: optimizer.step()
        else: scaler.step(optimizer); scaler.update()
    return optimizer
"""


def _of_torch() -> Iterator[str]:
    """Yield programs of torch's tests of FSDP2 and tensor parallel, on a mesh of two by two and of four."""
    tp = "{'net1': ColwiseParallel(), 'net2': RowwiseParallel()}"
    stacked = "{f'layers.{i}.net1': ColwiseParallel() for i in range(2)}"
    stacked += " | {f'layers.{i}.net2': RowwiseParallel() for i in range(2)}"
    yield f"model = parallelize_module(MLPModule('cpu'), init_device_mesh('cpu', (4,)), {tp}); x = torch.rand(20, 10)"
    yield (
        f"model = parallelize_module(MLPStacked('cpu'), init_device_mesh('cpu', (4,)), {stacked})\n"
        "x = torch.rand(8, 10)"
    )
    yield (
        "plan = {'net1': ColwiseParallel(input_layouts=Shard(0)), 'net2': RowwiseParallel(output_layouts=Shard(0))}\n"
        "model = parallelize_module(MLPModule('cpu'), init_device_mesh('cpu', (4,)), plan)\n"
        "torch.manual_seed(rank); x = torch.rand(5, 10)"  # sequence parallel: each rank has a different part
    )
    for sequence in (False, True):  # with local outputs, because DTensor cannot shard attention on CPUs
        yield (
            "args = ModelArgs(dropout_p=0.0, n_heads=4, dim=16); model = Transformer(args)\n"
            f"model = Transformer.parallelize(model, init_device_mesh('cpu', (4,)), {sequence}, True)\n"
            "x = torch.randint(0, args.vocab_size, (2, 8))"
        )
    for sequence, recomputes in itertools.product((False, True), (False, True)):
        yield (
            "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\n"
            f"model = MLPStack(8, with_seq_parallel={sequence})\n"
            f"model = model.parallelize(mesh['tp'], mesh['dp'], {recomputes}, reshard_after_forward=False)\n"
            "torch.manual_seed(42 + mesh['dp'].get_local_rank()); x = torch.randn(4, 8, 8)"
        )
    for mesh, reshard in itertools.product(("(4,)", "(2, 2)"), (True, False, 2)):
        if mesh == "(2, 2)" and reshard == 2:
            continue
        names = "('r', 's')" if mesh == "(2, 2)" else "('s',)"
        yield (
            f"mesh = init_device_mesh('cpu', {mesh}, mesh_dim_names={names})\n"
            "model = nn.Sequential(MLP(8), MLP(8), DoubleLinear(8, False))\n"
            f"for part in model: fully_shard(part, mesh=mesh, reshard_after_forward={reshard})\n"
            "fully_shard(model, mesh=mesh); torch.manual_seed(rank); x = torch.randn(4, 8)"
        )


def _generated(count: int) -> Iterator[str]:
    """Yield random programs: shapes and meshes, models of several layers, parallelisations, and matching inputs."""
    draw = random.Random(0)
    for _ in range(count):
        width, hidden, layers = draw.choice((4, 8, 12)), draw.choice((4, 8, 20)), draw.randint(1, 3)
        make = f"[MLP({width}, dim_multiplier={max(1, hidden // width)}) for _ in range({layers})]"
        plan = f"{{f'{{i}}.in_proj': ColwiseParallel() for i in range({layers})}}"
        plan += f" | {{f'{{i}}.out_proj': RowwiseParallel() for i in range({layers})}}"
        batch = f"torch.randn({draw.randint(1, 5)}, {width})"
        way = draw.choice(("ddp", "fsdp", "hsdp", "tp", "fsdp and tp", "tp and ddp by hand"))
        lines = ["torch.manual_seed(0)", f"model = nn.Sequential(*{make})"]
        if way == "ddp":
            lines += ["model = DDP(model)", "torch.manual_seed(rank)"]
        elif way in ("fsdp", "hsdp"):
            shape = "(4,)" if way == "fsdp" else "(2, 2)"
            names = "('s',)" if way == "fsdp" else "('r', 's')"
            policy = ", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)" if draw.random() < 0.3 else ""
            lines += [
                f"mesh = init_device_mesh('cpu', {shape}, mesh_dim_names={names})",
                f"for part in model: fully_shard(part, mesh=mesh{policy})",
                f"fully_shard(model, mesh=mesh{policy}); torch.manual_seed(rank)",
            ]
        elif way == "tp":
            lines += [f"parallelize_module(model, init_device_mesh('cpu', (4,)), {plan})", "torch.manual_seed(1)"]
        else:
            lines += [
                "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))",
                f"parallelize_module(model, mesh['tp'], {plan})",
                "torch.manual_seed(mesh['dp'].get_local_rank())",
            ]
            if way == "fsdp and tp":
                lines += [
                    "for part in model: fully_shard(part, mesh=mesh['dp'])",
                    "fully_shard(model, mesh=mesh['dp'])",
                ]
        scaler = draw.choice((None, "torch.amp.GradScaler('cpu', init_scale=1024.0)")) if way == "ddp" else None
        save = draw.choice(
            (
                "dcp.save(get_model_state_dict(model), checkpoint_id=f'{folder}/{number}')",
                "torch.save(get_model_state_dict(model), f'{folder}/{number}.{rank}.pt')",
                "whole = StateDictOptions(full_state_dict=True, cpu_offload=True)\n"
                "state = get_model_state_dict(model, options=whole)\n"
                "if rank == 0: torch.save(state, f'{folder}/{number}.pt')",
            )
        )
        average = "list(model.parameters())" if scaler and draw.random() < 0.5 else "()"
        lines += [
            f"optimizer = train(model, [{batch} for _ in range(2)], {scaler}, {draw.random() < 0.5}, {average})",
            save,
        ]
        yield "\n".join(lines)


def _mistakes(session: Any, code: str) -> tuple[str, ...]:
    session.run(code, quiet=True, timeout_s=60)
    return session.check().mistakes


@pytest.fixture
def ranks(make_session_alone, tmp_path) -> Any:
    pytest.importorskip("expecttest", reason="torch's tests need expecttest; `make test-long` installs it")
    session = make_session_alone(4)
    session.run(f"{_START}\nfolder, number = {str(tmp_path)!r}, 0", quiet=True)
    return session


def test_models_of_torchs_tests_cause_no_false_alarm(ranks, tally: Tally):
    programs = [
        f"torch.manual_seed(0)\n{code}\noptimizer = train(model, [x, x], None, {clips})"
        for code in _of_torch()
        for clips in (False, True)
    ]
    for n in tally(len(programs), "models of torch's tests of FSDP2 and tensor parallel trained without a false alarm"):
        assert _mistakes(ranks, programs[n]) == (), programs[n]


def test_no_false_alarm_in_generated_programs(ranks, tally: Tally):
    programs = list(_generated(70))
    for n in tally(len(programs), "programs generated over shapes and meshes without a false alarm"):
        assert _mistakes(ranks, f"number = {n}\n{programs[n]}") == (), programs[n]


def test_no_false_alarm_in_torchs_tests_of_ddp(make_session_alone, tally: Tally, tmp_path):
    pytest.importorskip("expecttest", reason="expecttest is missing; `make test-long` installs it")
    session = make_session_alone(2)
    session.run(
        f"import os, sys\nos.environ.update({torchs_own.environment(2)!r})\nsys.path.append({str(Path.cwd())!r})\n"
        "from tests.libraries import torchs_own\nnames = torchs_own.names()",
        quiet=True,
    )
    names = [name for name in session["names"][0] if "DistributedDataParallel" in name or "ddp" in name]
    told = {}  # tests that pass
    for name in names:
        code = f"ended = torchs_own.run({name!r}, rank, {str(tmp_path / name)!r})"
        session.run(code, quiet=True, timeout_s=LIMIT_S)
        if list(session["ended"].values()) == [torchs_own.PASSED] * 2:
            told[name] = session.check().mistakes
    for n in tally(len(told), "tests of torch for DDP that pass on two CPUs, without a false alarm"):
        assert list(told.values())[n] == (), told


_ASK = """
try:
    _told += ddp_notebook.current().check().mistakes
except (AttributeError, DDPNotebookError):
    pass  # no ranks, or one of two has died: the lesson goes on with that
"""
LESSONS = sorted((Path(__file__).parents[2] / "notebooks").glob("1[2-8]_*.ipynb"))


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_no_false_alarm_in_the_lessons(path, tmp_path):
    """Run the check after each cell of a lesson on sharding. Intentional errors are either reported or undetectable."""
    from tests.lessons.test_notebooks import check_shown, execute

    notebook = nbformat.read(path, as_version=4)
    cells = [nbformat.v4.new_code_cell("from ddp_notebook.errors import DDPNotebookError\n_told = []")]
    for cell in notebook.cells:
        cells.append(cell)
        if cell.cell_type == "code" and cell.source.startswith("%%on_all_ranks"):
            cells.append(nbformat.v4.new_code_cell(_ASK))
    stop = max(i for i, cell in enumerate(cells) if cell.source.startswith("%ddp_stop"))
    cells.insert(stop, nbformat.v4.new_code_cell("print('TOLD', _told)"))
    notebook.cells = cells
    asking = tmp_path / path.name
    nbformat.write(notebook, asking)
    shown = execute(asking, 2)
    check_shown(shown)
    (text,) = [o.text for c in shown for o in c.get("outputs", []) if o.get("text", "").startswith("TOLD")]
    told = ast.literal_eval(text.removeprefix("TOLD "))
    print(path.stem, told)
    wrong_use = {"13": "optimizer holds 16 parameters that no model uses", "15": "got different inputs"}
    wrong_use |= {"16": "averaged by all_reduce", "17": "torch.save wrote this rank's part"}
    on_purpose = wrong_use.get(path.name[:2])
    assert [one for one in told if on_purpose is None or on_purpose not in one] == []
    assert bool(told) == (on_purpose is not None), "what it does wrong is told"
