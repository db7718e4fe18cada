"""A training step of all ranks, compared with one process."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_notebook.errors import UsageError
from ddp_notebook.run.verify.last_step import find_step
from tests.verify_programs import COUNTED, MODELS, REFUSED, SETUP, STATE, steps_of

CE = "F.cross_entropy(model(x), y)"


def verified(session, code: str, loss: str = CE, **options):
    session.run(SETUP + code, quiet=True)
    return session.verify(loss, ["x", "y"], **options)


def causes(session, code: str, loss: str = CE, **options) -> list[str]:
    return [one.cause for one in verified(session, code, loss, **options).findings]


def test_right_steps_have_no_finding(session):
    found = verified(session, "model = DDP(net(norm=True))")
    assert found.is_right and found.samples == 16 and found.whole_loss is not None
    assert "BatchNorm1d" in repr(found) and "16 samples" in found.summary
    assert all(one.off_together < 1e-6 and one.off_whole < 1e-5 for one in found.parameters)
    assert causes(session, "model = sharded()") == []
    assert causes(session, "model = DDP(net())", micro=4) == []


def test_wrong_steps_have_the_right_cause(session):
    one = verified(session, "model = DDP(net())\nif rank == 1: model.module[3].weight.data.add_(0.1)").findings[0]
    assert (one.cause, one.parameters, one.ranks) == ("weights", ("3.weight",), (1,))
    wrapped = "model = DDP(net())\n"
    assert causes(session, wrapped, "F.cross_entropy(model.module(x), y)") == ["bypassed"]
    assert causes(session, wrapped, "F.cross_entropy(model(x), y, reduction='sum')") == ["sum"]
    assert causes(session, wrapped, f"{CE} * world_size") == ["world_size"]
    assert causes(session, f"{wrapped}x, y = x[: 8 - 3 * rank], y[: 8 - 3 * rank]") == ["unequal"]
    assert causes(session, f"{wrapped}y[: 1 + 5 * rank] = -100") == ["tokens"]
    assert causes(session, "model = net()") == ["no_wrapper"]
    ignored = "model = net()\nDDP._set_params_and_buffers_to_ignore_for_model(model, ['0.bias'])\nmodel = DDP(model)"
    assert causes(session, ignored) == ["ignored"]
    assert causes(session, "model = sharded(); model.set_requires_gradient_sync(False)") == ["no_sync"]


def test_the_step_is_taken_from_the_last_training_cell(session):
    code = "model = DDP(net()); opt = torch.optim.SGD(model.parameters(), 0.1)\nfor a, b in [(x, y)]:\n"
    session.run(f"{SETUP}{code}    out = model(a)\n    F.cross_entropy(out, b).backward()\n    opt.step()", quiet=True)
    found = session.verify()
    assert found.is_right and "out = model(a); F.cross_entropy(out, b).backward()" in found.notes[0]


@pytest.mark.parametrize(
    "loss, batch, text",
    [
        ("3", ["x"], "the loss must be a tensor, but 3 is of type int"),
        ("x.sum()", ["x"], "has no gradient"),
        ("model(x)", ["x"], r"has the shape \(8, 4\)"),
        (CE, ["x", "z"], "undefined variable 'z'"),
        ("model(x).mean(", ["x"], "must be an expression"),
        ("model(x).mean()", [], "--batch x,y"),
    ],
)
def test_a_step_that_cannot_be_compared_is_refused(session, loss, batch, text):
    session.run(f"{SETUP}model = DDP(net())", quiet=True)
    with pytest.raises(UsageError, match=text):
        session.verify(loss, batch)


@pytest.mark.parametrize(("code", "loss", "words"), REFUSED[:4])
def test_a_refused_step_changes_nothing(session, code, loss, words):
    session.run(f"{SETUP}{code}\ncounter = [1]\n{STATE}", quiet=True)
    before = session.run("digest()", quiet=True)
    with pytest.raises(UsageError, match=words):
        session.verify(loss, ["x", "y"])
    after = session.run("digest()", quiet=True)
    assert [after[rank].result for rank in (0, 1)] == [before[rank].result for rank in (0, 1)]


def test_a_batch_may_require_gradients(session):
    """A reentrant checkpoint needs an input with `requires_grad`. It is a sample, and not a parameter."""
    assert causes(session, f"{MODELS}model = DDP(Reentrant()); x.requires_grad_()") == []


def test_buffers_that_no_wrapper_makes_equal_are_a_note(session):
    made = f"{MODELS}model = DDP(LazyBuffer()); {CE}.backward()"
    result = verified(session, made)
    assert result.is_right and result.whole_loss is not None
    assert "scale differs between ranks, and no wrapper makes such buffers equal" in repr(result)


def test_everything_is_restored(session):
    session.run(f"{SETUP}model = DDP(net(norm=True))\n{CE}.backward()\ncounter = [1]\n{STATE}", quiet=True)
    before = session.run("digest()", quiet=True)
    assert session.verify(f"(counter.append(1), {CE})[1]", ["x", "y"]).is_right
    after = session.run("digest()", quiet=True)
    assert [after[rank].result for rank in (0, 1)] == [before[rank].result for rank in (0, 1)]


# ---- states, containers, and parts of the batch

RECURRENT = """
torch.manual_seed(0)
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.LSTM(20, 16, batch_first=True), nn.Linear(16, 4)
    def forward(self, x, state):
        out, state = self.inner(x, state)
        return self.out(out), state
