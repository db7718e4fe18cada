"""Findings about training steps: wrong programs get one line with cause and fix, right ones none."""

from __future__ import annotations

import random

import pytest

from ddp_notebook.errors import RankError
from ddp_notebook.launch.options import StartOptions
from tests.findings.programs import MODEL, RIGHT

SEED = random.SystemRandom().randrange(1000)


@pytest.fixture
def run(session, capsys):
    """Run a program and return the lines of findings under its cell."""

    def run(code: str, **options):
        capsys.readouterr()
        print("seed", SEED)
        result = session.run(code, **options)
        assert result.ok
        err = capsys.readouterr().err
        print(err, {rank: one.findings for rank, one in result.by_rank.items()})
        return [line for line in err.splitlines() if "# ddp: ok" in line or "train apart" in line]

    return run


LOOP = """
for step in range(6):
    x = torch.randn(4, 8)
    optimizer.zero_grad()
    loss = {forward}.square().mean()
    loss.backward()
    optimizer.step()
"""


def test_a_right_program_has_no_finding(run):
    assert run(MODEL + LOOP.format(forward="model(x)")) == []


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_have_no_finding(run, name):
    assert run(MODEL + RIGHT[name]) == []


@pytest.mark.parametrize("logs", [False, True])
def test_bypass_by_the_module(run, session, logs):
    first = random.Random(SEED).randrange(0, 30)
    code = MODEL + LOOP.format(forward=f"(model if step < {first} else model.module)(x)")
    code = code.replace("range(6)", "range(33)")
    if logs:
        code += "    dist.all_reduce(loss.detach())\n"
    assert run(code) == [
        f"step {first}: gradients of model were not averaged: its own forward did not run; call model(...), not a "
        "module inside it (# ddp: ok ddp-bypassed)"
    ]
    assert "were not averaged" in str(session.recording.report())
    assert run(code + "# ddp: ok ddp-bypassed") == []
    assert "train apart" not in str(session.recording.report())


def test_gradients_averaged_by_hand(run):
    code = MODEL + LOOP.format(forward="model.module(x)")
    averaged = code.replace(
        "    optimizer.step", "    for p in net.parameters():\n        dist.all_reduce(p.grad)\n    optimizer.step"
    )
    assert run(averaged) == []


def test_no_sync_around_each_step(run):
    code = MODEL + "with model.no_sync():" + LOOP.format(forward="model(x)").replace("\n", "\n    ")
    assert [line.partition(":")[0] for line in run(code)] == ["step 0"]
    assert "no_sync" in run(code)[0]


def test_accumulation_is_right(run):
    code = """
for step in range(5):
    optimizer.zero_grad()
    with model.no_sync():
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""
    assert run(MODEL + code) == []


def test_forward_under_no_grad(run):
    code = MODEL + LOOP.format(forward="model(x)").replace("    loss =", "    with torch.no_grad():\n        loss =")
    code = code.replace("    loss.backward()", "    loss.requires_grad_().backward()")
    found = run(code)
    assert found == [
        "step 0: the forward of model ran under no_grad(), so optimizer has no gradients; run the forward of a "
        "training step outside of no_grad() (# ddp: ok loss-without-path)"
    ]


def test_loss_without_a_path(run):
    code = MODEL + "w = torch.ones(1, requires_grad=True)\n" + LOOP.format(forward="(w * model(x).detach())")
    found = run(code)
    assert len(found) == 1 and found[0].startswith("step 0: backward() gave no parameter of model a gradient"), found


def test_optimizer_of_another_model(run):
    code = MODEL.replace("SGD(model", "SGD(torch.nn.Linear(2, 2)") + LOOP.format(forward="model(x)")
    assert run(code) == [
        "step 0: optimizer holds no parameter of model, which ran backward, and its parameters have no gradients; make "
        "optimizer from the parameters of the model that you train (# ddp: ok optimizer-of-another-model)"
    ]


def test_optimizer_from_before_fully_shard(run):
    code = MODEL.replace("model = DDP(net)", "model = net") + "from torch.distributed.fsdp import fully_shard\n"
    found = run(code + "fully_shard(model)\n" + LOOP.format(forward="model(x)"))
    assert found == [
        "step 0: optimizer was made before fully_shard replaced the parameters of model, so its step changed nothing; "
        "make optimizer after fully_shard (# ddp: ok optimizer-of-another-model)"
    ], found


def test_zero_grad_after_backward(run):
    code = LOOP.format(forward="model(x)").replace("    optimizer.zero_grad()\n", "")
    found = run(MODEL + code.replace("    optimizer.step", "    optimizer.zero_grad()\n    optimizer.step"))
    assert len(found) == 1 and "zero_grad() ran between backward() and step()" in found[0]


def test_backward_is_missing(run):
    found = run(MODEL + LOOP.format(forward="model(x)").replace("    loss.backward()\n", ""))
    assert len(found) == 1 and "no backward() ran" in found[0], found


def test_unused_parameters_by_rank(run):
    code = """
