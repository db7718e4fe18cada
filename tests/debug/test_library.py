"""A library opens a debugger, although no cell names one."""

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
LINE = r"time limits run on while the debugger waits, on rank 1: all_reduce #\d+ of group \[0,1\] \(2 s\)"


@pytest.fixture(scope="module")
def user(kernel):
    kernel.run("%ddp_start 2")  # leaves the host server, which waits for the next session
    kernel.run("%ddp_stop")
    return Debugged(kernel)


@pytest.mark.long
def test_an_operation_that_began_before_is_named(user, tmp_path):
    (tmp_path / "stops.py").write_text("def stop():\n    breakpoint()\n")
    assert user.run("%ddp_start 2").status == "ok" and user.run(GROUP).status == "ok"
    imports = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from stops import stop"
    reply = user.run(f"{ALL}{imports}{CODE}", ["p 1", "c"])
    assert re.search(LINE, reply.stderr), reply.stderr
    reply = user.run(f"{ALL}if rank == 0: stop()\ndist.barrier(group)", ["(4) c"])
    assert reply.status == "ok" and "time limits" not in reply.stderr, "the session expects debuggers from now on"
    user.run("%ddp_stop")