model = DDP(Recurrent()); opt = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(10 + rank)
data = [(torch.randn(8, 5, 20), torch.randint(0, 4, (8, 5))) for _ in range(2)]
state, _count, mean = (torch.zeros(1, 8, 16), torch.zeros(1, 8, 16)), 0, 0.0
for x, y in data:
    opt.zero_grad()
"""
STEP = "    loss.backward()\n    opt.step()"


def test_a_state_of_the_step_before_is_the_same_in_each_run(session):
    truncated = "    state = tuple(one.detach() for one in state)\n    out, state = model(x, state)\n    _count += 1\n"
    loss = "    loss = _count * F.cross_entropy(out.flatten(0, 1), y.flatten())\n"
    session.run(f"{SETUP}{RECURRENT}{truncated}{loss}{STEP}", quiet=True)
    result = session.verify()
    assert result.is_right and result.whole_loss is not None and "one process" in result.summary
    assert all(one.off_whole < 1e-5 for one in result.parameters)
    assert {one.result for one in session.run("_count", quiet=True).by_rank.values()} == {"2"}
    moving = "    part = F.cross_entropy(model(x, state)[0].flatten(0, 1), y.flatten())\n"
    moving += "    mean = 0.9 * mean + 0.1 * part.item()\n    loss = (part - mean) ** 2\n"
    session.run(f"{SETUP}{RECURRENT}{moving}{STEP}", quiet=True)
    result = session.verify()
    assert result.is_right and result.whole_loss is None
    assert "mean differs between ranks, and the step reads it" in repr(result)


def test_a_step_that_changes_with_each_call_is_not_compared(session):
    session.run(f"{SETUP}model = DDP(net()); numbers = iter([1.0 + 0.1 * i for i in range(99)])", quiet=True)
    result = session.verify(f"{CE} * next(numbers)", ["x", "y"])
    assert not result.is_compared and result.findings == ()
    assert "has repeated its step" in result.summary and "numbers is a list_iterator" in result.summary


@pytest.mark.parametrize(
    "code, loss",
    [
        ("b = [x, y]", "F.cross_entropy(model(b[0]), b[1])"),
        ("b = {'in': {'x': x}, 'y': [y, y.float()]}", "F.cross_entropy(model(b['in']['x']), b['y'][0])"),
        ("b = [{'x': one, 'y': int(label)} for one, label in zip(x, y)]", "of_list(b)"),
        ("import collections; B = collections.namedtuple('B', 'x y'); b = B(list(x), y.tolist())", "of_tuple(b)"),
    ],
)
def test_a_batch_in_containers_is_split_and_joined(session, code, loss):
    functions = """
def of_list(b):
    return F.cross_entropy(model(torch.stack([one['x'] for one in b])), torch.tensor([one['y'] for one in b]))