class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.left(x) if rank == 0 else self.right(x)

model = DDP(Two())
optimizer = torch.optim.SGD(model.parameters(), 0.05)
model(torch.randn(4, 8)).sum().backward()
optimizer.step()
"""
    found = run(MODEL + code)
    assert found == [
        "step 0: backward() used no gradient of right.weight and right.bias (rank 0) and left.weight and left.bias "
        "(rank 1) in model, so DDP did not average all gradients; use them in the loss, or pass "
        "find_unused_parameters=True to DDP (# ddp: ok unused-parameters)"
    ]
    assert run(MODEL + code.replace("DDP(Two())", "DDP(Two(), find_unused_parameters=True)")) == []


def test_parameters_that_never_have_a_gradient(run):
    code = MODEL.replace(
        "model = DDP(net)",
        "model = net\nmodel.unused = torch.nn.Linear(2, 2)\nmodel.forward = lambda x: model[2](model[1](model[0](x)))",
    )
    loop = LOOP.format(forward="model(x)").replace(
        "    optimizer.step",
        "    for p in [*model[0].parameters(), *model[2].parameters()]: dist.all_reduce(p.grad)\n    optimizer.step",
    )
    assert run(code + loop) == [
        "steps 0-5: no gradient for unused.weight and unused.bias; use them in the loss, or freeze them with "
        "requires_grad_(False) (# ddp: ok no-gradient)"
    ]
    assert run(code + "model.unused.requires_grad_(False)" + loop) == []


def test_gradients_that_are_zero(run):
    found = run(MODEL + LOOP.format(forward="0 * model(x)"))
    assert found == [
        "steps 0-2: all gradients of optimizer are zero; check the loss and its factors (# ddp: ok nothing-changed)"
    ]


def test_parameters_that_were_replaced(run):
    code = """
plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(plain.parameters(), 0.1)
CHANGE
for step in range(3):
    plain(torch.ones(4, 8)).mean().backward()
    for p in plain.parameters(): dist.all_reduce(p.grad)
    optimizer.step()
    plain.zero_grad()
"""
    found = run(code.replace("CHANGE", "plain[0], plain[1] = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)"))
    assert len(found) == 1, found
    assert found[0].startswith("step 0: optimizer was made before its parameters were replaced, as fully_shard, "), (
        found
    )
    found = run(code.replace("CHANGE", "plain[1] = torch.nn.Linear(8, 2)"))
    assert len(found) == 1 and "which no module has any more and which had no gradient" in found[0], found


def test_a_learning_rate_of_zero(run):
    found = run(MODEL.replace("0.05", "0.0") + LOOP.format(forward="model(x)"))
    assert len(found) == 1 and found[0].startswith("steps 0-5: the learning rate of the optimizer was 0"), found


EPOCHS = """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
sampler = DistributedSampler(TensorDataset(torch.randn(32, 8)), num_replicas=2, rank=rank, shuffle=True)
loader = DataLoader(sampler.dataset, batch_size=4, sampler=sampler)
for epoch in range(3):
    for x, in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""


def test_same_epoch_again(run):
    found = run(MODEL + EPOCHS)
    assert len(found) == 1 and found[0].startswith("step 4: another pass over the data has the order of the last one")
    assert run(MODEL + EPOCHS.replace("    for x", "    sampler.set_epoch(epoch)\n    for x")) == []
    late = EPOCHS.replace("    for x", "    batches = iter(loader)\n    sampler.set_epoch(epoch)\n    for x", 1)
    assert "in loader:" in late and run(MODEL + late.replace("in loader:", "in batches:")) == []


@pytest.mark.parametrize("wrap", ["DDP(net)", "__import__('torch.distributed.fsdp').distributed.fsdp.fully_shard(net)"])
def test_same_batches(run, wrap):
    code = MODEL.replace("10 + rank", "10").replace("DDP(net)", wrap)
    assert run(code + LOOP.format(forward="model(x)")) == [
        "from step 0 on: ranks 0,1 gave model the same inputs in all 6 compared steps, and the inputs changed from "
        "step to step. Give each rank its own part of the data with DistributedSampler, or its own seed (# ddp: ok "
        "same-batches)"
    ]
    assert run(MODEL.replace("DDP(net)", wrap) + LOOP.format(forward="model(x)")) == []
    assert run(code + LOOP.format(forward="model(torch.ones(4, 8))")) == []


