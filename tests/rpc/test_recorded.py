"""Recordings of remote calls, remote references and distributed autograd."""

from __future__ import annotations

import re
import time

import pytest

import ddp_notebook
from ddp_notebook.observe.trace.trace import chrome_trace
from tests.observe.chrome import check

DEFINITIONS = """
import time
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
class Agent:
    def act(self, state): return state + 1
def ask(agent): return agent.rpc_sync().act(1) + agent.rpc_sync().act(2)
def fail(): raise ValueError('no such state')
def double(x): return 2 * x
def mistake(): return ValueError('no such state')
def numbers(): return torch.arange(4.0)
def box(): return [rpc.remote('worker0', numbers)]
import sys, threading
may_end, as_before = threading.Event(), threading.Event()
def while_another_thread_computes():
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(0.05)
    as_before.clear()
    def compute():
        while not as_before.is_set(): pass
        sys.setswitchinterval(usual_s)
    threading.Thread(target=compute).start()
def stays(): may_end.wait(20)
@rpc.functions.async_execution
def later(s):
    future = torch.futures.Future()
    def finish():
        time.sleep(s); future.set_result(s)
    import threading; threading.Thread(target=finish).start()
    return future
"""
INIT = "alone = dist.new_group([0])\nrpc.init_rpc(f'worker{rank}', rank=rank, world_size=world_size)\n"
END = "\nrpc.shutdown()"


@pytest.fixture
def session(make_session):
    session = make_session(2)
    session.run(DEFINITIONS)
    return session


def on_rank_0(session, code: str) -> int:
    """Run code on rank 0, between `init_rpc` and `shutdown`. Return the number of the cell."""
    lines = "\n".join(f"    {line}" for line in code.splitlines())
    session.run(f"{INIT}if rank == 0:\n{lines}{END}")
    return max(call.cell for call in session.recording.calls())


def test_a_call_is_seen_from_both_sides(session, tmp_path):
    cell = on_rank_0(
        session,
        "agent = rpc.RRef(Agent())\n"
        "rpc.rpc_sync('worker1', ask, args=(agent,))\n"
        "rpc.rpc_async('worker1', torch.add, args=(torch.ones(2), 1)).wait()\n"
        "try: rpc.rpc_sync('worker1', fail)\n"
        "except ValueError: pass\n"
        "rpc.rpc_async('worker1', later, args=(0.05,)).wait()",
    )

    recording = session.recording
    ask, first, second, add, fail, later = calls = recording.calls(cell=cell)
    assert [(call.function, call.kind, call.src, call.dst) for call in calls] == [
        ("ask", "rpc_sync", 0, 1),
        ("act", "rpc_sync", 1, 0),
        ("act", "rpc_sync", 1, 0),
        ("torch.add", "rpc_async", 0, 1),
        ("fail", "rpc_sync", 0, 1),
        ("later", "rpc_async", 0, 1),
    ]
    assert [call.parent for call in calls] == [None, ask.id, ask.id, None, None, None]
    assert len({call.id for call in calls}) == len(calls)
    for call in (ask, first, second, fail, later):
        assert call.sent_ns < call.begun_ns <= call.ended_ns <= call.done_ns < call.returned_ns
        assert call.nbytes > 50 and call.site.startswith(("cell line", "In["))
    assert ask.begun_ns < first.sent_ns < first.ended_ns < second.sent_ns < second.ended_ns < ask.ended_ns
    assert (add.begun_ns, add.nbytes, add.nbytes_back) == (None, 8, 8)  # an operator runs in C++
    assert [call.error for call in calls if call.error] == [fail.error] == ["ValueError('no such state')"]
    assert later.done_ns - later.ended_ns > 0.04e9 > later.running_ns
    assert not recording.calls(cell=cell + 1)

    assert len(recording.to_pandas("rpc")) == len(recording.rows("rpc"))
    again = ddp_notebook.load(recording.save(tmp_path / "recording.npz"))
    assert again.calls() == recording.calls() and again.references() == recording.references()


