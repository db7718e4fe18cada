"""Memory per rank: parameters, gradients and optimizer state match the formula, before and after a change."""

from __future__ import annotations

import re

import pytest

from ddp_notebook import session as sessions
from ddp_notebook.errors import RankError

D, BLOCKS = 128, 4
NUMEL = BLOCKS * (2 * 4 * D * D + 5 * D)
_TRAIN = f"""
import gc
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
def make():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear({D}, {4 * D}), nn.GELU(), nn.Linear({4 * D}, {D}))
                           for _ in range({BLOCKS})])
def shard(model, **options):
    for block in model: fully_shard(block, **options)
    return fully_shard(model, **options)
x = torch.randn(16, {D})
def step():
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
_ADAM = "optimizer = torch.optim.Adam(model.parameters())"
_WAYS = {  # wrapper, and the bytes per element of parameters, gradients and Adam's state on each of two ranks
    "DDP": (f"model = DDP(make(), gradient_as_bucket_view=True); {_ADAM}", (4, 4, 8)),
    "ZeRO-1": (
        "model = DDP(make(), gradient_as_bucket_view=True)\n"
        "optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam)",
        (4, 4, 4),
    ),
    "FSDP2": (f"model = shard(make()); {_ADAM}", (2, 2, 4)),
    "FSDP2 without reshard": (f"model = shard(make(), reshard_after_forward=False); {_ADAM}", (2, 2, 4)),
}


@pytest.fixture(scope="module")
def ranks(session):
    session.run(_TRAIN, quiet=True)
    return session


def test_memory_without_code_has_a_total_and_no_peak(ranks):
    ranks.run(f"{_WAYS['DDP'][0]}", quiet=True)
    now, with_code, again = (str(ranks.memory(code)).splitlines() for code in ("", "step()", ""))
    assert now[0].split() == ["parameters", "gradients", "optimizer", "state", "total"]
    assert with_code[0].split()[-3:] == ["activations", "temporary", "peak"]
    last = [re.split(r"  +", line) for line in again]
    assert len(last[1]) == 4 and len(last[2]) == 7, "the first row has no activations and no peak"


@pytest.mark.parametrize("way", _WAYS)
def test_three_parts_are_within_three_percent_of_the_formula(ranks, way):
    make, bytes_each = _WAYS[way]
    ranks.run(f"model = optimizer = None\n{make}", quiet=True)
    memory = ranks.memory("step()")
    for rank in (0, 1):
        of = memory[rank]
        found = (of.parameters, of.gradients, of.optimizer_state)
        assert found == pytest.approx([each * NUMEL for each in bytes_each], rel=0.03)
        assert of.activations > 0 and of.temporary > 0
        assert of.peak > sum(found) * 0.97


def test_what_is_held_now_and_what_was_measured_before(ranks):
    ranks.run(f"model = make(); {_ADAM}", quiet=True)
    before = ranks.memory()
    assert before[0].gradients == before[0].optimizer_state == before[0].activations == 0
    ranks.run("step()", quiet=True)
    after = ranks.memory()
    assert after[1].gradients == after[1].parameters and after.before[1].gradients == 0
    assert after.before.before is None
    lines = repr(after).splitlines()
    assert lines[0].split()[:2] == ["parameters", "gradients"]
    assert lines[1].startswith("ranks 0,1") and lines[2].startswith("before, ranks 0,1")


@pytest.mark.long
def test_a_model_may_be_called_several_times(ranks):
    """Examples are gradient accumulation and a loop."""
    ranks.run(f"model = DDP(make(), gradient_as_bucket_view=True); {_ADAM}\nstep(); step()", quiet=True)
    once = ranks.memory("step()")[0]
    several = ranks.memory("for _ in range(3): step()")[0]
    assert (several.parameters, several.gradients) == (once.parameters, once.gradients)
    assert several.activations == pytest.approx(once.activations, rel=0.05)
    assert several.peak == pytest.approx(once.peak, rel=0.1)
    at_once = ranks.memory("(model(x).sum() + model(x + 1).sum()).backward()")[0]
    assert at_once.activations == pytest.approx(2 * once.activations, rel=0.2), "of both calls, until the backward"
    accumulated = "with model.no_sync(): model(x).sum().backward()\nstep()"
    assert ranks.memory(accumulated)[1].activations == pytest.approx(once.activations, rel=0.05)


def test_code_that_fails_leaves_no_tracker(ranks, monkeypatch):
    monkeypatch.setattr(sessions, "cell_number", lambda: 7)
    with pytest.raises(RankError, match="NameError") as raised:
        ranks.memory("no_such_step()")
    [traceback] = {re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(lines)) for lines in raised.value.tracebacks.values()}
    assert re.search(r"-+> 1 no_such_step\(\)", traceback), traceback
    assert "_ddp_told" not in traceback and "Could not get source" not in traceback
    ranks.run(f"model = make(); {_ADAM}\nstep()", quiet=True)


def test_two_models_in_fsdp_are_named(ranks):
    ranks.run(f"model = shard(make()); other = shard(make()); {_ADAM}", quiet=True)
    with pytest.raises(RankError, match="one FSDP model at a time, got model, other"):
        ranks.memory("step()")
    ranks.run("del other", quiet=True)
