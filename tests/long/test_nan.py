"""Counted tests of `%ddp_nan`: no rank hangs, nothing is left behind, right programs run on, and times."""

from __future__ import annotations

import random
import time

import pytest

from ddp_notebook.errors import RankError
from tests.conftest import wait_until
from tests.nan.programs import SETUP
from tests.nan.rows import from_on, recorded

pytestmark = [pytest.mark.long]
_FAULTS = ("input", "log", "code", "sqrt", "loss")
_MODELS = (
    "nn.Linear(8, 4)",
    "nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))",
    "nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 4))",
    "nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))",
    "nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 4))",
)
_OPTIMIZERS = (
    "torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)",
    "torch.optim.AdamW(model.parameters(), lr=0.001)",
    "torch.optim.Adam(model.parameters(), lr=0.001, fused=True)",
)
_STYLES = ("float32", "bfloat16", "scaler", "accumulate")
_RIGHT = """
torch.manual_seed(0)
model = DDP({model})
optimizer = {optimizer}
scaler = torch.amp.GradScaler("cpu", enabled={style!r} == "scaler", init_scale=2.0**100 if {style!r} == "scaler" else 1)
torch.manual_seed(rank)
for step in range(5):
    optimizer.zero_grad()
    for micro in range(2 if {style!r} == "accumulate" else 1):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled={style!r} == "bfloat16"):
            out = model(torch.randn(8, 8))
        loss = F.cross_entropy(out.float(), torch.randint(0, 4, (8,)))
        log(loss=loss.item())
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""

_SLOW = """
import time
import ddp_notebook.rank.record.nan.origin as search
kinds_in = search.kinds_in
def slow(values):
    global calls
    calls += 1
    time.sleep(0.02)
    return kinds_in(values)
"""


@pytest.fixture(scope="module")
def ranks(session):
    session.run(SETUP)
    session.catch_nan()
    yield session
    session.catch_nan(False)


def printed(ranks, expression: str) -> list[str]:
    results = ranks.run(f"print({expression})", quiet=True)
    return [results[rank].stdout.strip() for rank in (0, 1)]


@pytest.mark.parametrize(
    "options",
    ["wrap=DDP", "wrap=shard", "wrap=flatten", "wrap=alone, by_hand=True", "wrap=split, seed=5"],
    ids=["ddp", "fsdp2", "fsdp1", "by_hand", "tensor_parallel"],
)
def test_no_rank_hangs_20_of_20(ranks, options):
    choose = random.Random(0)
    for number in range(20):
        fault, guilty, at = choose.choice(_FAULTS), choose.randrange(2), choose.randrange(6)
        begin = time.monotonic()
        with pytest.raises(RankError, match=r"GradientsNotFiniteError.*\(ranks 0-1\)"):
            ranks.run(f"train({fault!r}, at={at}, guilty={guilty}, {options})", timeout_s=20)
        assert time.monotonic() - begin < 20, number
        if "wrap=split" not in options:  # its ranks average nothing
            found = ranks.recording.first_nan()
            assert (found.step, found.ranks) == (at, (guilty,)), number


@pytest.mark.parametrize("options", ["wrap=shard", "wrap=flatten", "wrap=alone, by_hand=True", "wrap=split, seed=5"])
def test_forwards_on_all_ranks_restore_everything_50_of_50(ranks, options):
    choose = random.Random(2)
    for number in range(50):
        fault, guilty = choose.choice(_FAULTS), choose.randrange(2)
        with pytest.raises(RankError, match="GradientsNotFiniteError"):
            ranks.run(f"train({fault!r}, guilty={guilty}, {options})", timeout_s=20)
        assert printed(ranks, "same(kept, state())") == ["True", "True"], (number, fault)


def test_everything_is_restored_50_of_50(ranks):
    # In half of the runs the notebook interrupts the slowed repetition at a random moment.
    ranks.run(_SLOW)
    choose = random.Random(1)
    stopped = 0
    for number in range(50):
        fault, guilty, is_stopped = choose.choice(("log", "code", "sqrt")), choose.randrange(2), number % 2
        ranks.run(f"search.kinds_in = slow if {is_stopped} else kinds_in; calls = 0")
        job = ranks.submit(f"train({fault!r}, guilty={guilty})")
        if is_stopped:
            time.sleep(choose.uniform(0.3, 1.0))
            ranks.interrupt()
        wait_until(lambda job=job: job.state in ("failed", "cancelled"), 30)
        ranks.run("search.kinds_in = kinds_in")
        if is_stopped:
            its = int(printed(ranks, "calls")[guilty])
            stopped += its > 0
            if not its:  # interrupted before the repetition
                continue
        assert printed(ranks, f"rank != {guilty} or same(kept, state())") == ["True", "True"], (number, fault)
        assert printed(ranks, "torch.nn.Module.__call__.__qualname__") == ["Module._wrapped_call_impl"] * 2
    print("repetitions interrupted:", stopped)
    assert stopped >= 10


def test_60_right_programs_run_on(ranks):
    programs = [(m, o, s) for m in _MODELS for o in _OPTIMIZERS for s in _STYLES]
    assert len(programs) == 60
    for model, optimizer, style in programs:
        assert ranks.run(_RIGHT.format(model=model, optimizer=optimizer, style=style)).ok, (model, optimizer, style)
        assert not ranks.recording.first_nan().is_found, (model, optimizer, style)


def test_64_ranks_and_1000_steps_take_half_a_second():
    run = recorded(64, 1000, nan={(600, 5): [1], **from_on(601, 64, 1000)}, losses={})
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        found = run.first_nan()
        times.append(time.perf_counter() - begin)
    assert (found.step, found.ranks) == (600, (5,))
    assert min(times) <= 0.5, times


def test_checks_take_at_most_2_ms_of_a_step_of_100_ms(ranks):
    # The time in the checks themselves: differences of whole steps vary by more than 2 ms.
    ranks.run("""
import time
from ddp_notebook.rank.record.nan.catcher import NanCatcher
from ddp_notebook.rank.record.nan.checked_calls import CheckedCalls
from ddp_notebook.rank.record.nan.last_forward import KeptForward, LastForwards
spent = 0.0
def timed(kind, name):
    original = getattr(kind, name)
    def call(*args):
        global spent
        begin = time.thread_time()
        try:
            return original(*args)
        finally:
            spent += time.thread_time() - begin
    setattr(kind, name, call)
    return lambda: setattr(kind, name, original)
undo = [timed(*one) for one in (
    (CheckedCalls, "look"), (NanCatcher, "_before_step"), (LastForwards, "_keep"), (KeptForward, "note_outputs"))]
""")
    result = ranks.run(
        """
torch.manual_seed(0)
big = DDP(nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]))
small = torch.optim.SGD(big.parameters(), lr=0.001)
spent, begin = 0.0, time.thread_time()
for step in range(30):
    small.zero_grad()
    big(torch.randn(768, 512)).square().mean().backward()
    small.step()
print(spent / 30 * 1000, (time.thread_time() - begin) / 30 * 1000)
for one in undo:
    one()
""",
        quiet=True,
    )
    for rank in (0, 1):
        checks, step = map(float, result[rank].stdout.split())
        print(f"rank {rank}: {checks:.2f} ms of a step of {step:.1f} ms")
        assert 0 < checks <= max(2.0, 0.02 * step)