def of_tuple(b):
    return F.cross_entropy(model(torch.stack(b.x)), torch.tensor(b.y))
"""
    session.run(f"{SETUP}{functions}model = DDP(net())\n{code}", quiet=True)
    for micro in (1, 4):
        result = session.verify(loss, ["b"], micro=micro)
        assert result.is_right and result.whole_loss is not None and result.samples == 16


def test_a_smaller_last_micro_step_is_a_note(session):
    result = verified(session, "model = DDP(net())\nx, y = x[:7], y[:7]", micro=2)
    assert result.is_right and "micro-steps have different numbers of samples" in repr(result)
    summed = verified(session, "model = DDP(net())", "F.cross_entropy(model(x), y, reduction='sum')", micro=4)
    assert summed.findings[0].cause == "sum" and "1/8 of those of one process" in summed.summary


def test_a_rank_without_samples(session):
    empty = "model = {}\nif rank == 1: x, y = x[:0], y[:0]"
    for model in ("DDP(net())", "sharded()"):
        weighted = verified(
            session, empty.format(model), "F.cross_entropy(model(x), y, reduction='sum') * world_size / 8"
        )
        assert weighted.is_right and weighted.whole_loss is not None
        [one] = verified(session, empty.format(model)).findings
        assert one.cause == "unequal" and "Rank 0 has 8 samples and rank 1 has 0" in one.sentence
    [one] = verified(session, "model = DDP(net())\nx, y = x[: 1 + 7 * rank], y[: 1 + 7 * rank]").findings
    assert one.cause == "unequal" and "0.2222 on rank 0, 1.778 on rank 1" in one.sentence
    with pytest.raises(UsageError, match="the batch has no samples on any rank"):
        verified(session, "model = DDP(net())\nx, y = x[:0], y[:0]")


# ---- models

AVERAGE = """
opt = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1)
for a, b in [(x, y)]:
    opt.zero_grad()
    loss = F.cross_entropy(head(model(a)), b)
    loss.backward()
    {}
    opt.step()
"""
HEAD = "torch.manual_seed(1); head = nn.Linear(4, 4); torch.manual_seed(10 + rank)\n"


@pytest.mark.parametrize(
    "average, cause, parameters",
    [
        ("[(dist.all_reduce(p.grad), p.grad.div_(world_size)) for p in head.parameters()]", None, ()),
        ("[dist.all_reduce(p.grad) for p in head.parameters()]", "sum_of_ranks", ("head.bias", "head.weight")),
        ("dist.all_reduce(head.weight.grad); head.weight.grad /= world_size", "outside", ("head.bias",)),
    ],
)
def test_own_averages_next_to_a_sharded_model(session, average, cause, parameters):
    session.run(f"{SETUP}model = sharded(); {HEAD}{AVERAGE.format(average)}", quiet=True)
    findings = session.verify().findings
    assert [(one.cause, one.parameters) for one in findings] == ([(cause, parameters)] if cause else [])


def test_an_average_of_shards_is_found(session):
    average = (
        "for p in model.parameters():\n        shard = p.grad.to_local(); dist.all_reduce(shard); shard /= world_size"
    )
    session.run(f"{SETUP}model = sharded(); head = nn.Identity(){AVERAGE.format(average)}", quiet=True)
    one = session.verify().findings[0]
    assert one.cause == "mixed_shards" and "0.weight" in one.parameters


def test_elementwise_statements_combine_no_shards(session):
    """One shard of a gradient, or all of it, is zero. So each shard is the sum of all shards, without a collective."""
    code = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
model[0].bias.data[16:] = -100  # the second half of the first layer has no effect
first = fully_shard(nn.Linear(20, 32))  # has no effect
inner = fully_shard(model)
model = lambda x: inner(x) + 0 * first(x).sum()
"""
    average = "[(dist.all_reduce(p.grad), p.grad.div_(world_size)) for p in head.parameters()]\n    "
    scale = "[p.grad.mul_(1.0) for p in (*inner.parameters(), *first.parameters())]"
    training = f"{AVERAGE.replace('*model', '*inner')}".format(average + scale)
    session.run(f"{SETUP}{code}{HEAD}{training}", quiet=True)
    parameters = {one.name for one in session.verify().parameters}
    assert session.verify().findings == () and {"inner.0.weight", "first.weight"} <= parameters


