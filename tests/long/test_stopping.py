"""The whole table of stopped processes, in plain and in kept sessions."""

from __future__ import annotations

import os
import signal
from contextlib import closing

import pytest

from tests.faults.stopping import GROUP, INIT_RPC, LINES, NAMED_S, RPC, SUM, TABLE, Stopping
from tests.faults.test_stopping import nothing_is_left  # noqa: F401  # of the module, as there
from tests.keep.conftest import runtime  # noqa: F401  # a fixture

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name", ["rank", "store", "host server", "controller"])
def test_in_a_plain_session(name):
    with closing(Stopping()) as notebook:
        for where in TABLE[name]:
            notebook.play(name, where)


@pytest.mark.parametrize("where", [*RPC, "heal", "status", "stop"])
def test_a_rank_with_rpc(where):
    with closing(Stopping()) as notebook:
        assert notebook.kernel.run(INIT_RPC).status == "ok"
        notebook.play("rank", where)


@pytest.mark.parametrize("where", [one for one in RPC if one != "shutdown"])
def test_a_rank_that_dies_while_another_one_calls_it(where):
    with closing(Stopping()) as notebook:
        assert notebook.kernel.run(INIT_RPC).status == "ok"
        pid = notebook.pid("rank")
        with notebook.stopped(pid):
            message = notebook.kernel.start(LINES[where])
            notebook.expect(rf"\b{pid}\b.*kill -CONT {pid}", NAMED_S)
            os.kill(pid, signal.SIGKILL)
            notebook.expect(r"worker1 \(rank 1\).*%ddp_heal|rank 1 died\. %ddp_heal", NAMED_S)
            reply = notebook.end(message)
            assert reply.status == "error" and "worker1 (rank 1)" in reply.evalue, reply
        assert "rank 1 was replaced" in notebook.kernel.run("%ddp_heal --from 0 kept").stdout


@pytest.mark.parametrize("name", ["rank", "store", "host server", "controller", "keeper"])
def test_in_a_kept_session(name, runtime):  # noqa: F811
    env = {"XDG_RUNTIME_DIR": str(runtime), "DDP_NOTEBOOK_PRELOAD": "0"}
    with closing(Stopping("%ddp_start 2 --keep 1", env)) as notebook:
        for where in TABLE[name]:
            if where not in ("resize", "restart"):
                notebook.play(name, where)


@pytest.mark.parametrize("name", ["rank", "store", "host server", "keeper"])
def test_a_process_that_a_debugger_holds(name, runtime):  # noqa: F811
    env = {"XDG_RUNTIME_DIR": str(runtime), "DDP_NOTEBOOK_PRELOAD": "0"}
    lines = [SUM, GROUP, "%ddp_status", "%ddp_heal", "session.ranks.reform()"]
    with closing(Stopping("%ddp_start 2 --keep 1", env)) as notebook:
        for line in lines if name != "store" else ["session.ranks.reform()"]:
            notebook.play_held(name, line)
