"""Training that continues after the death of a rank: the result is the same as without a death, to the last bit."""

from __future__ import annotations

import ast
import os
import random
import re
import signal
import threading
import time
from contextlib import contextmanager

import pytest

import ddp_notebook
from ddp_notebook.errors import JobCancelledError, RankDiedError, RankError, UsageError
from tests.conftest import wait_until

SETUP = """
import ddp_notebook, os, pathlib, signal, time
torch.manual_seed(0)
layers = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4)
net = torch.nn.Sequential(*layers)
model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.0003)  # two buckets from step 1 on
optimizer = torch.optim.Adam(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
sampler = torch.utils.data.DistributedSampler(data, world_size, rank)
loader = torch.utils.data.DataLoader(data, 4, sampler=sampler)
losses, mine = [], rank * 100
_ = torch.manual_seed(rank)
def train(loss_of=torch.nn.functional.cross_entropy):
    inputs, targets = step.batch
    loss = loss_of(model(inputs), targets)
    loss.backward()
    optimizer.step(); scheduler.step()
    losses.append(loss.item() + mine)
def die_once(flag):
    if not os.path.exists(flag):
        pathlib.Path(flag).touch(); os.kill(os.getpid(), signal.SIGKILL)
"""
LOOP = """
before = "kept"
for step in ddp_notebook.survive(model, optimizer, scheduler, loader, losses, steps={steps}):
    with step:
        {first}
        train()
        {last}
print(len(losses), before)
"""
STATE = """
tensors = [*model.parameters(), *model.buffers(), *(v for s in optimizer.state.values() for v in s.values())]
[float(t.double().sum()).hex() for t in tensors], losses, scheduler.last_epoch, torch.rand(1).item()
"""


def run(session, steps: int, first: str = "pass", last: str = "pass", *, quiet: bool = True) -> list[str]:
    """Run a training and return its final state on each rank."""
    session.run(SETUP, quiet=True)
    session.run(LOOP.format(steps=steps, first=first, last=last), quiet=quiet, timeout_s=240)
    result = session.run(STATE, quiet=True)
    return [result[rank].result for rank in result.ranks]


@pytest.fixture(scope="module")
def undisturbed(session) -> list[str]:
    return run(session, 20)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("where", ["first", "last"])
def test_a_rank_that_dies_in_a_step(session, undisturbed, tmp_path, capsys, victim, where):
    """At the beginning of the step no rank has done it. At its end other ranks may have begun the next step."""
    others = [pid for rank, pid in enumerate(session.ranks.pids()) if rank != victim]
    die = f"if int(step) == 11 and rank == {victim}: die_once({str(tmp_path / 'died')!r})"
    assert run(session, 20, **{where: die}, quiet=False) == undisturbed
    said = capsys.readouterr()
    assert re.search(
        rf"rank {victim} died \(killed by SIGKILL\) and was replaced in \d\.\d s: all ranks repeat step 11",
        said.err,
    ), said
    assert "[0-1] 20 kept" in said.out
    assert [pid for rank, pid in enumerate(session.ranks.pids()) if rank != victim] == others
    assert session.run("x = torch.ones(1); dist.all_reduce(x); int(x)")[victim].result == "2"


def test_with_a_fault_that_is_asked_for(session, undisturbed):
    session.run(SETUP, quiet=True)
    before = session.ranks.pids()
    session.ranks.fault("kill", 1, after_s=0.2)
    session.run(LOOP.format(steps=20, first="time.sleep(0.02)", last="pass"), quiet=True, timeout_s=60)
    result = session.run(STATE, quiet=True)
    assert [result[rank].result for rank in (0, 1)] == undisturbed
    assert session.ranks.pids()[0] == before[0] and session.ranks.pids()[1] != before[1]


IN_A_FUNCTION = """
def run(steps):
    torch.manual_seed(1)
    local = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    its = torch.optim.SGD(local.parameters(), 0.1, momentum=0.9)
    for n in (0, 1):
        for step in ddp_notebook.survive(local, its, steps=steps):
            with step:
                if n == 1 and int(step) == 2 and rank == 1 and kill: die_once(flag)
                local(torch.full((2, 3), 1.0 + rank + int(step))).sum().backward()
                its.step()
    return [float(p.sum()).hex() for p in local.parameters()]
"""


