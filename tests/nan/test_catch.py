"""`%ddp_nan --catch`: a cell stops before the optimizer step on all ranks, and the module is named."""

import ast

import numpy as np
import pytest

from ddp_notebook.errors import RankError
from tests.nan.programs import SETUP

ERROR = "GradientsNotFiniteError: gradients were NaN or infinite in step 3 (counted from 0)"


@pytest.fixture(scope="module")
def ranks(session):
    session.run(SETUP)
    session.catch_nan()
    yield session
    session.catch_nan(False)


@pytest.fixture
def stopped(ranks, capsys):
    """Run a program that must be stopped, and return the lines under its cell."""

    def run(code: str, whose: str = "(ranks 0-1)") -> str:
        capsys.readouterr()
        with pytest.raises(RankError) as error:
            ranks.run(code)
        first = str(error.value).splitlines()[0]
        assert first.startswith(ERROR) and whose in first
        return capsys.readouterr().err

    return run


def printed(ranks, expression: str) -> list[str]:
    """Return the value of an expression on each rank, as text."""
    results = ranks.run(f"print({expression})", quiet=True)
    return [results[rank].stdout.strip() for rank in (0, 1)]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("input", "the input of the model was not finite: argument 0 has 1 of 128 elements that are not finite, in "),
        (
            "log",
            "the forward of layers.1.norm (BatchNorm1d) made the first NaN: its output has 128 NaN of 128 elements",
        ),
        ("code", "the forward of layers.1 (Block) made the first of those: in its own code before it calls "),
        (
            "sqrt",
            "the backward of layers.1.odd.inner (Sqrt) made the first NaN: AbsBackward0 returned a gradient with ",
        ),
        ("loss", "the output of the model was finite, and the gradient of this output was not"),
    ],
)
def test_all_ranks_stop_and_the_place_is_named(stopped, ranks, fault, expected):
    lines = stopped(f"train({fault!r})")
    assert "rank 1, step 3: bucket 0 of model" in lines and " NaN of 980 elements before the average" in lines
    assert f"rank 1: {expected}" in lines or expected in lines
    assert "the gradients of rank 0 were finite before the average" in lines
    # The optimizer has not used the gradients, and the repetition has left nothing behind.
    assert printed(ranks, "sum(not p.isfinite().all() for p in net.parameters())") == ["0", "0"]
    assert printed(ranks, "same(kept, state())") == ["True", "True"]
    found = ranks.recording.first_nan()
    assert found.ranks == (1,) and found.step == 3 and found.last_clean_step == 2
    assert any("rank 1, step 3: bucket 0" in one for one in ranks.recording.findings[found.cell])


MASKS = """
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)
    def forward(self, x, mask):
        return self.linear(x) + mask
torch.manual_seed(0)
model = DDP(Masked())
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    mask = torch.zeros(8, 4)
    mask[:, 3] = float("-inf")
    if rank == 1 and step == 3:
        mask[2] = float("-inf")  # no class is left
    opt.zero_grad()
    F.cross_entropy(model(torch.randn(8, 16), mask), torch.zeros(8, dtype=torch.long)).backward()
    opt.step()
"""


def test_infinite_outputs_of_a_mask(stopped):
    assert "rank 1: the module is not known: the output of the model had infinite values" in stopped(MASKS)


LOADS = """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
def load(workers=0, shuffle=False, epochs=1, stops_at=99, **options):
    data = TensorDataset(torch.arange(64.0).repeat(16, 1).T.contiguous(), torch.arange(64) % 4)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=shuffle), num_workers=workers, **options)
    torch.manual_seed(0)
    model = DDP(nn.Linear(16, 4))
    opt = torch.optim.SGD(model.parameters(), lr=1e-4)
    global seen
    seen = []
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            if epoch == 0 and number == stops_at:
                break
            seen.append(x[:, 0].int().tolist())
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if epoch == epochs - 1 and number == 3 and rank == 1:
                loss = loss * float("nan")
            loss.backward()
            opt.step()
"""


def test_the_samples_of_the_batch_are_named(stopped, ranks):
    ranks.run(LOADS)
    assert "rank 1 loaded 4 samples from 25 to 31 in steps of 2 in step 3" in stopped("load()")
    assert "rank 1 loaded 4 samples from 25 to 31 in steps of 2 in step 3" in stopped("load(workers=2)")


@pytest.mark.parametrize(
    "options",
    ["shuffle=True", "workers=2, shuffle=True, epochs=3, stops_at=2, persistent_workers=True", "workers=1, epochs=2"],
)
def test_the_recorded_samples_are_those_that_the_program_got(ranks, options):
    ranks.run(LOADS)
    ranks.catch_nan(False)
    assert ranks.run(f"load({options})").ok
    ranks.catch_nan()
    rows = ranks.recording.rows("indices")
    rows = rows[rows["cell"] == rows["cell"].max()]
    for rank, text in enumerate(printed(ranks, "[(one[0], one[-1], len(one)) for one in seen]")):
        own = rows[rows["rank"] == rank]
        # A batch that is drawn and not used, at `break`, is recorded too.
        last = [own[own["step"] == step][-1] for step in np.unique(own["step"])]
        found = [(int(one["first"]), int(one["last"]), int(one["count"])) for one in last]
        assert found == ast.literal_eval(text)


def test_infinite_values_are_traced(stopped):
    lines = stopped("train('log')")
    assert "what it got had infinite values; the forward of layers.1.odd.inner (Log) made the first of those" in lines


SQRT = "rank 1: the backward of layers.1.odd.inner (Sqrt) made the first NaN"