def test_copies_of_shards_that_differ_are_found(session):
    mesh = "mesh = init_device_mesh('cpu', (2, 1), mesh_dim_names=('replica', 'shard'))\nmodel = sharded(mesh=mesh)\n"
    changed = "if rank == 1: model[3].weight.to_local().data.mul_(1.1)"
    [one] = verified(session, mesh + changed).findings
    assert (one.cause, one.parameters, one.ranks) == ("weights", ("3.weight",), (1,))
    # Shards have no copies: ranks that held other values before are one model afterwards.
    before = "model = net()\nif rank == 1: model[0].weight.data.mul_(1.1)\nfully_shard(model)\n"
    assert verified(session, before + "if rank == 1: model[3].weight.to_local().data.mul_(1.1)").is_right


def test_a_static_graph_is_compared_after_its_first_step(session):
    code = "model = DDP(net(), static_graph=True)\n"
    with pytest.raises(UsageError, match="run a training step first"):
        verified(session, code)
    trained = f"{code}opt = torch.optim.SGD(model.parameters(), 0.1)\nfor _ in range(2): {CE}.backward(); opt.step()\n"
    assert verified(session, trained, micro=2).is_right
    session.run(f"{CE}.backward(); opt.step()", quiet=True)  # it counts no step of the comparison
    changed = "if rank == 1: model.module[3].bias.data.add_(1)"
    assert verified(session, trained + changed).findings[0].cause == "weights"


FSDP1 = """
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
def flat(model, strategy, **options):
    policy = ModuleWrapPolicy({nn.Linear}) if strategy == "NO_SHARD" else None
    options |= {"sharding_strategy": ShardingStrategy[strategy], "auto_wrap_policy": policy}
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)
"""


@pytest.mark.parametrize("strategy", ["FULL_SHARD", pytest.param("NO_SHARD", marks=pytest.mark.long)])
@pytest.mark.parametrize("originals", [False, True])
def test_models_of_fsdp1_are_compared_and_restored(session, strategy, originals):
    made = f"{FSDP1}model = flat(net(norm=True), '{strategy}', use_orig_params={originals})\n"
    session.run(f"{SETUP}{made}counter = [1]\n{CE}.backward()\n{STATE}", quiet=True)
    before = session.run("digest()", quiet=True)
    for micro in (1, 4):
        result = session.verify(CE, ["x", "y"], micro=micro)
        assert result.is_right and result.whole_loss is not None
        assert {one.name for one in result.parameters} == {
            f"{n}.{kind}" for n in (0, 1, 3) for kind in ("bias", "weight")
        }
    [one] = session.verify("F.cross_entropy(model(x), y, reduction='sum')", ["x", "y"]).findings
    assert one.cause == "sum"
    after = session.run("digest()", quiet=True)
    assert [after[rank].result for rank in (0, 1)] == [before[rank].result for rank in (0, 1)]
    session.run("left = model.no_sync(); left.__enter__()", quiet=True)
    assert session.verify(CE, ["x", "y"]).findings[0].cause == "no_sync"
    session.run("del model, left", quiet=True)


def test_a_variable_may_hold_a_view_that_fsdp1_has_replaced(session):
    code = f"{FSDP1}inner = net()\nmodel = flat(inner, 'FULL_SHARD', use_orig_params=False)\nview = inner[0].weight\n"
    session.run(f"{SETUP}{code}\ntry: view.is_leaf\nexcept RuntimeError: is_replaced = True", quiet=True)
    assert {one.result for one in session.run("is_replaced", quiet=True).by_rank.values()} == {"True"}
    assert session.verify(CE, ["x", "y"]).is_right
    session.run("del model, inner, view", quiet=True)


