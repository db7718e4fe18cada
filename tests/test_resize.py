"""More or fewer ranks in a session: the ranks that stay keep all their state."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest

from ddp_notebook.errors import RankError, SessionBrokenError, StartError, UsageError
from ddp_notebook.launch import devices
from ddp_notebook.launch.environment import threads_per_rank
from ddp_notebook.messages.ranks import ClockProbe
from tests.conftest import wait_until
from tests.resizing import TRAINING, losses

THREADS = "torch.get_num_threads(), int((os := __import__('os')).environ['OMP_NUM_THREADS'])"
SUM = "x = torch.ones(1); dist.all_reduce(x); int(x)"


def ask(session, code: str) -> list[str | None]:
    result = session.run(code, quiet=True, timeout_s=30)
    return [result[rank].result for rank in range(session.world_size)]


def shares_of(world_size: int) -> str:
    """Return the value of `THREADS` on each rank: an equal share of the cores."""
    threads = threads_per_rank(os.environ, devices.cores(), world_size)
    return f"({threads}, {threads})"


def test_a_group_made_before_a_resize_names_the_cause(make_session):
    session = make_session(3)
    session.run("group = dist.new_group([0, 1]); x = torch.ones(1)", quiet=True)
    session.ranks.resize(2)
    with pytest.raises(RankError, match=r"was made before the session had 2 ranks.*dist\.new_group"):
        session.run("dist.all_reduce(x, group=group)", quiet=True)


@pytest.mark.long
def test_a_training_goes_on_with_3_and_1_of_2_ranks(make_session):
    session = make_session(2)
    assert ask(session, THREADS) == [shares_of(2)] * 2
    session.run(TRAINING.format(width=20), quiet=True)
    group = "group = dist.new_group([0, 1]); kept = [rank]; ddp_of_group = torch.nn.parallel.DistributedDataParallel"
    session.run(f"{group}(torch.nn.Linear(2, 2), process_group=group)", quiet=True)
    pids = session.ranks.pids()
    found = losses(session, 3)

    said = session.ranks.resize(3)

    assert said[0] == "3 ranks now: rank 2 is new"
    assert any(line.startswith("group [0,1] of ranks 0,1 was made before the session had 3 ranks") for line in said)
    assert "a model in DDP with a separate process_group cannot continue: create the group and wrap it again" in said
    [own] = [line for line in said if line.startswith("not copied, because each rank has its own: ")]
    assert "kept" in own and "mine" in own and own.endswith("; define what you need on rank 2")
    assert session.ranks.pids()[:2] == pids and session.world_size == 3
    assert ask(session, THREADS) == [shares_of(3)] * 3
    found += losses(session, 3)
    assert ask(session, "rank, world_size, steps, os.environ['WORLD_SIZE'] if (os := __import__('os')) else 0") == [
        f"({rank}, 3, 6, '3')" for rank in range(3)
    ]
    assert ask(session, "sampler.rank, sampler.num_replicas, len(sampler)") == [f"({rank}, 3, 80)" for rank in range(3)]
    assert ask(session, "mine if rank < 2 else 'mine' in globals()") == ["tensor([0.])", "tensor([1.])", "False"]
    session.run("del group, ddp_of_group", ranks=[0, 1], quiet=True)
    agreed = session.check()
    assert agreed.agrees, agreed

    assert session.ranks.resize(1) == ["1 rank now: ranks 1,2 have left", "sampler goes over 1 rank now"]
    assert ask(session, THREADS) == [shares_of(1)]

    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids[1:]), what="ranks that have left still run")
    found += losses(session, 3)
    assert ask(session, "sampler.num_replicas, kept") == ["(1, [0])"]
    session.stop()
    session = make_session(2)
    session.run(TRAINING.format(width=20), quiet=True)
    assert found == pytest.approx(losses(session, 9), rel=1e-9)


@pytest.mark.long
def test_rank_0_leaves_and_everybody_has_another_number(make_session):
    session = make_session(3)
    session.run("print('I am', rank); was = rank", quiet=True)
    first = session.ranks.pids()
    assert session.client.ids == [0, 1, 2]

    said = session.ranks.resize(2, without=0)

    assert said == ["2 ranks now: rank 0 has left; rank 1 is rank 0, rank 2 is rank 1"]
    assert session.ranks.pids() == first[1:]
    assert ask(session, "(rank, was, dist.get_rank())") == ["(0, 1, 0)", "(1, 2, 1)"]
    assert ask(session, SUM) == ["2", "2"]
    assert [session.log(rank).splitlines()[0] for rank in range(2)] == ["I am 1", "I am 2"]
    client = session.client
    assert client.ids == [0, 1] and client[:]["was"] == [1, 2]
    assert client.broadcast_view().apply_async(os.getpid).get(10) == session.ranks.pids()

    os.kill(session.ranks.pids()[0], signal.SIGKILL)
    wait_until(lambda: "died" in repr(session))
    said = session.ranks.resize(2)  # dead ranks are removed first

    assert said[0] == "2 ranks now: rank 0 has left; rank 1 is rank 0; rank 1 is new"
    assert ask(session, SUM) == ["2", "2"] and ask(session, "was")[0] == "2"
    assert session.client[:]["rank"] == [0, 1]


def test_a_rank_that_was_replaced_leaves(make_session):
    """The dead process that had its number before must not prevent the new group."""
    session = make_session(2)
    session.ranks.fault("kill", 1)
    session.ranks.heal()
    assert session.ranks.resize(1) == ["1 rank now: rank 1 has left"]
    assert session.ranks.resize(2)[0] == "2 ranks now: rank 1 is new" and ask(session, SUM) == ["2", "2"]


def test_threads_that_a_cell_has_set_stay(make_session):
    session = make_session(2)
    session.run("torch.set_num_threads(7)", ranks=[0], quiet=True)
    session.ranks.resize(1)
    assert ask(session, "torch.get_num_threads()") == ["7"]


def test_a_rank_that_has_left_is_told_nothing(make_session):
    """Some threads, such as the one that compares clocks, send to ranks that have left since the ranks were counted."""
    session = make_session(2)
    session.ranks.resize(1)
    for rank in (1, 0):
        session._cluster.send(rank, ClockProbe(request=0, sent_ns=time.monotonic_ns()))


def test_what_cannot_be_changes_nothing(make_session):
    session = make_session(2)
    session.run("kept = rank\nimport time", quiet=True)
    for bad in (0, -1, True, "3", 3_000_000):
        with pytest.raises(UsageError, match=r"must be at least 1|a positive integer|at most 4,096 ranks"):
            session.ranks.resize(bad)
    with pytest.raises(UsageError, match="at least one rank must stay"):
        session.ranks.resize(2, without=[0, 1])
    with pytest.raises(UsageError, match="rank 2 does not exist"):
        session.ranks.resize(2, without=[2])
    with pytest.raises(UsageError, match=r"^the hosts have memory for \d+ ranks, not for 4096: %ddp_resize \d+$"):
        session.ranks.resize(4096)
    assert session.ranks.resize(2) == ["there are 2 ranks already"]
    future = session.submit("time.sleep(1)")
    wait_until(lambda: "in a cell" in repr(session.status()))
    with pytest.raises(SessionBrokenError, match="a cell is running"):
        session.ranks.resize(3)
    future.result()
    session.run(
        "from torch.distributed import rpc\nrpc.init_rpc(f'w{rank}', rank=rank, world_size=world_size)", quiet=True
    )
    with pytest.raises(UsageError, match=r"cannot change now: RPC runs, .* call rpc.shutdown\(\)$"):
        session.ranks.resize(1)
    session.run("rpc.shutdown()", quiet=True)
    assert ask(session, "kept") == ["0", "1"] and session.ranks.epoch == 1 and ask(session, SUM) == ["2", "2"]


def test_a_process_that_does_not_come_up_changes_nothing(make_session, monkeypatch):
    from ddp_notebook.launch.membership.members import Members

    session = make_session(2)
    session.run("kept = rank", quiet=True)
    start = Members._start_rank

    def start_and_kill(*args):
        process = start(*args)
        os.kill(process.pid, signal.SIGKILL)
        return process

    monkeypatch.setattr(Members, "_start_rank", start_and_kill)
    with pytest.raises(StartError, match="no new process started, and nothing was changed: rank 2 died while waiting"):
        session.ranks.resize(3)
    monkeypatch.undo()
    assert session.world_size == 2 and ask(session, "kept") == ["0", "1"] and ask(session, SUM) == ["2", "2"]
    assert session.ranks.resize(3)[0] == "3 ranks now: rank 2 is new" and ask(session, SUM) == ["3", "3", "3"]

    def start_and_kill_all(*args):
        process = start(*args)
        for pid in [*session.ranks.pids(), process.pid]:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not session.ranks.pids(), what="the ranks have ended")
        return process

    monkeypatch.setattr(Members, "_start_rank", start_and_kill_all)
    with pytest.raises(
        StartError, match="no new process started, and all ranks have died; start new ones with "
    ) as said:
        session.ranks.resize(4)
    assert "othing was changed" not in str(said.value)


def test_a_press_of_stop_in_each_phase(make_session, monkeypatch):
    from ddp_notebook.launch.engines import Engines
    from ddp_notebook.launch.membership.members import Members

    session = make_session(2)
    session.run("kept = rank", quiet=True)

    def press(owner, step):
        original = getattr(owner, step)

        def stepped(*args, **kwargs):
            done = original(*args, **kwargs)
            signal.raise_signal(signal.SIGINT)
            return done

        monkeypatch.setattr(owner, step, stepped)

    press(Members, "_start_rank")
    with pytest.raises(KeyboardInterrupt, match=r"^resizing was interrupted: nothing was changed$"):
        session.ranks.resize(3)
    monkeypatch.undo()
    assert session.world_size == 2 and ask(session, SUM) == ["2", "2"]
    press(Engines, "forget_all")
    later = (
        r"3 ranks now: rank 2 is new, and the next cell forms their group. Rank 2 may lack variables: %ddp_heal --from"
    )
    with pytest.raises(KeyboardInterrupt, match=f"^resizing was interrupted: {later}"):
        session.ranks.resize(3)
    monkeypatch.undo()
    assert ask(session, SUM) == ["3", "3", "3"]
    session.ranks.heal(0, ["kept"])
    assert ask(session, "kept") == ["0", "1", "0"]


def test_functions_find_the_variables_of_their_rank(make_session):
    session = make_session(1)
    session.run("scale = 10\ndef who(): return scale * rank + world_size\nclass Who:\n    def me(self): return who()")
    session.ranks.resize(2)
    assert ask(session, "who(), Who().me()") == ["(2, 2)", "(12, 12)"]
    session.run("scale = 100")
    assert ask(session, "who()") == ["2", "102"]


def test_random_states_are_handed_over_where_they_are_the_same(make_session):
    session = make_session(2)
    session.run("import random, numpy as np\ntorch.manual_seed(3); random.seed(3); np.random.seed(3 + rank)")
    said = session.ranks.resize(3)
    assert "each rank has its own random state of NumPy, and so rank 2" in said
    drawn = ask(session, "float(torch.rand(())), random.random()")
    assert len(set(drawn)) == 1


def test_a_loader_of_each_ranks_own_data_is_not_copied(make_session):
    session = make_session(2)
    session.run(
        "from torch.utils.data import DataLoader, TensorDataset, DistributedSampler\n"
        "own = DataLoader(TensorDataset(torch.ones(8) * rank))\n"
        "whole = TensorDataset(torch.arange(12.0))\n"
        "shared = DataLoader(whole, batch_size=2, sampler=DistributedSampler(whole))\n"
        "of_own = DataLoader(own.dataset, batch_size=2, sampler=DistributedSampler(own.dataset))"
    )
    said = session.ranks.resize(3)
    assert "of_own goes over 3 ranks now, but rank 2 lacks it: define it on these ranks too" in said, said
    assert "shared goes over 3 ranks now: with batches of 2 a step has 6 samples instead of 4" in said
    assert "not copied, because each rank has its own: of_own, own; define what you need on rank 2" in said
    assert ask(session, "len(shared), shared.sampler.rank") == [f"(2, {rank})" for rank in range(3)]


def test_new_ranks_share_a_sampler_and_data_with_their_loader(make_session):
    session = make_session(2)
    session.run(
        "from torch.utils.data import DataLoader, TensorDataset, DistributedSampler\n"
        "train_set = TensorDataset(torch.arange(12.0))\n"
        "sampler = DistributedSampler(train_set)\n"
        "loader = DataLoader(train_set, sampler=sampler)\n"
        "shard = TensorDataset(torch.ones(12) * rank)\n"
        "order = DistributedSampler(shard)\n"
        "feed = DataLoader(shard, sampler=order)"
    )
    said = session.ranks.resize(3)
    assert "not copied, because each rank has its own: feed, order, shard; define what you need on rank 2" in said
    with pytest.raises(UsageError, match=r"^rank 2 is new and has no variables; choose another rank with --from$"):
        session.ranks.heal(2)
    of_loader = ask(session, "loader.sampler is sampler, loader.dataset is train_set, sampler.rank")
    assert of_loader == [f"(True, True, {rank})" for rank in range(3)]
    session.run("del shard, order, feed", ranks=[0, 1], quiet=True)
    session.run("again = sampler; del sampler; sampler = again; del again", ranks=[2], quiet=True)  # in another order
    agreed = session.check()
    assert agreed.agrees, agreed


SHARDED = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
def make():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 12)).double()
    model = fully_shard(net, mesh=mesh)
    return {"mesh": mesh, "model": model, "opt": torch.optim.Adam(model.parameters())}
def wrong(): return make()["model"]
torch.manual_seed(0)
globals().update(make())
data = torch.randn(12, 12).double()
def train(count):
    losses = []
    for _ in range(count):
        share = data[rank::world_size]
        opt.zero_grad()
        loss = (model(share) - share).pow(2).mean()
        loss.backward()
        opt.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append((total / world_size).item())
    return losses
"""