def test_a_loop_in_a_function_and_a_second_loop_survive(session, tmp_path):
    session.run(SETUP, quiet=True)
    session.run(f"{IN_A_FUNCTION}\nflag, kill = {str(tmp_path / 'died')!r}, False\nfound = run(5)")
    wanted = session.run("found")[0].result
    session.run("found = 'lost'\nkill = True\nfound = run(5)\n1 if rank else found")
    result = session.run("found")
    assert (tmp_path / "died").exists()
    assert result[0].result == result[1].result == wanted


def test_a_model_that_was_trained_before(session, tmp_path):
    """torch records the buckets of a reducer only in its first ten steps, and then in every hundredth."""
    session.run(SETUP, quiet=True)
    session.run(LOOP.format(steps=15, first="pass", last="pass"), quiet=True, timeout_s=60)
    die = f"if int(step) == 3 and rank == 1: die_once({str(tmp_path / 'died')!r})"
    session.run(LOOP.format(steps=8, first=die, last="pass"), quiet=True, timeout_s=60)
    session.run("x = torch.ones(1); dist.all_reduce(x)", quiet=True, timeout_s=20)
    asked = "model._has_rebuilt_buckets, model._get_ddp_logging_data()['rebuilt_per_bucket_param_indices']"
    result = session.run(asked, quiet=True)
    assert result[0].result == result[1].result and "5 4 2, 3 1 0" in result[0].result, result


def test_an_error_of_the_users_ends_the_cell(session):
    session.run(SETUP, quiet=True)
    with pytest.raises(RankError, match=r"ValueError: no \(rank 1\)"):
        session.run(
            LOOP.format(steps=9, first="if rank and int(step) == 3: raise ValueError('no')", last=""), timeout_s=20
        )
    assert session.run("len(losses)")[1].result == "3"


def test_a_death_outside_of_the_loop_ends_the_cell(session):
    session.run(SETUP, quiet=True)
    with pytest.raises(RankDiedError):
        session.run(
            LOOP.format(steps=3, first="pass", last="pass") + "if rank: os._exit(3)\ndist.barrier()", timeout_s=20
        )
    session.ranks.heal()


def test_bytes_that_another_process_has_sent_are_not_read(session):
    """Rank 0 acts as a process that has taken its place in gloo but does not know the key of the ring."""
    code = """
from ddp_notebook.rank.survive import survival
ring = survival.current().make_ring()
to = 1 - rank
assert ring.pass_on(b"of rank %d" % rank) == b"of rank %d" % to
if rank == 0:
    ring.send(to, b"genuine"); ring._key = bytes(32); ring.send(to, b"forged")
else:
    print(ring.receive(to))
    try:
        ring.receive(to)
    except RuntimeError as error:
        print(error)
"""
    first, second = session.run(code, timeout_s=30)[1].stdout.splitlines()
    assert first == "b'genuine'" and "data expected from rank 0 did not come from this session" in second


def test_the_stop_button(session):
    session.run(SETUP, quiet=True)
    running = session.submit(LOOP.format(steps=2000, first="time.sleep(0.005)", last="pass"), quiet=True)
    wait_until(lambda: len(session._parts.hooks.features["survive"]._loops) == 2)
    assert session.interrupt()[0] == f"job {running.number} was ended on ranks 0,1; all variables are kept"
    with pytest.raises(JobCancelledError):
        running.result(20)
    assert int(session.run("len(losses)")[0].result) < 2000
    assert session.run("x = torch.ones(1); dist.all_reduce(x); int(x)")[0].result == "2"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("model, steps=3", "survive() needs the optimizer"),
        ("optimizer, steps=3", "survive() needs the model whose parameters Adam updates"),
        ("model, optimizer, steps=-1", "steps must be an integer of at least 0, got -1"),
        ("model, optimizer, loader, sampler, steps=3", "takes one loader or sampler for the batches, got 2"),
        ("model, optimizer, object(), steps=3", "survive() cannot restore a object"),
        ("model, optimizer, steps=3, on_loss='wait'", 'on_loss must be "replace" or "shrink", got \'wait\''),
    ],
)
def test_what_cannot_be(session, arguments, words):
    session.run(SETUP, quiet=True)
    with pytest.raises(RankError, match=re.escape(words)):
        session.run(f"for step in ddp_notebook.survive({arguments}): pass", quiet=True)


