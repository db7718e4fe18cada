"""`%%ddp_twice`: a cell runs twice from the same state, and leaves the state of one run."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest

from ddp_notebook.errors import RankError, UsageError
from ddp_notebook.observe.tables.matching import label_of
from ddp_notebook.run.twice.twice import TwiceResult, _check
from ddp_notebook.run.twice.twice import run_twice as run_in_session

STATE = """
import hashlib, os, random
import numpy as np
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(rank)
body = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Dropout(0.2), nn.Linear(30, 20))
body[3].weight = nn.Parameter(body[0].weight.detach().clone().T.contiguous().T.clone().T.contiguous())
model = DDP(body, bucket_cap_mb=0.001)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
history, view, generator = [], body[0].weight.data[:2], torch.Generator().manual_seed(rank)
array = np.zeros(3)

def bits(value):
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else value.item()
    if isinstance(value, dict):
        return [(str(key), bits(one)) for key, one in value.items()]
    return [bits(one) for one in value] if isinstance(value, (list, tuple)) else value

def state():
    gradients = [p.grad for p in model.parameters()]
    own = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), history, gradients, view]
    numbers = [torch.get_rng_state(), random.getstate(), generator.get_state(), array.tobytes()]
    return hashlib.sha1(repr(bits([own, numbers])).encode()).hexdigest()
"""
TRAIN = """
for step in range(6):
    x = torch.randn(16, 20, generator=generator) {noise}
    random.random(); array += 1
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    {before}
    optimizer.step(); scheduler.step(); history.append(loss.item())
