"""A long series of faults in one session while a rank waits by RPC.

In every wait a callee dies, raises, does not answer until the cell is stopped, or has no thread left.
DDP_NOTEBOOK_SOAK_SEED selects the series, DDP_NOTEBOOK_LONG_TIMES shortens it.
"""

from __future__ import annotations

import os
import random
import time

import pytest

from ddp_notebook.errors import CellTimeoutError, DDPNotebookError, RankDiedError
from tests.test_rpc import CALL, DEFINITIONS, INIT

pytestmark = pytest.mark.long

SEED = int(os.environ.get("DDP_NOTEBOOK_SOAK_SEED", "0")) or random.randrange(1, 10**6)
_STOP_AFTER_S, _AT_ONCE_S, _AGAIN_S = 0.4, 1.0, 2.0
_FUNCTIONS = """
def act(how):
    if how == 'die': time.sleep(0.05); os._exit(3)
    if how == 'raise': raise ValueError('bad')
    until = time.monotonic() + 20
    while time.monotonic() < until: time.sleep(0.01)
def onwards(how, to): return rpc.rpc_sync(to, act, args=(how,))
def down(n, to, back): return rpc.rpc_sync(to, down, args=(n - 1, back, to)) if n else act('stop')

class Held:
    def act(self, how): act(how)
class Acts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, how): ctx.how = how; return x.clone()
    @staticmethod
    def backward(ctx, gradient): act(ctx.how); return gradient, None
def through(x, how): return Acts.apply(x, how)
def backward(how):
    with dist_autograd.context() as context:
        x = torch.ones(1, requires_grad=True)
        dist_autograd.backward(context, [rpc.rpc_sync(other, through, args=(x, how)).sum()])
"""
_WAITS = {
    "rpc_sync": "rpc.rpc_sync(other, act, args=(how,))",
    "a future": "rpc.rpc_async(other, act, args=(how,)).wait()",
    "wait_all": "torch.futures.wait_all([rpc.rpc_async(other, act, args=(how,)) for _ in range(3)])",
    "to_here": "rpc.remote(other, act, args=(how,)).to_here()",
    "a proxy": "rpc.remote(other, Held).rpc_sync().act(how)",
    "a thread of the callee": "rpc.rpc_sync(other, onwards, args=(how, f'worker{rank}'))",
    "backward": "backward(how)",
    "shutdown": "rpc.shutdown()",
    "init_rpc": INIT.replace("\n", "; "),
}
_STOPPED = "stop", "exhaust"
_ENDS_RPC = "shutdown", "init_rpc"  # the other rank calls it in its own part of the cell
_EXHAUST = "rpc.rpc_sync(other, down, args=(60, f'worker{rank}', other))"
_PAIRS = [(wait, how) for wait in _WAITS for how in ("die", "raise", "stop")] + [("all threads", "exhaust")] * 3


def _strike(session, wait: str, how: str, victim: int) -> float:
    """Inject one fault. Return the duration of the cell, without the time until it was stopped."""
    is_stopped = how in _STOPPED
    if wait == "init_rpc":
        session.run("rpc.shutdown()", quiet=True, timeout_s=_AGAIN_S)
    code = f"how = {how!r}\n" + (f"{_EXHAUST}" if how == "exhaust" else f"if rank != {victim}: {_WAITS[wait]}")
    if wait in _ENDS_RPC:
        code += "\nelse: act(how)"
    began = time.monotonic()
    with pytest.raises(CellTimeoutError if is_stopped else DDPNotebookError):
        session.run(code, timeout_s=_STOP_AFTER_S if is_stopped else 15.0, quiet=True)
    took_s = time.monotonic() - began
    if not is_stopped:
        assert took_s < 15.0
    return took_s - _STOP_AFTER_S * is_stopped


def _goes_on(session, has_died: bool = False) -> float:
    """Check that the ranks can call each other again. Return the seconds until then."""
    if has_died:
        session.ranks.heal()
    session.run(DEFINITIONS + _FUNCTIONS, quiet=True)
    began = time.monotonic()
    result = session.run(INIT + CALL, quiet=True)
    assert [result[rank].result for rank in result.ranks] == ["1", "2"]
    return time.monotonic() - began


def test_200_random_faults_in_waits_of_rpc(make_session, tally):
    session, chance = make_session(2, grace_s=0.5), random.Random(SEED)
    row = [*_PAIRS, *chance.choices(_PAIRS, k=200)][:200]
    chance.shuffle(row)
    ended_s, again_s, survived, tried = [0.0], [_goes_on(session)], 0, 0
    try:
        for n in tally(200, "random faults during RPC waits in one session of 2 ranks; the session continues"):
            tried, (wait, how) = n + 1, row[n]
            print(f"{n}: {how} in {wait}", flush=True)
            took_s = _strike(session, wait, how, chance.randrange(2))
            if how in _STOPPED:
                ended_s.append(took_s)
            again_s.append(_goes_on(session, how == "die"))
            assert ended_s[-1] < _AT_ONCE_S, row[n]
            assert again_s[-1] < _AGAIN_S, row[n]
            survived += 1
    finally:
        print(
            f"seed {SEED}: {survived} of {tried} survived; a stopped cell ended after at most {max(ended_s):.2f} s, "
            f"and calls worked again after at most {max(again_s):.2f} s"
        )


def test_calls_work_after_each_of_140_healings(make_session, tally):
    """A reused number of an agent would be the number of a broken connection.

    The quick tests start near the last number.
    """
    session = make_session(2)
    for n in tally(140, "replacements of a dead rank in one session of 2 ranks, each followed by remote calls"):
        victim = n % 2
        with pytest.raises(RankDiedError):
            session.run("import os; os._exit(3)", ranks=[victim], quiet=True)
        session.ranks.heal()
        session.run(DEFINITIONS, quiet=True)
        result = session.run(INIT + CALL, quiet=True, timeout_s=20)
        assert [result[rank].result for rank in result.ranks] == ["1", "2"], n
