"""Remote calls that fail in the C++ of torch, such as functions of `async_execution` that return no Future."""

from __future__ import annotations

import time

import pytest

from ddp_notebook.errors import CellTimeoutError
from tests.test_rpc import DEFINITIONS, INIT, said

FUNCTIONS = """
@rpc.functions.async_execution
def no_future(): return torch.ones(2)
@rpc.functions.async_execution
def never(): return torch.futures.Future()
@rpc.functions.async_execution
def none(): return None
class Held:
    @staticmethod
    @rpc.functions.async_execution
    def no_future(): return torch.ones(2)
    @rpc.functions.async_execution
    def no_future_either(self): return torch.ones(2)
def fetch(reference): return reference.to_here()
@torch.jit.script
def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor: return x @ y
two, three = torch.ones(2), torch.ones(3)
"""
FAILING = [
    "rpc.remote(other, no_future).to_here(timeout=4)",
    "rpc.remote(other, no_future).to_here()",
    "rpc.remote(other, Held.no_future).to_here()",
    "rpc.remote(other, Held).remote().no_future_either().to_here()",
    "rpc.remote(other, torch.add, args=(two, three)).to_here()",
    "rpc.remote(other, product, args=(two, three)).to_here()",
    "rpc.rpc_sync(other, fetch, args=(rpc.remote(f'worker{rank}', no_future),))",
    "rpc.remote(f'worker{rank}', no_future).to_here()",
    "rpc.remote(other, none).to_here()",
    "rpc.remote(f'worker{rank}', none).to_here()",
    "rpc.rpc_sync(other, no_future)",
    "rpc.rpc_async(other, no_future).wait()",
]


@pytest.fixture(scope="module")
def session(waiting_host_server):
    from ddp_notebook import api

    waiting_host_server()
    with api.start(2) as running:
        running.run(DEFINITIONS + FUNCTIONS)
        yield running


@pytest.mark.parametrize("call", FAILING)
def test_an_error_comes_at_once_and_shutdown_ends(session, call):
    """torch runs no callback for a failed `rpc.remote`, and counts it as pending forever."""
    code = (
        f"{INIT}failed = 0\nfor _ in range(20 * (rank == 0)):\n"
        f"    try: {call}\n    except (RuntimeError, TypeError): failed += 1\nrpc.shutdown()\nfailed"
    )
    began_s = time.monotonic()
    told = said(session, code, timeout_s=30)
    assert told[0].splitlines()[-1] == "20"
    assert time.monotonic() - began_s < 15.0


@pytest.mark.long
def test_an_operator_that_fails_late(session):
    """No wait may send the reference to the owner: torch would answer neither of the two calls."""
    call = "rpc.remote(other, torch.linalg.inv, args=(torch.ones(1500, 1500),)).to_here()"
    code = (
        f"{INIT}failed = []\nfor _ in range(3 * (rank == 0)):\n"
        f"    try: {call}\n    except RuntimeError as error: failed.append('singular' in str(error))\n"
        "rpc.shutdown()\nfailed"
    )
    told = said(session, code, timeout_s=30)
    assert [text.splitlines()[-1] for text in told] == ["[True, True, True]", "[]"]


def test_a_stopped_wait_for_an_operator_does_not_block_shutdown(session):
    """The call waits in a thread that the stop does not end."""
    session.run("@torch.jit.script\ndef long(x: torch.Tensor) -> torch.Tensor:\n"
                "    for _ in range(100000000): x = x + 1\n    return x")  # fmt: skip
    session.run(INIT)
    with pytest.raises(CellTimeoutError, match=r"rank 0: at cell line 1 \(waits for long on worker1"):
        session.run("if rank == 0: rpc.remote('worker1', long, args=(two,)).to_here(timeout=0)", timeout_s=1.0)
    began_s = time.monotonic()
    session.run("rpc.shutdown()", timeout_s=10)
    assert time.monotonic() - began_s < 5.0


@pytest.mark.long
def test_shutdown_ends_after_a_timed_out_call_that_never_returns(session):
    code = (
        f"{INIT}waits = 'rpc.rpc_sync(other, never, timeout=0.2)', "
        "'rpc.remote(other, never, timeout=0.6).to_here(timeout=0.2)'\n"
        "for wait in waits:\n"
        "    try: eval(wait)\n"
        "    except RuntimeError as error: print('RPC ran for more than set timeout (200 ms)' in str(error))\n"
        "rpc.shutdown()"
    )
    told = said(session, code, timeout_s=20)
    assert [text.splitlines()[1:] for text in told] == [["True", "True"]] * 2


@pytest.mark.long
def test_an_operator_that_fails_late_for_a_third_worker(make_session_alone):
    code = (
        f"{INIT}def fetch(reference): return reference.to_here(timeout=20)\n"
        "def attempt(call):\n"
        "    try: call()\n"
        "    except RuntimeError as error: return 'singular' in str(error)\n"
        "if rank == 0:\n"
        "    made = rpc.remote('worker1', torch.linalg.inv, args=(torch.ones(1500, 1500),))\n"
        "    theirs = rpc.rpc_async('worker2', fetch, args=(made,))\n"
        "    print(attempt(made.to_here), attempt(theirs.wait))\n"
        "rpc.shutdown()"
    )
    session = make_session_alone(3)  # the module's session is stopped, so this test is the last one
    session.run(DEFINITIONS)
    assert said(session, code, timeout_s=30)[0].splitlines()[1:] == ["True True"]
