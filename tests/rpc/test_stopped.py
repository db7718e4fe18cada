"""Calls of a stopped cell on their callees, and messages about ranks that wait for each other by RPC."""

from __future__ import annotations

import re
import time

import pytest

from ddp_notebook.errors import CellTimeoutError, RankError
from tests.conftest import wait_until
from tests.test_rpc import CALL, DEFINITIONS, INIT

FUNCTIONS = """
done = []
def spin():
    while True: pass
def spin_in_vain():
    while True:
        try: time.sleep(0.01)
        except Exception: pass
def onwards(to, what): return rpc.rpc_sync(to, what)
def fetch(to, what): return rpc.remote(to, what).to_here()
def nap(): time.sleep(1.5); done.append(1)
def down(n, to, back): return rpc.rpc_sync(to, down, args=(n - 1, back, to)) if n else spin_in_vain()
class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient): spin_in_vain()
def slow(x): return Slow.apply(x)
@rpc.functions.async_execution
def never(): return torch.futures.Future()
import threading
from ddp_notebook.rank.group import waiting
held = torch.futures.Future()
@rpc.functions.async_execution
def hold(): return held
def wait_too(later_s):
    waiting.begin(threading.get_ident())
    time.sleep(later_s)
    future.wait()
def interrupt_soon(thread):
    time.sleep(0.4)  # the main thread waits by then, too
    while waiting._others.get(thread) is None: time.sleep(0.01)
    waiting.interrupt(thread)
"""
BACKWARD = """
with dist_autograd.context() as context:
    x = torch.ones(1, requires_grad=True)
    dist_autograd.backward(context, [rpc.rpc_sync(other, slow, args=(x,)).sum()])
"""
_AT_ONCE_S = 5.0  # otherwise it takes a minute, the timeout of RPC


@pytest.fixture(scope="module")
def session(waiting_host_server):
    from ddp_notebook import api

    waiting_host_server()
    with api.start(2) as running:
        running.run(DEFINITIONS + FUNCTIONS)
        yield running


def stopped(session, code: str, after_s: float = 0.7) -> str:
    """Return the messages about a stopped cell of rank 0."""
    session.run(INIT)
    began_s = time.monotonic()
    with pytest.raises(CellTimeoutError) as failed:
        session.run("if rank == 0:\n    " + code.strip().replace("\n", "\n    "), timeout_s=after_s)
    assert time.monotonic() - began_s < after_s + _AT_ONCE_S
    return str(failed.value)


def frames(session, function: str) -> list[int]:
    """Return the number of threads of each rank in which this function runs."""
    code = (
        "import sys\nn = 0\nfor f in sys._current_frames().values():\n    while f:\n"
        f"        n += f.f_code.co_name == {function!r}; f = f.f_back\nn"
    )
    result = session.run(code, quiet=True)
    return [int(result[rank].result) for rank in result.ranks]


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "function"),
    [
        ("rpc.rpc_sync(other, spin)", "spin"),
        ("rpc.rpc_sync(other, spin_in_vain)", "spin_in_vain"),
        ("rpc.rpc_async(other, spin_in_vain); time.sleep(5)", "spin_in_vain"),
        ("rpc.rpc_sync(other, onwards, args=('worker0', spin_in_vain))", "onwards"),
        ("rpc.rpc_sync(other, fetch, args=('worker0', spin_in_vain))", "fetch"),
        ("rpc.rpc_sync('worker0', spin_in_vain)", "spin_in_vain"),
        ("rpc.remote('worker0', spin_in_vain).to_here()", "spin_in_vain"),
        (BACKWARD, "spin_in_vain"),
    ],
)
def test_what_a_callee_executes_ends_with_the_cell(session, code, function):
    told = stopped(session, code)
    assert "still runs" not in told
    wait_until(lambda: frames(session, function) == [0, 0], 10.0)  # the stop does not wait for a backward
    session.run("rpc.shutdown()", timeout_s=5)
    result = session.run(INIT + CALL)
    assert [result[rank].result for rank in range(2)] == ["1", "2"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "rank"),
    [
        ("rpc.rpc_sync(other, nap)", 1),
        ("rpc.remote('worker0', nap).to_here()", 0),
        ("rpc.remote('worker0', nap).local_value()", 0),
        ("rpc.remote('worker0', nap).rpc_sync().nothing()", 0),
    ],
)
def test_what_does_not_end_is_named(session, code, rank):
    told = stopped(session, code)
    assert f"rank {rank} still runs nap for it, until what that waits in returns, such as time.sleep" in told
    wait_until(lambda: frames(session, "nap") == [0, 0], what="the end of nap")
    assert session.run("done", ranks=[rank])[rank].result == "[]", "it ends there, and not behind"


