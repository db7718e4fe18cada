"""Ranks that die while others are at the prompt of a debugger."""

from __future__ import annotations

import pytest

from tests.debug.driver import Debugged

CODE = """%%on_all_ranks
import os, time
if rank == 0:
    breakpoint()
else:
    time.sleep(0.4)
    os._exit(3)"""


@pytest.fixture(scope="module")
def user(kernel):
    kernel.run("%ddp_start 2")  # leaves the host server, which waits for the next session
    kernel.run("%ddp_stop")
    return Debugged(kernel)


def test_a_dead_rank_is_reported_at_the_prompt(user):
    kernel = user.kernel
    assert user.run("%ddp_start 2").status == "ok"
    message = user.start(CODE)
    user.prompt()
    kernel.wait_for_text("rank 1 has died: exited with status 3")
    user.type("p rank")
    user.prompt()
    user.type("c")
    assert kernel.finish(message).ename == "RankDiedError"
    assert user.run("%ddp_heal").status == "ok"
    assert user.run("%%on_all_ranks\nx = torch.ones(1); dist.all_reduce(x); x.item()").stdout == "[0-1] 2.0\n"
    user.run("%ddp_stop")