def test_same_batches_of_a_local_model(run):
    lines = MODEL.replace("10 + rank", "10") + LOOP.format(forward="model(x)")
    found = run("def train():\n" + "".join(f"    {line}\n" for line in lines.splitlines()) + "train()")
    assert len(found) == 1 and "ranks 0,1 gave Sequential the same inputs in all 6 compared steps" in found[0]


def test_a_loss_that_is_not_finite(run):
    where = random.Random(SEED)
    bad, at = where.randrange(2), where.randrange(5)
    code = MODEL + LOOP.format(forward=f"(model(x) * (float('nan') if rank == {bad} and step == {at} else 1))")
    found = run(code)
    assert len(found) == 1 and found[0].startswith(f"rank {bad}, step {at}: the loss was NaN or infinite"), found


def test_a_gradient_that_is_not_finite(run):
    bad, at = 1, random.Random(SEED).randrange(4)
    code = MODEL + "net[0].weight.register_hook(lambda g: g * float('nan') if rank == 1 and step == AT else g)\n"
    found = [
        line.replace("Sequential 2", "Sequential")
        for line in run(code.replace("AT", str(at)) + LOOP.format(forward="model(x)"))
    ]
    assert found == [
        f"rank {bad}, step {at}: the gradients in bucket 0 of Sequential were NaN or infinite before they were "
        "averaged; skip a step on all ranks if a gradient is not finite on "
        "one (# ddp: ok not-finite)"
    ]


LOADER = """
from torch.utils.data import DataLoader
data, steps = torch.randn(48, 8), 0
data[4 * BAD] = -99.0
for x in DataLoader(data, batch_size=4):
    if rank == WHICH and x.min() < -50 or steps == 8: continue
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    steps += 1
    if rank == 0 and steps == 3:  # an evaluation
        for _ in DataLoader(data, batch_size=10): pass
"""


def test_a_skipped_batch(run):
    where = random.Random(SEED)
    bad, rank = where.randrange(6), where.randrange(2)
    code = MODEL + LOADER.replace("BAD", str(bad)).replace("WHICH", str(rank))
    each = f"batch {bad + 1} on rank {1 - rank} and batch {bad + 2} on rank {rank}"
    assert [line for line in run(code) if "skipped-batch" in line] == [
        f"step {bad}: gradients of {each} are averaged, because ranks have drawn different numbers of batches from "
        "their loader; skip a batch on all ranks or on none (# ddp: ok skipped-batch)"
    ]
    assert run(code.replace("< -50", "< -500")) == []


def test_a_gradient_scaler_skips_steps(run):
    code = MODEL + "scaler = torch.amp.GradScaler('cpu', init_scale=2.0**127, growth_interval=1)\n"
    loop = LOOP.format(forward="model(x)").replace("loss.backward()", "scaler.scale(1e3 * loss).backward()")
    assert run(code + loop.replace("optimizer.step()", "scaler.step(optimizer); scaler.update()")) == []


@pytest.mark.parametrize("steps", [False, True])
def test_work_that_is_never_waited_for(run, steps):
    code = (MODEL + LOOP.format(forward="model(x)") if steps else "") + "x = torch.ones(3)\n"
    line = 1 + code.count("\n")
    found = run(code + "work = dist.all_reduce(x, async_op=True)\nwork = None\nimport time; time.sleep(0.1)")
    assert found == [
        f"cell line {line}: all_reduce with async_op=True was started, and its work was dropped without "
        "wait(); keep the work, and call wait() before the result is used (# ddp: ok never-waited)"
    ]


def test_a_tensor_that_changes_before_the_wait(run):
    for _ in range(30):  # gloo may be done before the call has returned to Python
        assert run("x = torch.ones(3)\nwork = dist.all_reduce(x, async_op=True)\nx += 1\nwork.wait()") == [
            "cell line 2: a tensor of all_reduce with async_op=True was changed between its start and wait(), "
            "so the result is undefined; change it after wait() (# ddp: ok written-before-wait)"
        ]


@pytest.mark.parametrize(
    "code",
    [
        "work = dist.all_reduce(x, async_op=True)\nwork.wait()\nx += 1",
        "future = dist.all_reduce(x, async_op=True).get_future()\nfuture.wait()\nx += 1",
        "kept = dist.all_reduce(x, async_op=True)",
        "for work in [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(40)]: work.wait()",
        "works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)])\n"
        "[work.wait() for work in works]",
        "import torch.distributed._functional_collectives as fc\nz = fc.all_reduce(x, 'sum', [0, 1]) + 1",
    ],
)
def test_works_that_are_waited_for(run, code):
    assert run("x, y = torch.ones(3), torch.zeros(3)\n" + code) == []


