"""A library opens a debugger, although no cell names one; and cells that not all ranks run."""

from __future__ import annotations

import re

import pytest

from tests.debug.driver import Debugged

ALL = "%%on_all_ranks\n"
GROUP = f"""{ALL}import time
from datetime import timedelta
group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
x = torch.ones(1)"""
CODE = """
if rank == 0:
    time.sleep(0.5)
    stop()
dist.all_reduce(x, group=group, async_op=True).wait()
"""
LINE = r"time limits run on while the debugger waits, on rank 1: {} #\d+ of group {}\n"


@pytest.fixture(scope="module")
def kernel_of_user(kernel):
    kernel.run("%ddp_start 2")  # leaves the host server, which waits for the next session
    kernel.run("%ddp_stop")
    return kernel


@pytest.fixture
def user(kernel_of_user, tmp_path):
    (tmp_path / "stops.py").write_text("def stop():\n    breakpoint()\n")
    user = Debugged(kernel_of_user)
    assert user.run("%ddp_start 2").status == "ok" and user.run(GROUP).status == "ok"
    imports = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from stops import stop"
    assert user.run(f"{ALL}{imports}").status == "ok"
    yield user
    user.run("%ddp_stop")


@pytest.mark.long
def test_an_operation_that_began_before_is_named(user):
    reply = user.run(f"{ALL}{CODE}", ["p 1", "c"])
    assert re.search(LINE.format("all_reduce", r"\[0,1\] \(2 s\)"), reply.stderr), reply.stderr
    for operation in ("dist.barrier(group)", "dist.monitored_barrier(group)"):
        reply = user.run(f"{ALL}if rank == 0: stop()\n{operation}", ["(4) c"])
        assert reply.status == "ok", "the session expects debuggers from now on"
        assert "time limits" not in reply.stderr, reply.stderr


@pytest.mark.long
def test_an_operation_that_begins_at_the_prompt_is_named(user):
    """In the first cell of the session that stops, ranks cannot meet before the barrier of gloo."""
    code = "if rank == 0:\n    stop()\nelse:\n    time.sleep(1)\ndist.monitored_barrier()"
    reply = user.run(f"{ALL}{code}", ["(4) c"])
    assert reply.status == "ok", reply
    found = re.findall(LINE.format("monitored_barrier", r"default \(1800 s\)"), reply.stderr)
    assert len(found) == 1, reply.stderr


@pytest.mark.long
def test_a_group_of_the_ranks_of_a_cell(kernel_of_user):
    """Rank 2 does not run the cell."""
    user = Debugged(kernel_of_user)
    assert user.run("%ddp_start 3").status == "ok" and user.run(GROUP).status == "ok"
    code = "%%on_ranks 0-1\nif rank == 0: breakpoint()\ndist.monitored_barrier(group)"
    reply = user.run(code, ["(4) c"])
    assert reply.status == "ok" and "time limits" not in reply.stderr, reply
    user.run("%ddp_stop")