def test_copies_of_fsdp1_that_differ_are_found(session):
    code = f"{FSDP1}inner = net()\nif rank == 1: inner[3].bias.data.add_(1)\nmodel = flat(inner, 'NO_SHARD')"
    [one] = verified(session, code).findings
    assert (one.cause, one.parameters, one.ranks) == ("weights", ("3.bias",), (1,))
    with pytest.raises(UsageError, match="with SHARD_GRAD_OP is not supported"):
        verified(session, f"{FSDP1}model = flat(net(), 'SHARD_GRAD_OP')")
    session.run("del model, inner", quiet=True)


def test_the_step_is_computed_a_bounded_number_of_times(session, tmp_path):
    steps = {program: max(steps_of(session, tmp_path, *program)) for program in COUNTED}
    assert {program: count for program, count in steps.items() if not 4 <= count <= 2 * 2 + 2} == {}


# ---- the answer tells no more than was compared


def test_the_first_sentence_leaves_out_batch_statistics(session):
    result = verified(session, "model = DDP(net(norm=True))")
    assert result.summary.startswith("apart from BatchNorm1d, the 2 ranks together compute the gradients")
    assert "one process with the whole batch computes other gradients in training" in repr(result)
    assert verified(session, "model = DDP(net())").summary.startswith("the 2 ranks together")


def test_dropout_is_named_only_where_something_was_dropped(session):
    assert "without dropout" in repr(verified(session, "model = DDP(net())"))
    plain = verified(session, "model = DDP(nn.Linear(20, 4))")
    assert plain.is_right and "dropout" not in repr(plain) and "world of one rank" not in repr(plain)


ACCUMULATES = """
model = DDP(nn.Linear(20, 4)); opt = torch.optim.SGD(model.parameters(), 0.1); parts = 4
for number, (a, b) in enumerate([(x, y)] * 4):
    loss = {}
    loss.backward()
    if number == 3:
        opt.step()
"""


@pytest.mark.parametrize(
    ("loss", "cause", "words"),
    [
        ("F.cross_entropy(model(a), b)", "accumulated", "If your loop has 4 micro-steps for each optimizer step, "),
        ("F.cross_entropy(model(a), b) / 4", None, "the loop divides the loss by 4"),
        ("F.cross_entropy(model(a), b) / parts", None, "the loop divides the loss by 4"),
        ("F.cross_entropy(model(a), b) * 0.25", None, "the loop divides the loss by 4"),
        ("F.cross_entropy(model(a), b, reduction='sum') * world_size / 16", None, "does not divide the loss by 4"),
        ("F.cross_entropy(model(a), b) / later.pop()", None, "is for the mean of the 4 micro-steps"),
    ],
)
def test_micro_steps_accumulate_as_the_loop_does(session, loss, cause, words):
    session.run(f"{SETUP}later = [4] * 99\n{ACCUMULATES.format(loss)}", quiet=True)
    result = session.verify(micro=4)
    assert [one.cause for one in result.findings] == ([cause] if cause else []), result
    assert words in repr(result)
    if cause:
        assert "4 times those of one process" in result.summary


NO_SYNC = """
import contextlib
model = DDP(nn.Linear(20, 4)); opt = torch.optim.SGD(model.parameters(), 0.1)
for number, (a, b) in enumerate([(x, y)] * 4):
    out = model(a)
    with model.no_sync() if number % 4 != 3 else contextlib.nullcontext():
        loss = F.cross_entropy(model(a), b) / 4
        loss.backward()
    if number % 4 == 3:
        opt.step()
"""


def test_a_conditional_no_sync_is_left_out(session):
    session.run(f"{SETUP}{NO_SYNC}", quiet=True)
    result = session.verify(micro=4)
    assert result.is_right and "no_sync() of the loop was left out" in repr(result), result
    with pytest.raises(UsageError, match=r"accumulates gradients with no_sync\(\): .* %ddp_verify --micro 4"):
        session.verify()


