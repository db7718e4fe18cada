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


MARGIN = "%%on_all_ranks\ny = rank\ny + 1"


def stop_at_breakpoint(kernel, hours: float = 1) -> tuple[FrontEndDebugger, str, list[int]]:
    """Start a session, and let its ranks stop in the margin. Return the debugger, the cell, and the threads."""
    assert kernel.run(f"%ddp_start 2 --keep {hours}").status == "ok"
    debugger = FrontEndDebugger(kernel)
    debugger.start()
    debugger.set_breakpoints(MARGIN, 3)
    cell = kernel.start(MARGIN)
    return debugger, cell, [one["threadId"] for one in debugger.wait_for("stopped", 2)]


@pytest.mark.long
def test_the_hours_do_not_pause_at_a_breakpoint(notebook):  # noqa: F811
    first = notebook()
    stop_at_breakpoint(first, hours=3 / 3600)
    kill(first)
    wait_until(lambda: not entries.entries(), 15, "its time is over, although ranks have stopped")


@pytest.mark.long
def test_ranks_at_a_breakpoint_run_on_for_the_next_notebook(notebook):  # noqa: F811
    first = notebook()
    stop_at_breakpoint(first)
    kill(first)

    second = notebook()
    assert second.run("%ddp_attach --wait").status == "ok"
    assert second.run(MARGIN).stdout == "[0] 1\n[1] 2\n", "no debugger of a front end is on"


@pytest.mark.long
def test_they_also_run_on_for_a_notebook_whose_debugger_is_on(notebook):  # noqa: F811
    first = notebook()
    stop_at_breakpoint(first)
    kill(first)

    second = notebook()
    debugger = FrontEndDebugger(second)
    debugger.start()
    assert debugger.finish(second.start("%ddp_attach --wait")).status == "ok"
    debugger.set_breakpoints(MARGIN, 3)
    cell = second.start(MARGIN)
    for one in debugger.wait_for("stopped", 2):
        debugger.ask("continue", threadId=one["threadId"])
    assert debugger.finish(cell).stdout == "[0] 1\n[1] 2\n"


@pytest.mark.long
def test_a_notebook_that_only_looks_leaves_ranks_at_a_breakpoint(notebook):  # noqa: F811
    debugger, cell, threads = stop_at_breakpoint(notebook())
    observer = notebook()
    assert observer.run("%ddp_attach").status == "ok"
    debugger.read(1)
    assert sorted(debugger.ask("debugInfo")["body"]["stoppedThreads"]) == sorted(threads)
    for thread in threads:
        debugger.ask("continue", threadId=thread)
    assert debugger.finish(cell).stdout == "[0] 1\n[1] 2\n"