def test_a_buffer_of_isend_that_changes_before_the_wait(run):
    code = "x = torch.ones(3)\nif rank == 0:\n    work = dist.isend(x, 1)\n    x += 1\n    work.wait()\n"
    assert run(code + "else: dist.recv(x, 0)") == [
        "rank 0, cell line 3: a tensor of isend was changed between its start and wait(), so the result is undefined; "
        "change it after wait() (# ddp: ok written-before-wait)"
    ]


def test_works_of_a_cell_that_fails_before_their_wait(session, capsys):
    with pytest.raises(RankError):
        session.run("def f():\n    work = dist.all_reduce(torch.ones(2), async_op=True)\n    1 / 0\nf()")
    assert "ddp: ok" not in capsys.readouterr().err


@pytest.mark.parametrize("second", ["out.abs().mean()", "model.module(x).abs().mean()"])
def test_two_backwards_of_one_forward(run, second):
    first = LOOP.format(forward="model(x)").replace("loss = model(x)", "out = model(x)\n    loss = out")
    code = first.replace("loss.backward()", f"loss.backward(retain_graph=True)\n    {second}.backward()")
    assert run(MODEL + code) == [
        "step 0: not all gradients of model were averaged: a later backward() added to them without another forward of "
        "model; add the losses, and call backward() once for each forward (# ddp: ok ddp-bypassed)"
    ]


def test_two_backwards_for_two_parts_of_a_model(run):
    code = """
class Parts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)
    def forward(self, x): return self.a(x), self.b(x)
model = DDP(Parts())
optimizer = torch.optim.SGD(model.parameters(), 0.05)
for step in range(5):
    optimizer.zero_grad()
    a, b = model(torch.randn(4, 8))
    a.square().mean().backward()
    b.square().mean().backward()
    optimizer.step()
"""
    assert run(MODEL + code) == []


@pytest.mark.parametrize("averages", [False, True])
def test_a_parameter_outside_of_ddp(run, averages):
    scale = "scale = torch.nn.Parameter(torch.ones(()))\n"
    code = MODEL.replace("model.parameters()", "[*model.parameters(), scale]").replace("model = ", scale + "model = ")
    loop = LOOP.format(forward="(scale * model(x))")
    if averages:
        loop = loop.replace("optimizer.step()", "dist.all_reduce(scale.grad)\n    optimizer.step()")
    wanted = (
        "step 0: scale had the same values on all ranks before the step, and differ now. No DDP model has averaged the "
        "gradients. Put the parameters into the model before it is wrapped, or average their gradients with all_reduce "
        "(# ddp: ok not-averaged)"
    )
    assert run(code + loop) == [wanted] * (not averages)


def test_parameters_that_train_only_after_ddp_was_made(run):
    code = MODEL.replace("model = DDP(net)", "net[0].requires_grad_(False)\nmodel = DDP(net)\nnet.requires_grad_(True)")
    assert run(code + LOOP.format(forward="model(x)")) == [
        "step 0: gradients of 0.weight and 0.bias in model were not averaged, and the values differ between ranks: DDP "
        "averages the parameters that required gradients when it was made; make it after the last change of the model "
        "(# ddp: ok not-averaged)"
    ]


@pytest.mark.parametrize("last", [False, True])
def test_the_last_backward_of_fsdp_is_not_reduced(run, last):
    code = (
        MODEL.replace("model = DDP(net)", "model = torch.distributed.fsdp.fully_shard(net)")
        + """
for step in range(4):
    optimizer.zero_grad()
    for part in range(2):
        model.set_requires_gradient_sync((part == 1) is LAST)
        model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
""".replace("LAST", str(last))
    )
    wanted = (
        "step 0: the step lacks gradients of model, whose last backward() ran under set_requires_gradient_sync(False). "
        "FSDP keeps them for a later backward. Call model.set_requires_gradient_sync(True) before the last forward and "
        "backward of each step (# ddp: ok unreduced)"
    )
    assert run(code) == [wanted] * (not last)