def test_an_exception_that_is_returned_is_an_answer(session):
    """With any kind of wait, or without one."""
    cell = on_rank_0(
        session,
        "assert isinstance(rpc.rpc_sync('worker1', mistake), ValueError)\n"
        "rpc.rpc_async('worker1', mistake).wait()\n"
        "torch.futures.wait_all([rpc.rpc_async('worker1', mistake)])\n"
        "rpc.rpc_async('worker1', mistake)\n"
        "rpc.remote('worker1', mistake).to_here()\n"
        "for failing in (rpc.rpc_async('worker1', fail), rpc.rpc_async('worker1', fail)): pass\n"
        "try: failing.wait()\n"
        "except ValueError: pass",
    )

    calls = session.recording.calls(cell=cell)
    assert [call.function for call in calls].count("mistake") == 5
    assert {call.function for call in calls if call.error} == {"fail"}
    assert sum(bool(call.error) for call in calls) == 2


def test_references_are_recorded_from_creation_to_deletion(session):
    cell = on_rank_0(
        session,
        "agent = rpc.RRef(Agent())\n"
        "rpc.rpc_sync('worker1', ask, args=(agent,))\n"
        "while_another_thread_computes()\n"  # the callee creates its own before `remote` returns
        "its = rpc.remote('worker1', box)\n"
        "its.to_here()[0].to_here().sum()\n"
        "as_before.set()",
    )

    _, outer, _ = references = session.recording.references(cell=cell)
    assert [(one.what, one.owner, one.made_by) for one in references] == [
        ("Agent", 0, 0),
        ("box()", 1, 0),
        ("numbers()", 0, 1),
    ]
    assert [[(user.rank, user.parent) for user in one.users] for one in references] == [
        [(1, 0)],
        [(0, None)],
        [(1, None)],
    ]
    fetches = [call for call in session.recording.calls(cell=cell) if call.kind == "to_here"]
    assert [(call.src, call.dst, call.reference) for call in fetches] == [
        (0, 1, outer.id)
    ]  # rank 0 has the other one itself
    for one in references:
        assert all(one.made_ns <= user.since_ns < user.deleted_ns <= one.deleted_ns for user in one.users)


def test_a_backward_goes_through_pairs_of_send_and_recv(session):
    cell = on_rank_0(
        session,
        "from torch.distributed.optim import DistributedOptimizer\n"
        "weight = rpc.remote('worker1', torch.nn.Parameter, args=(torch.ones(3),))\n"
        "optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.1)\n"
        "x = torch.ones(3, requires_grad=True)\n"
        "with dist_autograd.context() as context:\n"
        "    y = rpc.rpc_sync('worker1', double, args=(x,))\n"
        "    z = rpc.rpc_sync('worker1', torch.mul, args=(y, weight.to_here()))\n"
        "    dist_autograd.backward(context, [z.sum()])\n"
        "    optimizer.step(context)",
    )

    (context,) = session.recording.contexts(cell=cell)
    double, mul = (call for call in session.recording.calls(cell=cell) if call.function in ("double", "torch.mul"))
    assert (context.rank, [step.rank for step in context.steps]) == (0, [0])
    pairs = [(pair.call, pair.src, pair.dst) for pair in context.pairs if pair.call in (double.id, mul.id)]
    assert pairs == [(double.id, 0, 1), (double.id, 1, 0), (mul.id, 0, 1), (mul.id, 1, 0)]
    passed = [pair.backward_ns for pair in context.pairs if pair.call in (double.id, mul.id)]
    assert context.backward_began_ns < passed[3] < passed[2] <= passed[1] < passed[0] < context.backward_ended_ns
    assert context.backward_ended_ns < context.steps[0].began_ns < context.steps[0].ended_ns < context.ended_ns


def test_ddp_in_a_context_has_buckets_and_served_calls(session):
    cell = on_rank_0(
        session,
        "pass\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "net = DistributedDataParallel(torch.nn.Linear(4, 2), process_group=alone)\n"
        "for _ in range(3):\n"
        "    with dist_autograd.context() as context:\n"
        "        x = rpc.rpc_sync('worker1', double, args=(torch.ones(4, requires_grad=True),))\n"
        "        dist_autograd.backward(context, [net(x).sum()])",
    )

    reduced = session.recording.collectives("all_reduce", rank=0, cell=cell)
    assert [(one.origin, one.bucket, one.module) for one in reduced] == [("ddp", 0, "Linear")] * 3
    assert len({one.site for one in reduced}) == 1 and reduced[0].site.startswith(("cell line", "In["))
    report = str(session.recording.report(cell))
    assert "rank 1 served 3 calls" in report and "Waited for answers: rank 0" in report


