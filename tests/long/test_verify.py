"""Right programs, random faults and random stops under `%ddp_verify`."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest

from ddp_notebook.errors import UsageError
from tests.conftest import wait_until
from tests.verify_programs import FAULTS, LOSS, MORE_COUNTED, REFUSED, RIGHT, SETUP, STATE, steps_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
_BATCH = ["x", "y"]


def test_right_programs_have_no_finding(session):
    found = {}
    for number, (code, loss, options) in enumerate(RIGHT):
        session.run(SETUP + code, quiet=True)
        result = session.verify(loss, _BATCH, **options)
        if not result.is_right:
            found[number, code, loss] = repr(result)
    assert len(RIGHT) >= 60 and found == {}


def expected(cause: str, code: str, rank: int, parameter: str) -> tuple[tuple[str, ...] | None, tuple[int, ...]]:
    """Return the parameters (None: not checked) and the ranks that a finding about a fault has to name.

    Two ranks with different values are both possible culprits: the finding names the one that differs from rank 0.
    """
    if "parted" in code and cause == "weights":
        return ("1.weight",), (1,)
    if cause == "outside":
        return ("head.bias", "head.weight") if "head" in code else ("3.bias", "3.weight"), ()
    if cause == "no_gradient":
        return tuple(f"b.{name}" for name in ("0.bias", "0.weight", "3.bias", "3.weight")), (1 - rank,)
    of_parameter = cause in ("ignored", "late", "clipped", "unmanaged", "weights") and "<P>" in code
    ranks = (1,) if cause in ("weights", "other_batch") else ()
    return (parameter,) if of_parameter else None, ranks


def test_faults_have_the_right_cause(session):
    chosen = random.Random(7)
    # Each fault at least once; 14 of them in FSDP2 and tensor parallel.
    sharded, wrapped = FAULTS["sharded"], FAULTS["ddp"]
    cases = [
        *sharded,
        *chosen.choices(sharded, k=14 - len(sharded)),
        *wrapped,
        *chosen.choices(wrapped, k=26 - len(wrapped)),
    ]
    noticed, unnamed, wrong = 0, {}, {}
    for number, (cause, code, loss) in enumerate(cases):
        rank, parameter = chosen.randrange(2), chosen.choice(["0.weight", "0.bias", "3.weight", "3.bias"])
        session.run(SETUP + code.replace("<R>", str(rank)).replace("<P>", parameter), quiet=True)
        result = session.verify(loss, _BATCH)
        noticed += not result.is_right
        first = result.findings[0] if result.findings else None
        if first is None or first.cause == "unknown":
            unnamed[number, cause, code] = repr(result)
            continue
        parameters, ranks = expected(cause, code, rank, parameter)
        named = [name for name in parameters or () if name in first.sentence or "more" in first.sentence]
        is_named = parameters is None or (first.parameters == parameters and named == list(parameters))
        if first.cause != cause or not is_named or first.ranks != ranks:
            wrong[number, cause, code, rank, parameter] = first
        if ranks:
            assert all(f"rank {one}" in first.sentence for one in ranks), first.sentence
        if cause == "unequal":
            assert "Rank 0 has {} samples and rank 1 has {},".format(*[5, 8][:: 1 - 2 * rank]) in first.sentence
    print(f"{len(cases)} faults: {noticed} noticed, {len(cases) - len(unnamed) - len(wrong)} named, {len(wrong)} wrong")
    assert len(cases) == 40 and noticed == 40 and wrong == {} and len(unnamed) <= 4


@pytest.mark.parametrize(("code", "loss", "words"), REFUSED[4:])
def test_more_refused_steps_change_nothing(session, code, loss, words):
    session.run(f"{SETUP}{code}\ncounter = [1]\n{STATE}", quiet=True)
    before = session.run("digest()", quiet=True)
    with pytest.raises(UsageError, match=words):
        session.verify(loss, _BATCH)
    after = session.run("digest()", quiet=True)
    assert [after[rank].result for rank in (0, 1)] == [before[rank].result for rank in (0, 1)]


@pytest.mark.parametrize("model", ["DDP(net(norm=True))", "sharded()", "FSDP1"])
def test_a_stopped_comparison_restores_everything(session, model, tmp_path):
    """Stop 25 comparisons at a random moment after a random forward call. Each counted stop has struck."""
    chosen, calls = random.Random(11), tmp_path / "calls"
    if model == "FSDP1":
        model = "FullyShardedDataParallel(net(), device_id=torch.device('cpu'))"
    code = "from torch.distributed.fsdp import FullyShardedDataParallel\n" + SETUP
    code += f"model = {model}\ncounter = [1]\n{LOSS}.backward()\nopt = torch.optim.SGD(model.parameters(), 0.1)\n"
    # Each forward call of rank 0 adds a byte to a file, and takes long enough for a stop in each of its runs.
    slow = f"""