"""
PLAIN = TRAIN.format(noise="", before="")


def run_twice(session, code: str) -> TwiceResult:
    return run_in_session(session._parts, session._run_in_slot, code)


def states(session) -> list[str]:
    return [text for _, text in sorted(session.peek("state()").items())]


def test_a_deterministic_cell_leaves_what_one_run_leaves(session):
    session.run(STATE, quiet=True)
    session.run(PLAIN, quiet=True)
    once = states(session)
    session.run(STATE, quiet=True)
    session.run("random.seed(0)", quiet=True)
    before = states(session)
    found = run_twice(session, PLAIN)
    assert found.is_deterministic and found.steps == 6
    assert found.counts == {"batch": 12, "local gradient": 72, "gradient": 72, "parameter": 72}
    after = states(session)
    session.run(STATE, quiet=True)
    session.run("random.seed(0)", quiet=True)
    assert states(session) == before
    session.run(PLAIN, quiet=True)
    assert states(session) == after != once
    shares = "view.data_ptr() == body[0].weight.data_ptr() and set(optimizer.state) == set(model.parameters())"
    assert set(session.peek(shares).values()) == {"True"}


def test_the_first_differing_tensor_is_named(session):
    session.run(STATE, quiet=True)
    noise = "+ int.from_bytes(os.urandom(2), 'little') * (rank == 1 and step == 2)"
    batch = run_twice(session, TRAIN.format(noise=noise, before=""))
    assert batch.first is not None and batch.first[:2] == (2, "batch") and batch.first[3] == (1,)
    hook = "handle = body[0].bias.register_hook(lambda g: g + int.from_bytes(os.urandom(2), 'little') * (rank == 0))"
    local = run_twice(session, f"{hook}\n{PLAIN}\nhandle.remove()")
    assert local.first is not None and local.first[:2] in ((0, "local gradient"), (0, "gradient"))
    before = "body[0].bias.grad.add_(int.from_bytes(os.urandom(2), 'little') * (step == 3))"
    average = run_twice(session, TRAIN.format(noise="", before=before))
    assert average.first is not None and average.first[:3] == (3, "gradient", "module.0.bias")
    assert "so the average, or code after it, differs" in str(average)
    assert "Files are not restored between the two runs." in str(average)


def test_a_failed_cell_leaves_the_state_before(session):
    session.run(STATE, quiet=True)
    session.run(PLAIN, quiet=True)
    before = states(session)
    with pytest.raises(RankError, match="ZeroDivisionError"):
        run_twice(session, TRAIN.format(noise="", before="1 / (step < 3 or rank == 0)"))
    assert states(session) == before
    assert run_twice(session, PLAIN).is_deterministic


def test_what_cannot_be_restored_is_refused_before_the_first_run(session):
    session.run("numbers = (n for n in range(3)); file = open('/dev/null'); ran = []\ndef read(): return file.read()")
    for code in ("ran.append(1); next(numbers)", "ran.append(1); read()"):
        with pytest.raises(UsageError, match=r"cannot run twice from the same state: it reads (numbers|file) "):
            run_twice(session, code)
    assert set(session.peek("ran").values()) == {"[]"}
    found = run_twice(session, "ran.append(1)")
    assert "Not restored, and not read by the cell: " in str(found) and "file (a TextIOWrapper)" in str(found)
    assert set(session.peek("ran").values()) == {"[1]"}
    session.run("del numbers, file, read")


class OneHost:
    names_of_machines: tuple[str, ...] = ()


def facts_of(nbytes: int, **free: int) -> dict[str, object]:
    return {"nbytes": nbytes, "free": free, "refused": {}, "left": {}}


def test_copies_that_do_not_fit_are_refused():
    facts = {rank: facts_of(6 * 10**9, host=10**10) for rank in (0, 1)}
    with pytest.raises(UsageError, match=r"of ranks 0,1 needs 12 GB, but only 10 GB of memory are free \(host\)"):
        _check(facts, OneHost())
    assert _check({0: facts[0]}, OneHost()) == ()


def test_limits_of_cgroups_and_processes_are_checked():
    shared = {rank: facts_of(6 * 10**9, host=10**11, cgroup=10**10) for rank in (0, 1)}
    with pytest.raises(UsageError, match=r"of ranks 0,1 needs 12 GB, but only 10 GB of memory are free \(cgroup\)"):
        _check(shared, OneHost())
    apart = {rank: facts_of(6 * 10**9, host=10**11, **{f"cgroup of {rank}": 10**10}) for rank in (0, 1)}
    assert _check(apart, OneHost()) == ()
    own = {rank: facts_of(6 * 10**9, **{"data, RLIMIT_DATA": left}) for rank, left in ((0, 10**10), (1, 5 * 10**9))}
    with pytest.raises(UsageError, match=r"of rank 1 needs 6.0 GB, but only 5.0 GB of memory are free \(data, RLIMIT"):
        _check(own, OneHost())


def test_a_rank_near_its_own_limit_is_refused(session):
    session.run(
        "import resource; ran, large = [], torch.zeros(60_000_000); limits = resource.getrlimit(resource.RLIMIT_AS)"
    )
    lower = """
used = int(next(one for one in open("/proc/self/status") if one.startswith("VmSize")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), limits[1])) if rank == 1 else None
"""
    session.run(lower)
    with pytest.raises(
        UsageError, match=r"of rank 1 needs 2\d\d MB, but only .* are free \(address space, RLIMIT_AS\)"
    ):
        run_twice(session, "ran.append(1)")
    session.run("resource.setrlimit(resource.RLIMIT_AS, limits); assert ran == []; del large")


def test_a_job_that_starts_in_the_meantime_waits_for_both_runs(session):
    session.run("seen, number = [], 0")
    started = threading.Timer(0.3, lambda: session.submit("number += 100; seen.append(number)", quiet=True))
    started.start()
    run_twice(session, "import time; number += 1; time.sleep(0.5)")
    started.join()
    session.jobs.wait()
    assert set(session.peek("number, seen").values()) == {"(101, [101])"}


# ---- further kinds of models and tensors

_STATE_OF = """
def state():
    own = [model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()], torch.get_rng_state()]
    return hashlib.sha1(repr(octets(own)).encode()).hexdigest()

def octets(value):
    if isinstance(value, torch.Tensor):
        value = value.to_local() if hasattr(value, "to_local") else value
        if torch.nn.parameter.is_lazy(value):
            return "lazy"
        value = value.detach().coalesce() if value.is_sparse else value.detach()
        if value.is_sparse:
            return [octets(value.indices()), octets(value.values())]
        return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return [(str(key), octets(one)) for key, one in value.items()]
    return [octets(one) for one in value] if isinstance(value, (list, tuple)) else value