@pytest.mark.parametrize("later_s", [0.0, 0.2])
def test_threads_that_wait_for_the_same_call_end_separately(session, later_s):
    """Otherwise the second thread would wait in C++, which no stop reaches, in any order of the threads."""
    stopped(
        session,
        "future = rpc.rpc_async(other, hold)\n"
        f"thread = threading.Thread(target=wait_too, args=({later_s},)); thread.start()\n"
        "threading.Thread(target=interrupt_soon, args=(thread.ident,)).start()\n"
        f"time.sleep({0.2 - later_s}); future.wait()",
        after_s=1.0,
    )
    session.run("held.set_result(1); held = torch.futures.Future()", ranks=[1])
    wait_until(lambda: frames(session, "wait_too") == [0, 0], 10.0)


def test_a_shutdown_does_not_wait_for_calls_of_a_stopped_cell(session):
    stopped(session, "rpc.rpc_sync(other, never)")
    session.run(INIT + "rpc.shutdown()", timeout_s=5)


def test_threads_used_up_by_recursion_are_named_and_freed(session):
    told = stopped(session, "rpc.rpc_sync(other, down, args=(60, 'worker0', other))", after_s=1.5)
    assert re.search(r"\(waits for down on worker1 \(rank 1\), call \d+, \d s; all 16 threads of this rank wait", told)
    assert "rank 1: ended the cell; all 16 threads of this rank wait for calls to worker0 (rank 0)" in told
    assert frames(session, "down") == [0, 0]
    result = session.run(INIT + CALL)
    assert [result[rank].result for rank in range(2)] == ["1", "2"]


def test_the_card_names_both_ends(make_session_alone, capfd):
    session = make_session_alone(2, hang_after_s=1.0)
    session.run(DEFINITIONS + FUNCTIONS)
    session.run(INIT)
    capfd.readouterr()
    with pytest.raises(CellTimeoutError):
        session.run("if rank == 0: rpc.rpc_sync(other, spin_in_vain)", timeout_s=2.5)
    told = capfd.readouterr().err
    assert re.search(r"no progress for 1 s: rank 0 waits for spin_in_vain on worker1 \(rank 1\), call 1, 1 s, w", told)
    assert re.search(r"which is at cell line \d+ in spin_in_vain", told), told


def test_however_the_cell_is_stopped(make_session_alone, capfd):
    """The cell is ended by the stop button, or because another rank has failed."""
    session = make_session_alone(2, grace_s=0.2)
    session.run(DEFINITIONS + FUNCTIONS)
    session.run(INIT)
    with pytest.raises(RankError, match="bad"):
        session.run("if rank == 0: rpc.rpc_sync(other, spin_in_vain)\ntime.sleep(0.6); raise ValueError('bad')")
    assert frames(session, "spin_in_vain") == [0, 0]
    job = session.submit("if rank == 0: rpc.rpc_sync(other, spin_in_vain)")
    wait_until(lambda: "waits for spin_in_vain" in str(session.status()), what="the call")
    capfd.readouterr()
    job.cancel()
    wait_until(lambda: frames(session, "spin_in_vain") == [0, 0], what="the end of the call")
    # The callee is missing in the message if a busy machine delays the answer of the rank.
    told = r"rank 0 was interrupted at cell line 1, in rpc_sync(\n| \(waits for spin_in_vain on worker1 \(rank 1\), c)"
    assert re.search(told, capfd.readouterr().err)