def note(*_):
    if dist_rank == 0:
        with open({str(calls)!r}, "ab") as file:
            file.write(b".")
    __import__("time").sleep(0.02)
dist_rank = rank
model.register_forward_hook(note)
"""
    session.run(code + slow + STATE, quiet=True)
    loss = f"(counter.append(1), {LOSS})[1]"
    session.verify(loss, _BATCH)
    in_one, stopped, changed = calls.stat().st_size, 0, []

    def stop(after: int, delay_s: float) -> None:
        wait_until(lambda: calls.stat().st_size >= after or done.is_set(), 30.0)
        if not done.wait(delay_s):
            os.kill(os.getpid(), signal.SIGINT)

    for number in range(60):
        before = session.run("digest()", quiet=True)
        done = threading.Event()
        calls.write_bytes(b"")
        stopper = threading.Thread(target=stop, args=(chosen.randint(1, in_one), chosen.random() * 0.03))
        try:
            stopper.start()
            session.verify(loss, _BATCH)
            done.set()
            stopper.join()
            time.sleep(0.01)  # for a stop that came at the very end
        except KeyboardInterrupt:
            stopped += 1
        done.set()
        stopper.join()
        after = session.run("digest()", quiet=True, timeout_s=30)
        if any(before[rank].result != after[rank].result for rank in (0, 1)):
            changed.append(number)
        session.run(f"opt.zero_grad(); {LOSS}.backward(); opt.step()", quiet=True, timeout_s=30)
        if stopped == 25:
            break
    print(f"{stopped} stops in {number + 1} comparisons, {len(changed)} not restored")
    assert changed == [] and stopped == 25


WAVES = """
import ctypes, gc, resource
ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: the allocator returns large tensors to the system at once
class Waves(nn.Module):  # needs much memory, and little time
    def __init__(self):
        super().__init__(); self.first, self.last = nn.Linear(4, 64), nn.Linear(64, 4)
    def forward(self, x):
        x = self.first(x)
        for _ in range(40): x = torch.sin(x * 1.01)
        return self.last(x)
torch.manual_seed(0)
model = DDP(Waves())
torch.manual_seed(10 + rank)
x, y = torch.randn(15_000, 4), torch.randint(0, 4, (15_000,))
def limit(nbytes):
    gc.collect()
    with open("/proc/self/status") as file:
        used = int(next(line for line in file if line.startswith("VmSize")).split()[1]) * 1024
    limit = used + nbytes if nbytes else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
"""


def test_a_batch_that_does_not_fit_is_computed_in_parts(session):
    # A part needs 0.16 GB, and the whole batch 0.4 GB. The limit is far from both, because threads reserve memory too.
    parts = f"{SETUP}{WAVES}{LOSS}.backward()\nlimit(280_000_000)"
    try:
        for loss, cause in (
            (LOSS, None),
            (f"{LOSS} * dist.get_world_size()", "world_size"),
            ("F.cross_entropy(model(x), y, reduction='sum')", "sum"),
        ):
            session.run(parts, quiet=True)
            result = session.verify(loss, _BATCH)
            session.run("limit(0)", quiet=True)
            assert [one.cause for one in result.findings] == ([cause] if cause else [])
            assert "was computed in parts" in repr(result) and " free on rank 0" in repr(result)
        session.run(parts, quiet=True)
        result = session.verify(f"({LOSS} - 1.3) ** 2", _BATCH)
        assert result.is_right and result.whole_loss is None and "neither a mean nor a sum" in repr(result)
        session.run(f"limit(0)\n{SETUP}{WAVES}data = torch.zeros(100_000_000)\nlimit(300_000_000)", quiet=True)
        with pytest.raises(UsageError, match=r"copies of the variables and gradients need about 40\d MB"):
            session.verify(LOSS, _BATCH)
    finally:
        session.run("limit(0); data = None", quiet=True)


def test_steps_of_more_programs(session, tmp_path):
    steps = {program: max(steps_of(session, tmp_path, *program)) for program in MORE_COUNTED}
    print(f"{len(steps)} programs: {sorted(steps.values())} local steps")
    assert {program: count for program, count in steps.items() if not 4 <= count <= 2 * 2 + 2} == {}


def test_runs_are_spread_over_the_ranks(make_session_alone, tmp_path):
    session = make_session_alone(4)
    for loss in (LOSS, f"{LOSS} * dist.get_world_size()"):
        steps = steps_of(session, tmp_path, "model = DDP(net())", loss, 1)
        print(f"{loss}: {steps} local steps")
        assert max(steps[:2]) <= 2 * 4 + 2 and max(steps[2:]) <= 4