def step():
    x = torch.randint(0, 20, (16,)) if kind == "sparse" else torch.randn(16, 20)
    out = model(x).square().mean()
    out.backward()
    if kind in ("sparse", "lazy"):
        for p in model.parameters():
            dense = p.grad.to_dense() if p.grad.is_sparse else p.grad
            dist.all_reduce(dense)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    model(x).square().mean().backward()

import hashlib
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(rank)
"""
_MODELS = {
    "fsdp2": """
model = nn.Sequential(nn.Linear(20, 30), nn.Dropout(0.2), nn.ReLU(), nn.Linear(30, 20))
for layer in (model[0], model[3]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters())
""",
    "compiled": """
body = nn.Sequential(nn.Linear(20, 30), nn.Dropout(0.2), nn.ReLU(), nn.Linear(30, 20))
model = torch.compile(DDP(body), backend="aot_eager")
optimizer = torch.optim.Adam(model.parameters())
""",
    "sparse": """
model = nn.Sequential(nn.Embedding(20, 8, sparse=True))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
    "lazy": """
model = nn.Sequential(nn.LazyLinear(30), nn.ReLU(), nn.LazyLinear(4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
}


@pytest.mark.parametrize("kind", _MODELS)
@pytest.mark.parametrize("warm", [0, 2])
def test_further_models_are_restored(session, kind, warm):
    session.run(f"kind = {kind!r}\n{_STATE_OF}\n{_MODELS[kind]}\nfor _ in range({warm}): step()", quiet=True)
    before = states(session)
    with pytest.raises(RankError, match="ZeroDivisionError"):
        run_twice(session, "for _ in range(3): step()\n1 / 0")
    assert states(session) == before
    found = run_twice(session, "for _ in range(3): step()")
    assert found.is_deterministic, found
    assert states(session) != before
    assert session.run("step()", quiet=True).ok


def test_a_cell_without_tensors_is_no_evidence():
    nothing = TwiceResult(is_deterministic=True, steps=0, counts={}, first=None, notes=())
    assert nothing.sentence == "No tensor was compared: the cell ran no model and no optimizer step"


@pytest.mark.long
def test_50_stops_at_random_moments_leave_the_state_before(session):
    """Each of the 50 stops strikes within the command. Only after both runs the state is that of one run."""
    slow = TRAIN.format(noise="", before="import time; time.sleep(0.02)")
    reset = f"{STATE}\nrandom.seed(0)"
    session.run(reset, quiet=True)
    before = states(session)
    began = time.monotonic()
    run_twice(session, slow)
    lasts_s, after = time.monotonic() - began, states(session)
    assert after != before
    session.run(reset, quiet=True)
    draw, stopped, late = random.Random(0), 0, 0
    while stopped < 50:
        is_over = threading.Event()
        press = threading.Timer(draw.uniform(0.01, lasts_s), press_stop, [is_over])
        press.start()
        try:
            run_twice(session, slow)
            is_over.set()
            found = [after]
        except KeyboardInterrupt:
            stopped += 1
            found = [before, after]
        press.join()
        now = states(session)
        assert now in found, (stopped, now == before)
        late += now == after
        if now == after:
            session.run(reset, quiet=True)
    print(f"50 stops, of {50 + late} commands; {late} ended or were stopped after both runs")
    assert late < 40


def press_stop(is_over: threading.Event) -> None:
    if not is_over.is_set():
        os.kill(os.getpid(), signal.SIGINT)


def test_recordings_name_both_runs(session):
    session.run(STATE, quiet=True)
    run_twice(session, PLAIN)
    recording = session.recording
    first, second = sorted(recording.prompts)[-2:]
    prompt = label_of(recording, first).partition(" (")[0]
    assert prompt.startswith("In [")
    assert label_of(recording, second).startswith(f"{prompt}, second run")
    assert recording.first_nan().sentence.startswith(f"{prompt}, second run")