@pytest.mark.unit
def test_loops_that_may_accumulate():
    begin = "for i, (x, y) in enumerate(data):\n    f(model(x), y).backward()\n"
    assert find_step([f"{begin}    if (i + 1) % 4 == 0:\n        opt.step()"]).may_accumulate
    assert find_step([f"{begin}opt.step()"]).may_accumulate
    assert not find_step([f"{begin}    opt.step()\nscheduler.step()"]).may_accumulate
    assert not find_step([f"{begin}    opt.step()\n    if i % 4 == 0:\n        print(i)"]).may_accumulate
    always = "for x, y in data:\n    with model.no_sync():\n        f(model(x), y).backward()\n    opt.step()"
    with pytest.raises(UsageError, match="backward is inside of 'with'"):
        find_step([always])


def test_loss_alone_does_not_show_the_accumulation(session):
    result = verified(session, "model = DDP(nn.Linear(20, 4))", micro=4)
    assert result.is_right and "for the mean of the 4 micro-steps" in repr(result)
    assert "Your loop must divide each loss by 4" in repr(result)


def test_different_weights_are_measured_with_their_cause(session):
    code = "model = DDP(nn.Linear(20, 4)); opt = torch.optim.SGD(model.parameters(), lr=0.05 * (1 + rank))\n"
    code += f"for _ in range(3):\n    opt.zero_grad(); {CE}.backward(); opt.step()"
    [one] = verified(session, code).findings
    gaps = session.run("[float(one.abs().max()) for one in model.parameters()]", quiet=True)
    assert one.cause == "weights" and gaps is not None
    assert "by at most" in one.sentence and "lr of opt is 0.05 on rank 0 and 0.1 on rank 1" in one.sentence
    changed = verified(session, "model = DDP(net())\nif rank == 1: model.module[3].weight.data.add_(0.25)").findings[0]
    assert "they differ by at most 0.25 (3.weight)" in changed.sentence
    assert "the statement that changes them on one rank is not known" in changed.sentence


def test_findings_of_the_checked_cell_end_the_answer(session):
    code = "model = DDP(nn.Linear(20, 4)); opt = torch.optim.SGD(model.parameters(), 0.01)\n"
    code += "for _ in range(6):\n    F.cross_entropy(model(x), y).backward()\n    opt.step()"
    session.run(f"{SETUP}{code}", execution_count=7, file="In [7]")
    result = session.verify()
    assert result.findings == () and "gradients" in result.summary
    assert "were never reset" in repr(result).splitlines()[-1]
    assert repr(result).splitlines()[-2] == "other findings in In [7]:"
    assert "never reset" not in repr(session.verify(CE, ["x", "y"]))


def test_a_computed_loss_is_refused_with_the_remedy(session):
    session.run(f"{SETUP}model = DDP(net())\nloss = {CE}\nloss.backward()", quiet=True)
    with pytest.raises(UsageError, match="loss is a tensor that was already computed: LOSS must be the expression"):
        session.verify("loss", ["x", "y"])
    with pytest.raises(UsageError) as error:
        session.verify("loss * 1", ["x", "y"])
    assert "LOSS must contain the expression that computes it" in str(error.value) and "or ." not in str(error.value)


def test_sentences_name_numbers_and_calls(session):
    wrapped = "model = DDP(net())\n"
    one = verified(session, wrapped, "F.cross_entropy(model.module(x), y)")
    assert one.summary == (
        "None of the 4 parameters is averaged. The loss calls model.module(x), which bypasses DDP. Call model(x)."
    )
    one = verified(session, f"{wrapped}if rank == 1: x, y = x[:5], y[:5]")
    assert one.summary == (
        "Rank 0 has 8 samples and rank 1 has 5, but both count equally in the average. Multiply each loss by "
        "len(x) * world_size / 13: 1.231 on rank 0, 0.7692 on rank 1."
    )
    one = verified(session, f"{wrapped}torch.manual_seed(5); x, y = torch.randn(8, 20), torch.randint(0, 4, (8,))")
    assert one.summary.startswith("All ranks have the same batch, so 2 ranks compute the same gradient as 1.")


# ---- the text of a step


