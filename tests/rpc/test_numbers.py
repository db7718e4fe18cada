"""Numbers and names of RPC agents: unique for each process of a session, and never shown."""

from __future__ import annotations

import re

import pytest

from ddp_notebook.errors import RankDiedError, RankError
from ddp_notebook.rank.rpc.rpc_agent import MOST_NUMBERS
from tests.test_rpc import CALL, DEFINITIONS, INIT, said

SHOWN = """
with dist_autograd.context() as context: pass
reference = rpc.remote(other, Counter)
reference.to_here()
with torch.autograd.profiler.profile(use_kineto=False) as profile: reference.to_here()
names = [event.key for event in profile.function_events if event.key.startswith("to_here")]
context >> 48, reference.owner(), str(reference).count(f"created_on={rank},"), names
"""


@pytest.fixture
def session(make_session):
    session = make_session(2)
    session.run(DEFINITIONS)
    return session


def replace_rank_1(session) -> None:
    with pytest.raises(RankDiedError):
        session.run("import os; os._exit(3)", ranks=[1], quiet=True)
    session.ranks.heal()
    session.run(DEFINITIONS, ranks=[1], quiet=True)


def test_a_replaced_rank_has_the_names_and_numbers_of_its_worker(session, capfd):
    """Also after its agent was replaced twice, and after workers have changed their names."""
    for _ in range(3):
        for rank, text in enumerate(said(session, INIT + SHOWN)):
            its = 1 - rank
            expected = f"({rank}, WorkerInfo(id={its}, name=worker{its}), 2, ['to_here#(worker{rank})->(worker{its})'])"
            assert text.splitlines()[-1] == expected
        replace_rank_1(session)
    swapped = INIT.replace("worker{rank}", "worker{1 - rank}").replace("worker{1 - rank}'\n", "worker{rank}'\n")
    assert [text.splitlines()[-1] for text in said(session, swapped + "rpc.rpc_sync(other, add, args=(rank, 1))")] == [
        "1",
        "2",
    ]
    told = "".join(capfd.readouterr())
    assert not re.search(r"rank\d+-\d+|worker\d:\d", told), told


def test_a_script_calls_workers_by_their_present_names(session):
    session.run(
        "from torch.futures import Future\n"
        "@torch.jit.script\ndef product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:\n    return x @ y\n"
        "@torch.jit.script\ndef ask(to: str, x: torch.Tensor) -> torch.Tensor:\n"
        "    return rpc.rpc_sync(to, product, (x, x))\n"
    )
    for names in ("ab", "ba", "xy"):
        init = f"rpc.init_rpc('{names}'[rank], rank=rank, world_size=2)\n"
        call = f"print(ask('{names}'[1 - rank], torch.ones(2)).item())\nrpc.shutdown()"
        assert [text.splitlines()[-1] for text in said(session, init + call)] == ["2.0", "2.0"]


def test_gradients_of_a_replaced_rank_and_a_dead_rank_stay_apart(session):
    """A context that the dead rank has left on the other rank has a different id."""
    left = INIT + (
        "if rank == 1:\n"
        "    context = dist_autograd._new_context()\n"
        "    rpc.rpc_sync(other, torch.mul, args=(torch.ones(2, requires_grad=True), 100))\n"
    )
    session.run(left)
    replace_rank_1(session)
    code = INIT + (
        "with dist_autograd.context() as context:\n"
        "    x = torch.ones(2, requires_grad=True)\n"
        "    dist_autograd.backward(context, [rpc.rpc_sync(other, torch.mul, args=(x, 3)).sum()])\n"
        "    print(context >> 48, dist_autograd.get_gradients(context)[x].tolist())"
    )
    assert [text.splitlines()[-1] for text in said(session, code)] == ["0 [3.0, 3.0]", "1 [3.0, 3.0]"]


@pytest.mark.long
def test_a_distributed_optimizer_after_a_rank_was_replaced(session):
    """Its step is a script on the worker that has the parameters."""
    replace_rank_1(session)
    session.run("def parameter(): return torch.ones(2, requires_grad=True)\ndef use(p): return 3 * p.local_value()")
    code = INIT + (
        "from torch.distributed.optim import DistributedOptimizer\n"
        "for kind in (torch.optim.SGD, torch.optim.ASGD):\n"
        "    with dist_autograd.context() as context:\n"
        "        there = rpc.remote(other, parameter)\n"
        "        optimizer = DistributedOptimizer(kind, [there], lr=0.5)\n"
        "        dist_autograd.backward(context, [rpc.rpc_sync(other, use, args=(there,)).sum()])\n"
        "        optimizer.step(context)\n"
        "    print(round(there.to_here()[0].item(), 2))\n"
        "rpc.shutdown()"
    )
    assert [text.splitlines()[-2:] for text in said(session, code)] == [["-0.5", "-0.5"]] * 2


@pytest.mark.long
def test_calls_work_up_to_the_last_worker_number(session):
    """torch uses 16-bit numbers for workers. The session's counter starts near the end."""
    session._cluster._forming.processes_so_far = MOST_NUMBERS - 2
    for _ in range(2):
        replace_rank_1(session)
        assert [text.splitlines()[-1] for text in said(session, INIT + CALL)] == ["1", "2"]
    replace_rank_1(session)
    with pytest.raises(RankError, match=r"the ids of RPC workers must be at most 32767.*%ddp_restart"):
        session.run(INIT, timeout_s=10)