@pytest.mark.parametrize("fault", ["sqrt", "log", "loss"])
@pytest.mark.parametrize("wrap", ["shard", "flatten", "lambda net: flatten(net, True)"])
def test_fsdp_repeats_the_forward_together(stopped, ranks, wrap, fault):
    lines = stopped(f"train({fault!r}, wrap={wrap})")
    if fault == "sqrt":
        assert "1 earlier average of this backward had finite gradients" in lines
        assert ("rank 1, step 3: the gradients of module layers.1 had " in lines) == (wrap == "shard")
        assert SQRT in lines
    elif fault == "log":
        assert "rank 1: the forward of layers.1.norm (BatchNorm1d) made the first NaN" in lines
    else:
        assert "rank 1: the output of the model was finite, and the gradient of this output was not" in lines
    assert "the gradients of rank 0 were finite before the average" in lines
    assert printed(ranks, "same(kept, state())") == ["True", "True"]


@pytest.mark.parametrize("guilty", [0, 1, None])
def test_tensor_parallel_stops_and_repeats_together(stopped, ranks, guilty):
    lines = stopped(f"train('sqrt', wrap=split, seed=5, guilty={guilty})")
    for rank in (0, 1):
        assert f"rank {rank}, step 3: gradients had NaN before the optimizer step" in lines
    assert "the backward of layers.1.odd.inner (Sqrt) made the first NaN" in lines
    assert printed(ranks, "same(kept, state())") == ["True", "True"]


def test_gradients_that_the_user_averages(stopped, ranks):
    lines = stopped("train('sqrt', wrap=alone, by_hand=True)")
    assert "rank 1, step 3: the tensor of all_reduce had 256 NaN of 256 elements before the average" in lines
    assert SQRT in lines and "the gradients of rank 0 were finite before the average" in lines
    assert printed(ranks, "same(kept, state())") == ["True", "True"]


def test_without_an_average_the_rank_with_the_nan_stops(stopped):
    lines = stopped("train('input', wrap=alone)", "(rank 1); succeeded: rank 0")
    assert "rank 1, step 3: gradients had NaN before the optimizer step" in lines
    assert "rank 1: the input of the model was not finite: argument 0 has 1 of 128 elements" in lines


@pytest.mark.parametrize(
    "options", ["", "syncs_all=True", "bad=0", "bad=2", "wrap=fully_shard", "wrap=fully_shard, syncs_all=True"]
)
def test_the_bad_micro_step_is_repeated(stopped, options):
    lines = stopped(f"accumulate({options})")
    assert "rank 1: the backward of odd (Sqrt) made the first NaN" in lines
    assert "the gradients of rank 0 were finite before the average" in lines


def test_each_call_of_a_closure_is_checked(stopped):
    assert "rank 1: the backward of odd (Sqrt) made the first NaN" in stopped("closures()")


@pytest.mark.parametrize("how", ["outside", "inside", "whole"])
def test_compiled_models_are_repeated_eagerly(stopped, how):
    lines = stopped(f"compiled({how!r})")
    assert "rank 1: the backward of odd (Sqrt) made the first NaN" in lines
    assert "the gradients of rank 0 were finite before the average" in lines


def test_two_models_are_told_apart(ranks, capsys):
    # A step of the critic comes between the forward and the backward of the generator.
    for bad in ("generator", "critic"):
        with pytest.raises(RankError, match=r"GradientsNotFiniteError.*\(ranks 0-1\)"):
            ranks.run(f"adversaries({bad!r})")
        lines = capsys.readouterr().err
        assert f"rank 1: the backward of 1.odd (Sqrt) of {bad} made the first NaN" in lines
        assert "the gradients of rank 0 were finite before the average" in lines


def test_a_scaler_skips_its_step_itself(ranks):
    scaler = "torch.amp.GradScaler('cpu', init_scale=256.0)"
    fused = "lambda p, lr: torch.optim.Adam(p, lr=lr, fused=True)"
    for options in (f"scaler={scaler}", f"scaler={scaler}, optimizer={fused}"):
        assert ranks.run(f"train('scaled', {options})").ok
        assert not ranks.recording.first_nan().is_found


def test_the_next_cells_run_and_nothing_is_left(ranks):
    hooks = "len(__import__('torch.optim.optimizer', fromlist=['']).__dict__['_global_optimizer_pre_hooks'])"
    state = f"torch.nn.Module.__call__.__qualname__, {hooks}"
    before = printed(ranks, state)
    assert ranks.run("train()").ok
    assert printed(ranks, state) == before
    ranks.catch_nan(False)
    assert ranks.run("train('input')").ok
    found = ranks.recording.first_nan()
    assert found.is_found and found.ranks == (1,) and found.step == 3
    ranks.catch_nan()


def test_lines_name_the_variable_of_the_model(stopped, ranks):
    code = """
model = DDP(nn.Sequential(nn.Linear(4, 1)))
opt = torch.optim.SGD(model.parameters(), 0.1)
for step in range(5):
    opt.zero_grad()
    (model(torch.ones(2, 4)).sum() * (float("nan") if step == 3 else 1.0)).backward()
    opt.step()
"""
    for _ in range(2):
        assert "bucket 0 of model (0.bias, 0.weight) had" in stopped(code, "")
        assert "into bucket 0 of model (" in ranks.recording.first_nan().sentence


INFINITE_WEIGHTS = """
model = DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    if rank == 1 and step == 3:
        model.module[0].weight.data.fill_(float("inf"))
    opt.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    opt.step()
"""


def test_infinite_parameters_are_named(stopped):
    lines = stopped(INFINITE_WEIGHTS)
    assert "rank 1: the forward of " in lines and " made the first NaN: " in lines
    assert "; parameters infinite before this forward: 0.weight\n" in lines
