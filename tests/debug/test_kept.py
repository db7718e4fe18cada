"""A kept session whose notebook dies at the prompt of a debugger."""

from __future__ import annotations

import pytest

from ddp_notebook.registry import entries
from tests.conftest import wait_until
from tests.debug.driver import Debugged
from tests.debug.front_end import FrontEndDebugger
from tests.keep.conftest import kill, notebook, runtime  # noqa: F401  # fixtures

CODE = """%%on_all_ranks
from datetime import timedelta
group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
x = torch.ones(1)
if rank == 0:
    found = 5
    breakpoint()
dist.all_reduce(x, group=group)
x.item()"""


@pytest.mark.long
def test_the_next_notebook_gets_the_prompt(notebook):  # noqa: F811
    first = Debugged(notebook("%ddp_start 2 --keep 1"))
    first.start(CODE)
    assert first.prompt() == "(rank 0) "
    first.type("p found")
    first.prompt()
    kill(first.kernel)

    second = Debugged(notebook())
    second.run("%ddp_attach")
    wait_until(lambda: "waits at input() or breakpoint()" in second.run("%ddp_attach").stdout, what="it asks")
    reply = second.run("%ddp_attach --wait", ["(2.5) p found + 1", "c"])
    assert second.prompts == ["(rank 0) "] * 2
    assert "[0] 6\n" in reply.stdout and reply.stdout.endswith("[0-1] 2.0\n")
    assert second.run("%%on_all_ranks\nx = torch.ones(1); dist.all_reduce(x); x.item()").stdout == "[0-1] 2.0\n"


@pytest.mark.long
def test_the_hours_of_a_kept_session_do_not_pause(notebook):  # noqa: F811
    first = Debugged(notebook(f"%ddp_start 2 --keep {3 / 3600}"))
    first.start(CODE)
    first.prompt()
    kill(first.kernel)
    wait_until(lambda: not entries.entries(), 15, "its time is over, although ranks stand at a prompt")


@pytest.mark.long
def test_ranks_at_a_breakpoint_run_on_for_the_next_notebook(notebook):  # noqa: F811
    first = notebook("%ddp_start 2 --keep 1")
    debugger = FrontEndDebugger(first)
    debugger.start()
    code = "%%on_all_ranks\ny = rank\ny + 1"
    debugger.set_breakpoints(code, 3)
    first.start(code)
    debugger.wait_for("stopped", 2)
    kill(first)

    second = notebook()
    assert second.run("%ddp_attach --wait").status == "ok"
    assert second.run(code).stdout == "[0] 1\n[1] 2\n", "no debugger of a front end is on"