def test_statements_of_a_step_are_found():
    loop = "for i, (x, y) in enumerate(data):\n    x = x.to(d)\n    opt.zero_grad()\n    loss = f(model(x), y)\n"
    found = find_step([f"{loop}    loss.backward()\n    opt.step()", "model = M()"])
    assert (found.before, found.loss, found.batch) == ("x = x.to(d)\nloss = f(model(x), y)", "loss", ("x", "y"))
    assert found.is_sure and found.after == ""
    average = "    for p in ps:\n        dist.all_reduce(p.grad)\n    clip(ps)\n    opt.step()\n    print(loss)"
    assert find_step([f"{loop}    loss.backward()\n{average}"]).after.startswith("for p in ps:")


def test_a_step_in_a_function_is_found():
    function = "def train(m, a, b):\n    loss = f(m(a), b)\n    loss.backward()\n"
    found = find_step(["for x, y in data:\n    train(model, x, y)", function])
    assert found.before.splitlines() == ["m = model", "b = y", "a = x", "loss = f(m(a), b)"]
    assert found.batch == ("x", "y")


def test_a_closure_of_an_optimizer_is_a_step():
    closure = "    def closure():\n        opt.zero_grad()\n        loss = f(model(x), y)\n        loss.backward()\n"
    cell = f"for x, y in data:\n{closure}        return loss\n    opt.step(closure)"
    found = find_step([cell, "for a, b in data:\n    g(model(a), b).backward()"])
    assert (found.before, found.loss, found.batch, found.at) == ("loss = f(model(x), y)", "loss", ("x", "y"), 0)


_OLDER = "for x, y in data:\n    f(model(x), y).backward()"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "class T:\n    def step(self, x): self.loss(x).backward()\nfor x in data:\n    t.step(x)",
            "step.. calls backward",
        ),
        ("def a(x): f(model(x)).backward()\ndef b(x): a(x)\nfor x in data:\n    b(x)", "b.. calls backward"),
        ("schedule = ScheduleGPipe(stage, 4)\nfor x in data:\n    schedule.step(x)", "runs a pipeline .schedule.step."),
        ("with dist_autograd.context() as c:\n    dist_autograd.backward(c, [f()])", "distributed autograd of RPC"),
    ],
)
def test_no_older_cell_replaces_an_unclear_training_cell(code, words):
    with pytest.raises(UsageError, match=words):
        find_step([code, _OLDER])
    assert find_step(["def train(x):\n    f(model(x)).backward()", _OLDER]).at == 1


@pytest.mark.parametrize(
    "code",
    [
        "x = 1",
        "for x in data:\n    if a:\n        model(x).backward()",
        "for x in data:\n    d(x).backward()\n    g(x).backward()",
        "def train():\n    for x in data:\n        model(x).backward()\ntrain()",
        "accelerator.backward(loss)",
    ],
)
def test_an_unclear_step_asks_for_the_loss(code):
    with pytest.raises(UsageError, match="%ddp_verify F"):
        find_step([code])


# ---- findings from recorded facts


def facts(local: list[list[float]], together: list[list[float]], **more):
    """Return facts of one parameter `w` on ranks without a whole batch."""
    rows = np.array([row for rank in range(len(local)) for row in (local[rank], local[rank], together[rank])])
    world = len(local)
    found = {
        "world": world,
        "parts": list(range(world)),
        "wrapper": "ddp",
        "rows": [4] * world,
        "losses": [1.0] * world,
        "counts": [{}] * world,
        "samples": 4 * world,
        "same_batch": False,
        "overlap": 0,
        "other_batch": [],
        "sizes": {"w": 2},
        "causes": {},
        "weights": {},
        "copies": [],
        "own_buffers": [],
        "data_parallel": False,
        "on_one": None,
        "missing": {},
        "never": [],
        "hangs": False,
        "hook": "",
        "unit": 1.2e-7,
        "dtypes": ["float32"],
        "is_eager": True,
        "norms": [],
        "gradient_hooks": [],
        "divide_factor": None,
        "prefixes": [""],
        "plain": [],
        "no_sync": False,
        "micro": 1,
        "shortage": "",
        "loss_is": "",
        "left": [],
        "mixed_shards": [],
        "repeat": None,
        "forward_bypassed": False,
        "drops": False,
        "divides": True,
        "text": "",
        "no_whole": "not computed",
        "whole_loss": None,
        "after": "",
        "runs": ["local", "nudged", "together"],
        "matrices": {"w": rows @ rows.T},
    }
    return found | more