def test_shards_are_gathered_and_built_anew(make_session):
    session = make_session(2)
    session.run(SHARDED, quiet=True)
    found = losses(session, 2)
    with pytest.raises(UsageError) as caught:
        session.ranks.resize(3)
    assert str(caught.value).startswith("the number of ranks cannot change: mesh is a device mesh, model is a ")
    assert "%ddp_resize N --build make. Or save them with torch.distributed.checkpoint" in str(caught.value)
    with pytest.raises(UsageError, match=r"^rank 0 gathers the sharded variables, so it must stay"):
        session.ranks.resize(1, build="make", without=0)
    with pytest.raises(RankError, match="the function nothing is not defined on this rank") as missing:
        session.ranks.resize(3, build="nothing")
    assert "__import__" not in "".join(missing.value.tracebacks[0]), "no line of ours is shown"
    found += losses(session, 1)

    with pytest.raises(RankError) as failed:
        session.ranks.resize(3, build="wrong")
    assert "the session has 3 ranks, and rank 0 holds the gathered state: correct wrong() and repeat" in str(
        failed.value
    )
    assert session.ranks.resize(3, build="make") == [
        "make() has rebuilt the sharded objects, with the state that they had"
    ]
    found += losses(session, 2)
    assert session.ranks.resize(1, build="make")[0] == "1 rank now: ranks 1,2 have left"
    found += losses(session, 2)

    session.run("part = next(model.parameters())", quiet=True)
    with pytest.raises(UsageError, match=r"part is a DTensor: keep part.full_tensor\(\) instead"):
        session.ranks.resize(2, build="make")
    session.stop()
    session = make_session(2)
    session.run(SHARDED, quiet=True)
    assert found == pytest.approx(losses(session, 7), rel=1e-9)