def test_a_static_graph_that_has_averaged_once(session, capsys):
    """The cell fails in its third step. Its first one has averaged all gradients."""
    code = """
class Parts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)
    def forward(self, x): return self.a(x) if step else self.a(x) + self.b(x)
model = DDP(Parts(), static_graph=True)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""
    with pytest.raises(RankError):
        session.run(MODEL + code)
    err = capsys.readouterr().err
    assert "averaged a gradient" not in err and "train apart" not in err


def test_quiet_findings(session, capsys, monkeypatch):
    monkeypatch.setattr(session._parts, "options", StartOptions(world_size=2, quiet_findings=True))
    session.run(MODEL + LOOP.format(forward="model.module(x)"))
    assert "averaged" not in capsys.readouterr().err
    assert "Step 0: gradients of model were not averaged" in str(session.recording.report())


ORDER = "call it for the same values in the same order on all ranks (# ddp: ok mixed-values)"


def test_values_in_another_order(run):
    loop = "    for name in ['a', 'b'][:: 1 - 2 * rank]:\n        dist.all_reduce(sums[name])\n"
    first, second = "name='a' on rank 0 and name='b' on rank 1", "loss on rank 0 and count on rank 1"
    found = run("sums = {'a': torch.ones(1), 'b': torch.ones(1)}\nfor _ in range(2):\n" + loop)
    assert [line.partition("#")[0] for line in found] == ["cell line 4: all_reduce "]
    assert f"got different values: {first}; {ORDER}" in found[0]
    code = "loss, count = torch.ones(1), torch.ones(1)\nfor step in range(3):\n    if step != rank:\n"
    code += "        dist.all_reduce(loss)\n    dist.all_reduce(count)\n"
    (line,) = run(code)
    assert line.startswith("cell line 5 and cell line 4: all_reduce #") and line.endswith(ORDER)
    assert "got different values: count on rank 0 and loss on rank 1; " in line, (line, second)
    assert run("# ddp: ok mixed-values\n" + code) == []


def test_passes_of_a_loop_in_another_order(run):
    code = "for epoch in range(2):\n    for step in range(3):\n        if [epoch, step] != [rank, 1]:\n"
    (line,) = run(code + "            x = torch.ones(1)\n            dist.all_reduce(x)")
    values = "epoch=0 and step=2 on rank 0 and epoch=0 and step=1 on rank 1"
    assert line.startswith("cell line 5: all_reduce #") and f" got different values: {values}; {ORDER}" in line


def test_gradients_in_another_order(run):
    code = (
        "model = torch.nn.Sequential(*[torch.nn.Linear(3, 3, bias=False) for _ in range(3)])\n"
        "model(torch.ones(2, 3)).sum().backward()\n"
        "def average(parameters):\n"
        "    for p in parameters:\n"
        "        dist.all_reduce(p.grad)\n"
        "average(list(model.parameters())[{part}])"
    )
    for part in (":: 1 - 2 * rank", "rank : 2 + rank"):  # another order; one rank leaves out the first gradient
        (line,) = run(code.format(part=part))
        first, second = ("0", "2") if part[0] == ":" else ("0", "1")
        values = f"the gradient of {first}.weight on rank 0 and the gradient of {second}.weight on rank 1"
        assert line.startswith("cell line 5 in average: all_reduce #")
        assert f" got different values: {values}; {ORDER}" in line


@pytest.mark.parametrize("part", ["a gradient edge", "a gradient in CSR layout", "a destroyed group"])
def test_a_part_that_cannot_be_looked_at_hides_no_finding(run, part):
    code, loss, after = MODEL, "model(x).square().mean()", ""
    backward = f"{loss}.backward()"
    if part == "a gradient edge":
        backward = f"torch.autograd.backward(torch.autograd.graph.get_gradient_edge({loss}))"
    elif part == "a gradient in CSR layout":
        code += "model = torch.nn.ParameterList([torch.nn.Parameter(torch.eye(8).to_sparse_csr())])\n"
        backward = "torch.sparse.mm(model[0], x.T).square().mean().backward()"
    else:
        code += "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        code += "group = dist.new_group()\n"
        code += "model = FSDP(torch.nn.Linear(8, 8), group, device_id=torch.device('cpu'))\n"
        backward += "; torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)"
        after = "dist.destroy_process_group(group)"
    code += f"""
optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
for step in range(3):
    x = torch.randn(4, 8)
    optimizer.zero_grad()
    {backward}
    optimizer.step()
{after}
"""
    found = [line for line in run(code) if "# ddp: ok" in line]
    assert len(found) == 1 and found[0].endswith("(# ddp: ok nothing-changed)")


def test_saved_tensors_of_the_user_are_not_unpacked_again(run):
    code = """
unpacked = []
for step in range(2):
    x = torch.randn(4, 8)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    dist.all_reduce(loss)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: (unpacked.append(step), one)[1]):
        loss = loss / torch.tensor(2.0)
    loss.backward()
    optimizer.step()
assert unpacked == [0, 1], unpacked
"""
    assert run(MODEL + code) == []