def test_a_cell_that_does_not_run_on_all_ranks(session):
    """After a death a cell runs on the remaining ranks. The loop would wait for the missing rank without end."""
    session.run(SETUP, quiet=True)
    words = "survive() needs all 2 ranks, but this cell does not run on rank 1; %ddp_heal replaces dead ranks"
    with pytest.raises(RankError, match=re.escape(words)):
        session.run("for step in ddp_notebook.survive(model, optimizer, steps=3): pass", ranks="0", timeout_s=20)


def test_a_body_without_with(session):
    session.run(SETUP, quiet=True)
    with pytest.raises(RankError, match="survive\\(\\) needs `with step:` around the body of its loop"):
        session.run("for step in ddp_notebook.survive(model, optimizer, steps=3): pass", quiet=True)


def test_fewer_ranks_are_no_choice_for_what_is_in_shards(session):
    session.run(SETUP, quiet=True)
    session.run("from torch.distributed.device_mesh import init_device_mesh\nmesh = init_device_mesh('cpu', (2,))")
    words = 'survive(on_loss="shrink") cannot go on with fewer ranks: mesh is a device mesh; use the default, '
    with pytest.raises(RankError, match=re.escape(words)):
        session.run("for step in ddp_notebook.survive(model, optimizer, steps=3, on_loss='shrink'): pass", quiet=True)
    session.run("del mesh")


def test_outside_of_ranks():
    with pytest.raises(UsageError, match=r"survive\(\) must run on ranks: put the loop into a cell with"):
        ddp_notebook.survive(steps=3)


def test_what_cannot_be_copied_is_said(session, capsys):
    session.run(SETUP + "\nlock = __import__('threading').Lock()", quiet=True)
    session.run(LOOP.format(steps=1, first="lock", last="pass"))
    assert "survive: a replaced rank will not have 'lock': a lock cannot be pickled" in capsys.readouterr().err


SHRINK = """
import ddp_notebook, os, pathlib, signal
was, rows, sizes = rank, [], []
data = torch.utils.data.TensorDataset(torch.arange(24.0)[:, None])
sampler = torch.utils.data.DistributedSampler(data, world_size, rank, shuffle=False)
loader = torch.utils.data.DataLoader(data, 2, sampler=sampler)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-4)
for step in ddp_notebook.survive(model, optimizer, {source}, rows, steps=5, on_loss="shrink"):
    with step:
        if int(step) == 2:
            pathlib.Path({folder!r}, str(was)).touch()
            while was in {victims}:  # the others are to do this step again, and not the one before
                if len(os.listdir({folder!r})) == 3: os.kill(os.getpid(), signal.SIGKILL)
        [inputs] = step.batch
        model(inputs).sum().backward()
        optimizer.step()
        rows.append([int(one) for one in inputs])
        sizes.append(world_size)
after = torch.ones(1)
dist.all_reduce(after)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_training_goes_on_with_fewer_ranks(make_session_alone, capsys, tmp_path, victim):
    session = make_session_alone(3)
    pids = session.ranks.pids()

    session.run(SHRINK.format(source="loader", victims=[victim], folder=str(tmp_path)), timeout_s=60)

    said = capsys.readouterr()
    again = r"2 ranks instead of 3 \(now (rank \d is rank \d[,)] ?)+repeat step 2"
    assert re.search(rf"rank {victim} died \(killed by SIGKILL\) and left in \d\.\d s: {again}", said.err), said
    assert "[0] survive: loader goes over 2 ranks now: with batches of 2 a step has 4 samples instead of 6" in said.err
    stayed = [rank for rank in range(3) if rank != victim]
    assert session.ranks.pids() == [pids[rank] for rank in stayed] and session.world_size == 2
    names = "was, rank, world_size, sampler.num_replicas, int(after), sizes, model.module.weight.item(), rows"
    result = session.run(names, quiet=True)
    first, second = (ast.literal_eval(result[rank].result) for rank in (0, 1))
    assert [first[0], second[0]] == stayed and [first[1], second[1]] == [0, 1]
    assert first[2:7] == second[2:7] and first[2:6] == (2, 2, 2, [3, 3, 2, 2, 2])
    # Two steps of three ranks have had 12 of the 24 samples. Each other sample is used once, also those of the dead
    # rank.
    assert sorted(sample for batch in first[7][2:] + second[7][2:] for sample in batch) == list(range(12, 24))


HALF_SENT = """
import ddp_notebook, os, pathlib, psutil, signal, threading, time
from ddp_notebook.rank.group.connections import stuck_waits
values, errors, stopped = [], [], pathlib.Path({folder!r}, "pid")
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
message = torch.ones(2**23)  # 32 MB: more than a connection holds
def wait_until(condition):
    until = time.monotonic() + 30
    while not condition() and time.monotonic() < until: time.sleep(0.01)