@pytest.mark.long
def test_no_cell_comes_between_the_plan_and_what_is_built_anew(make_session):
    session = make_session(2)
    session.run(SHARDED, quiet=True)
    jobs = []
    session._parts.hooks.resized.append(lambda: jobs.append(session.submit("type(model).__name__", quiet=True)))
    session.ranks.resize(3, build="make")
    assert set(jobs[0].result(timeout=30).by_rank) == {0, 1, 2}, "rank 2 has no model before it is built"


def test_the_recording_goes_on(make_session):
    session = make_session(3)
    session.run("log(loss=float(rank)); dist.all_reduce(torch.ones(1))", quiet=True)
    session.ranks.resize(2, without=[0])
    session.run("log(loss=10.0 + rank); dist.all_reduce(torch.ones(1))", quiet=True)
    session.ranks.resize(4)
    session.run("log(loss=20.0 + rank)", quiet=True)

    recording = session.recording
    loss = recording.metrics["loss"]
    assert sorted(loss.values.tolist()) == [0.0, 1.0, 2.0, 10.0, 11.0, 20.0, 21.0, 22.0, 23.0]
    assert all(value % 10 == rank for value, rank in zip(loss.values.tolist(), loss.ranks.tolist(), strict=True))
    assert len(recording.collectives(op="all_reduce", rank=2)) == 1 and recording.world_size == 4


def test_a_thread_may_resize(make_session):
    session = make_session(1)
    said: list[list[str]] = []
    thread = threading.Thread(target=lambda: said.append(session.ranks.resize(2)))
    thread.start()
    thread.join(30)
    assert said[0][0] == "2 ranks now: rank 1 is new"


@pytest.mark.long
def test_in_a_notebook(make_kernel):
    kernel = make_kernel()
    kernel.run("%load_ext ddp_notebook")
    kernel.run("%ddp_start 2 --live off")
    kernel.run("%%on_all_ranks\nkept = rank")
    assert kernel.run("%ddp_resize 3").stdout.startswith("3 ranks now: rank 2 is new\n")
    assert "3" in kernel.run("%%on_all_ranks\n" + SUM).stdout
    assert "%ddp_resize N [--build NAME]" in kernel.run("%ddp_resize").traceback
    said = kernel.run("%ddp_resize 2 --without 0").stdout
    assert said == "2 ranks now: rank 0 has left; rank 1 is rank 0, rank 2 is rank 1\n"
    assert "world_size must be at least 1, got 0" in kernel.run("%ddp_resize 0").traceback
    assert kernel.run("%ddp_status").stdout.count("idle") == 2
    kernel.run("%ddp_stop")