def test_the_trace_has_arrows_from_callers_to_callees(session):
    cell = on_rank_0(session, "agent = rpc.RRef(Agent())\nrpc.rpc_sync('worker1', ask, args=(agent,))")

    events = [one for one in check(chrome_trace(session.recording, cell=cell)) if one.get("cat") == "rpc"]
    found = sorted((one["name"], one["pid"]) for one in events if one["ph"] == "X")
    assert found == [("act", 0), ("act", 0), ("act", 1), ("act", 1), ("ask", 0), ("ask", 1)]
    assert len([one for one in events if one["ph"] == "s"]) == 3


def test_a_call_that_has_not_returned_is_open_until_it_has(session):
    """This does not depend on the caller: it waits for the call, fetches its result, or has left its cell."""
    session.run(
        f"{INIT}if rank == 0:\n"
        "    rpc.rpc_async('worker1', stays)\n"
        "    rpc.remote('worker1', stays)\n"
        "    box = rpc.remote('worker1', box)\n"
    )

    def told(*, is_open: bool):
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            found = [call for call in session.recording.calls() if call.function == "stays"]
            if len(found) == 2 and all(call.is_open == is_open and call.is_matched for call in found):
                return found
            time.sleep(0.05)
        raise AssertionError(found)

    called, made = told(is_open=True)
    assert (called.kind, made.kind) == ("rpc_async", "remote")
    for call in (called, made):
        assert call.sent_ns < call.begun_ns and call.site.startswith(("cell line", "In[")) and not call.error
        assert call.ended_ns is call.done_ns is call.returned_ns is None
    events = [one for one in check(chrome_trace(session.recording)) if one.get("cat") == "rpc" and one["ph"] == "X"]
    states = [one["args"].get("state") for one in events if one["name"] == "stays"]
    assert states == ["not returned yet"] * 4, "both of them on both ranks"
    report = str(session.recording.report(called.cell))
    assert "Not returned when this report was made: stays from rank 0 to rank 1 (2 times)" in report

    session.run("may_end.set()\nrpc.shutdown()")
    for before, after in zip((called, made), told(is_open=False), strict=True):
        assert (before.id, before.sent_ns, before.begun_ns) == (after.id, after.sent_ns, after.begun_ns)
        assert after.begun_ns < after.ended_ns < after.returned_ns
    assert "Not returned" not in str(session.recording.report(called.cell))


@pytest.mark.long
def test_both_sides_tell_of_ten_thousand_calls(session):
    """From two threads of each rank. Some calls are waited for one by one, and some together."""
    session.run(
        f"{INIT}"
        "import threading\n"
        "def many(to):\n"
        "    for _ in range(50):\n"
        "        torch.futures.wait_all([rpc.rpc_async(to, double, args=(n,)) for n in range(25)])\n"
        "        for n in range(25): rpc.rpc_sync(to, double, args=(n,))\n"
        "threads = [threading.Thread(target=many, args=(f'worker{1 - rank}',)) for _ in range(2)]\n"
        "for one in threads: one.start()\n"
        "for one in threads: one.join()"
        f"{END}",
        timeout_s=120,
    )

    calls = [call for call in session.recording.calls() if call.function == "double"]
    matched = [call for call in calls if call.is_matched and call.returned_ns is not None]
    assert len(calls) == 10_000 and len(matched) >= 9_990
    assert len({call.id for call in calls}) == 10_000
    assert all(call.sent_ns < call.begun_ns <= call.ended_ns < call.returned_ns for call in matched)
    assert not any(session.recording.dropped.values())


def test_a_report_says_that_an_agent_waits_for_its_observers(session):
    session.run("def work(): time.sleep(0.03); return 1")
    on_rank_0(
        session,
        "policy = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(policy.parameters(), 0.1)\n"
        "for episode in range(12):\n"
        "    futures = [rpc.rpc_async('worker1', work) for _ in range(2)]\n"
        "    for future in futures: future.wait()\n"
        "    policy(torch.ones(2, 4)).mean().backward()\n"
        "    optimizer.step()",
    )
    found = session.report()
    assert found.overall is not None
    assert found.overall.share(found.overall.answers_ns) > 0.5
    on_a_busy_machine = found.taken is not None and found.taken.is_large  # the report lists it first
    assert on_a_busy_machine or re.fullmatch(r"\d\d % of the step waits for answers of remote calls", found.verdict)
    assert found.straggler is None
    assert re.search(
        r"rank 1 served 24 calls \([\d.]+ [µm]?s in their functions, \d+ % of the time of the steps\)", str(found)
    )