def kill_receiver():
    wait_until(lambda: list(stuck_waits._waits(stuck_waits._gloo()[0])))
    os.kill(int(stopped.read_text()), signal.SIGKILL)
for step in ddp_notebook.survive(model, optimizer, values, steps=3):
    with step:
        if int(step) == 1 and not errors and rank == 0:
            wait_until(lambda: stopped.exists() and psutil.Process(int(stopped.read_text())).status() == "stopped")
            threading.Thread(target=kill_receiver).start()
            try:
                dist.send(message, 1)
            except RuntimeError as error:
                errors.append(str(error))
                raise
        if int(step) == 1 and rank == 1 and not stopped.exists():
            work = dist.irecv(message, 0)
            stopped.with_suffix(".new").write_text(str(os.getpid()))
            os.rename(stopped.with_suffix(".new"), stopped)
            os.kill(os.getpid(), signal.SIGSTOP)
        values.append(int(step))
values, errors
"""


@pytest.mark.long
def test_a_rank_dies_that_has_half_of_a_message(make_session_alone, tmp_path):
    """gloo does not end that send. The package cuts the connection, and its error counts as the loss of a rank."""
    session = make_session_alone(2)
    result = session.run(HALF_SENT.format(folder=str(tmp_path)), timeout_s=60, quiet=True)
    assert ast.literal_eval(result[0].result) == ([0, 1, 2], ["this operation was aborted to end the cell"])


@pytest.mark.long
def test_one_rank_is_left_of_three(make_session_alone, capsys, tmp_path):
    session = make_session_alone(3)
    code = SHRINK.format(source="sampler", victims=[0, 2], folder=str(tmp_path))
    session.run(code.replace("= step.batch", "= data[step.batch]"), timeout_s=60)
    said = capsys.readouterr().err
    assert re.search(r"1 rank instead of [23] (\(now rank 1 is rank 0\) )?repeats step 2", said), said
    assert "loader goes over 1 rank now: with batches of 2 a step has 2 samples instead of 6" in said
    # the rows of the sampler
    assert "a step has 1/3 of its earlier samples, if the batch size of each rank stays the same" in said
    result = session.run("was, len(rows), sizes[-1], int(after)", quiet=True)
    assert result.ranks == [0] and result[0].result == "(1, 5, 1, 1)"
    assert session.ranks.resize(2)[0] == "2 ranks now: rank 1 is new"


@contextmanager
def killing(session, kills: int, steps: int, seed: int, *, comers: bool = False):
    """Kill ranks at random moments of that many steps, each while it can be replaced.

    Args:
        comers: Whether to kill new processes too, at any moment before they are in the loop.
    """
    rng, over, killed = random.Random(seed), threading.Event(), []
    survival = session._parts.hooks.features["survive"]

    def can_be_replaced() -> bool:
        size = session.world_size
        return len(survival._loops) == size == len(session.ranks.pids()) and not survival._stalled

    def kill() -> None:
        for _ in range(kills):
            if over.wait(rng.uniform(0.0, 2 * steps * 0.01 / kills)):
                return
            while not can_be_replaced():
                if over.wait(0.002):
                    return
            rank = rng.randrange(session.world_size)
            strike(rank)
            for _ in range(rng.randrange(1, 4) if comers else 0):
                if over.wait(rng.choice([0.0, 0.02, 0.1]) * rng.random()):
                    return
                if can_be_replaced():
                    break  # the new rank is in the loop
                strike(rank)

    def strike(rank: int) -> None:
        victim = session.ranks.pids()[rank]
        os.kill(victim, signal.SIGKILL)
        killed.append(rank)
        while victim in session.ranks.pids() or len(session.ranks.pids()) < session.world_size:
            if over.wait(0.001):
                return

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "comers"), [(2, False), (3, False), (2, True), (3, True)])
def test_fifty_kills_at_random_moments_of_500_steps(make_session_alone, ranks, comers):
    session = make_session_alone(ranks)
    wanted = run(session, 500)
    for seed in range(2):
        began = time.monotonic()
        with killing(session, 50, 500, seed, comers=comers) as killed:
            found = run(session, 500, first="time.sleep(0.01)", quiet=False)
        print(f"{len(killed)} kills, {time.monotonic() - began:.1f} s")
        assert len(killed) >= 50
        assert found == wanted