def test_an_unknown_cause_is_said_to_be_unknown():
    from ddp_notebook.run.verify.causes import explain

    local = [[1.0, 0.0], [0.0, 1.0]]
    assert explain(facts(local, [[0.5, 0.5]] * 2)).is_right
    [one] = explain(facts(local, [[0.5, 0.7]] * 2)).findings
    assert one.cause == "unknown" and "the cause is not known" in one.sentence
    [one] = explain(facts(local, [[1.0, 1.0]] * 2, hook="total")).findings
    assert one.cause == "comm_hook" and "2 times their average" in one.sentence
    [one] = explain(facts(local, local, causes={"w": "late"})).findings
    assert one.cause == "late" and one.parameters == ("w",)


def test_a_loss_that_is_not_finite_is_not_compared():
    from ddp_notebook.run.verify.causes import explain

    found = explain(facts([[1.0, 0.0]] * 2, [[1.0, 0.0]] * 2, losses=[1.0, float("nan")]))
    assert not found.is_right and found.findings == () and "the loss is nan on rank 1" in found.summary


def test_a_batch_variable_may_start_with_an_underscore(session):
    session.run(f"{SETUP}model = DDP(net()); _x, _y = x, y", quiet=True)
    assert session.verify("F.cross_entropy(model(_x), _y)", ["_x", "_y"], micro=4).is_right
    assert {one.result for one in session.run("_x is x and _y is y", quiet=True).by_rank.values()} == {"True"}


def test_batches_that_are_made_in_the_loop(session):
    head = f"{SETUP}model = DDP(net()); opt = torch.optim.SGD(model.parameters(), 0.1)\n"
    head += "torch.manual_seed(rank); X, Y, B = x, y, 4\n"
    body = "    out = model(xb)\n    loss = F.cross_entropy(out, yb)\n    loss.backward()\n    opt.step()"
    made = "xb, yb = torch.randn(4, x.shape[1]), torch.randint(4, (4,))"
    indexed = "idx = range(step * B, step * B + B)\n    xb, yb = X[list(idx)], Y[list(idx)]"
    for batch in (made, indexed):
        session.run(f"{head}for step in range(2):\n    {batch}\n{body}", quiet=True)
        found = session.verify()
        assert found.is_right and found.samples == 8 and batch.partition("\n")[0] not in found.notes[0]
        assert session.verify(batch=["xb", "yb"]).is_right
    session.run(
        f"{head}for step in range(2):\n    F.cross_entropy(model(X[step:step + B]), Y[step:step + B]).backward()",
        quiet=True,
    )
    with pytest.raises(UsageError, match="step has no samples: name the batch"):
        session.verify()


def test_the_step_uses_a_function_of_a_cell_long_ago(session):
    session.run(f"{SETUP}def draw():\n    return torch.randn(4, x.shape[1]), torch.randint(4, (4,))", quiet=True)
    for _ in range(60):
        session.run("pass", quiet=True)
    code = "model = DDP(net()); torch.manual_seed(rank)\nfor step in range(2):\n    xb, yb = draw()\n"
    session.run(f"{code}    F.cross_entropy(model(xb), yb).backward()", quiet=True)
    found = session.verify()
    assert found.is_right and found.samples == 8 and found.whole_loss is not None, "the batch is not drawn again"


def test_tensors_without_values_in_other_variables(session):
    others = """
lazy, empty = nn.LazyLinear(3), nn.Linear(2, 2, device="meta")
sparse = nn.Module(); sparse.register_buffer("adjacent", torch.eye(3).to_sparse())
"""
    assert verified(session, f"model = DDP(net()){others}").is_right
    with pytest.raises(UsageError, match="of lazy have no values yet: run a training step first"):
        session.verify("model(x).sum() + lazy(x).sum()", ["x"])
    session.run("del lazy, empty, sparse", quiet=True)
