"""Debuggers in cells of a notebook with two ranks."""

from __future__ import annotations

import pdb
import re

import pytest

from tests.conftest import is_within
from tests.debug.driver import Debugged

ALL = "%%on_all_ranks\n"
SUM = f"{ALL}x = torch.ones(1)\ndist.all_reduce(x)\nx.item()"


@pytest.fixture(scope="module")
def user(kernel):
    assert kernel.run("%ddp_start 2 --grace 1 --hang-after 1").status == "ok"
    yield Debugged(kernel)
    kernel.run("%ddp_stop")


def is_whole(user: Debugged) -> bool:
    """Return whether the next collective is right."""
    return user.run(SUM).stdout == "[0-1] 2.0\n"


def test_all_ranks_stop_and_step_together(user):
    code = f"{ALL}x = rank * 10\nbreakpoint()\ny = x + 1\ndist.barrier()\nprint('y', y)"
    reply = user.run(code, ["p x", "@1 p x", "n", "n", "@0", "p y", "@all", "c"])
    assert user.prompts == ["(ranks 0-1) "] * 5 + ["(rank 0) "] * 2 + ["(ranks 0-1) "]
    assert reply.status == "ok" and reply.stderr == ""
    assert reply.stdout.splitlines() == [
        *("[0-1] > cell line 2", "[0-1] -> breakpoint()", "[0] 0", "[1] 10", "[1] 10"),
        *("[0-1] > cell line 3", "[0-1] -> y = x + 1", "[0-1] > cell line 4", "[0-1] -> dist.barrier()"),
        *("[0] 1", "[0-1] y 1 | 11"),
    ]


def test_ranks_at_different_lines_are_named(user):
    code = f"{ALL}if rank == 0:\n    breakpoint()\nelse:\n    breakpoint()\nz = 1"
    reply = user.run(code, ["n", "@5 n", "c"])
    assert reply.stderr.splitlines() == [
        "stopped: rank 0 at cell line 2; rank 1 at cell line 4",
        "rank 5 does not exist; the ranks are 0 to 1",
    ]


FUNCTION = f"""{ALL}import pdb
def g(n):
    total = 0
    for i in range(n):
        total += i
    return total
pdb.set_trace()
w = g(5)
print(w)"""


def test_breakpoints_may_have_conditions(user):
    reply = user.run(FUNCTION, ["b 5, i > 2", "c", "p i, total", "u", "d", "clear 1", "tbreak 6", "c", "r", "c"])
    lines = [line.removeprefix("[0-1] ") for line in reply.stdout.splitlines()]
    assert lines[3:6] == ["> cell line 5 in g", "-> total += i", "(3, 3)"]
    assert lines[-1] == "10" and "> cell line 6 in g" in lines
    assert user.run(f"{ALL}g(5)").stdout == "[0-1] 10\n", "breakpoints end with their cell"


def test_frames_of_ipython_and_of_this_package_are_hidden(user):
    reply = user.run(f"{ALL}def f(a):\n    breakpoint()\n    return a\nf(rank)", ["w", "n", "n", "c"])
    lines = [line.removeprefix("[0-1] ") for line in reply.stdout.splitlines()]
    assert lines[2:6] == ["  cell line 4", "-> f(rank)", "> cell line 2 in f", "-> breakpoint()"]
    assert not re.search(r"ipykernel/|IPython|ddp_notebook", reply.stdout)
    assert "interactiveshell" not in reply.stdout


def test_it_stops_in_a_thread_a_file_and_after_an_await(user, tmp_path):
    path = tmp_path / "of_user.py"
    path.write_text("def h(a):\n    breakpoint()\n    return a + 1\n")
    code = f"{ALL}import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom of_user import h\nh(rank)"
    reply = user.run(code, ["p a", "n", "c"])
    assert f"> {path}(2)h()" in reply.stdout and "-> return a + 1" in reply.stdout and "[1] 2" in reply.stdout
    code = f"{ALL}import asyncio\nawait asyncio.sleep(0.01)\nbreakpoint()\nv = 7\nawait asyncio.sleep(0)\nprint(v)"
    reply = user.run(code, ["n", "n", "p v", "c"])
    assert "[0-1] > cell line 5" in reply.stdout and reply.stdout.endswith("[0-1] 7\n")
    code = f"""{ALL}import threading
def work():
    a = rank + 5
    breakpoint()
    done.append(a)
done = []
thread = threading.Thread(target=work)
thread.start()
thread.join()
done"""
    reply = user.run(code, ["p a", "n", "c"])
    assert reply.status == "ok" and "[0-1] -> done.append(a)" in reply.stdout and "[0] [5]" in reply.stdout


@pytest.mark.skipif(not hasattr(pdb, "set_trace_async"), reason="Python 3.14 has it")
def test_set_trace_async_is_refused(user):
    reply = user.run(f"{ALL}import pdb\nawait pdb.set_trace_async()")
    assert reply.ename == "RankError" and "Use breakpoint()" in reply.evalue
    assert is_whole(user)


def test_dist_breakpoint_stops_one_rank_and_changes_no_timeout(user):
    limits = (
        f"{ALL}[g._get_backend(device).options._timeout.total_seconds() for g in dist.distributed_c10d._world.pg_map]"
    )
    before = user.run(limits).stdout
    code = f"{ALL}for s in range(4):\n    dist.breakpoint(rank=1, skip=2, timeout_s=7)\nprint(s)"
    reply = user.run(code, ["p s", "c", "c"])
    assert user.prompts == ["(rank 1) "] * 3 and "[1] 2\n" in reply.stdout and reply.stdout.endswith("[0-1] 3\n")
    assert user.run(limits).stdout == before != ""


def test_q_ends_the_cell_on_all_ranks_without_a_traceback(user):
    code = f"{ALL}if rank == 1:\n    found = 5\n    breakpoint()\nx = torch.ones(1); dist.all_reduce(x)\nfound = 6"
    reply = user.run(code, ["p found", "q"])
    assert (reply.status, reply.traceback) == ("ok", "")
    assert user.run("%%on_ranks 1\nfound").stdout == "[1] 5\n"
    assert is_whole(user)


@pytest.mark.parametrize("command", ["!dist.barrier()", "p dist.barrier()"])
def test_stop_ends_a_command_that_waits(user, command):
    cell = user.start(f"{ALL}breakpoint()\nkept = 9")
    reply = user.finish(cell, [f"@0 {command}", "(stop)"], 20.0)
    assert reply.ename == "KeyboardInterrupt" and is_whole(user)


def test_commands_of_pdb_that_open_another_debugger_are_refused(user):
    reply = user.run(f"{ALL}def f():\n    return 1\nbreakpoint()\nz = f()", ["debug f()", "interact", "p rank", "c"])
    assert reply.status == "ok" and reply.stdout.count("this command does not work on a rank") == 2


@pytest.mark.alone
def test_stop_at_the_prompt_ends_the_cell(user):
    reply = user.run(f"{ALL}kept = rank\nbreakpoint()\nkept = 7", ["(stop)"])
    assert reply.ename == "KeyboardInterrupt" and is_within(reply.duration_s, 1.0)
    assert user.run(f"{ALL}kept").stdout == "[0] 0\n[1] 1\n" and is_whole(user)


def test_a_thread_at_the_prompt_ends_with_a_stopped_cell(user):
    code = f"""{ALL}import threading
def work():
    for _ in range(3):
        breakpoint()
thread = threading.Thread(target=work)
thread.start()
thread.join()"""
    assert user.run(code, ["(1) p rank", "(stop)"]).ename == "KeyboardInterrupt"  # both threads have stopped
    assert user.run(f"{ALL}thread.join(10); thread.is_alive()").stdout == "[0-1] False\n"


def test_no_frame_is_kept_after_q(user):
    code = f"""{ALL}import gc, weakref
class Large: ...
def f():
    global held
    large = Large()
    held = weakref.ref(large)
    breakpoint()
    large = None
f()"""
    user.run(code, ["u", "d", "q"])
    kept = "gc.collect(); held() is not None, '__pdb_convenience_variables' in globals()"
    assert user.run(ALL + kept).stdout == "[0-1] (False, False)\n"


def test_limits_of_the_cell_are_held(user):
    """The session has a grace time and a hang card after 1 s."""
    code = "if rank == 0: breakpoint()\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()"
    reply = user.run(f"{ALL.strip()} --timeout 1.5\n{code}", ["(2.5) c"])
    assert reply.status == "ok" and reply.stdout.endswith("[0-1] 2.0\n")
    assert reply.stderr == "stopped: rank 0 at cell line 1\n" and reply.displays == []
    reply = user.run(
        f"{ALL.strip()} --timeout 1.5\nif rank == 0: breakpoint()\n__import__('time').sleep(60)", ["(2) c"]
    )
    assert reply.ename == "CellTimeoutError" and reply.evalue.startswith("the cell took longer than 1.5 s")


def test_a_rank_that_fails_is_reported_at_the_prompt(user):
    code = f"{ALL}import time\nif rank == 0: breakpoint()\nelse:\n    time.sleep(0.4); raise ValueError('bad data')"
    message = user.start(code)
    user.prompt()
    user.kernel.wait_for_text("rank 1 has failed: ValueError: bad data, at cell line 4")
    user.type("(1.2) p rank")  # longer than the grace time
    user.prompt()
    user.type("c")
    reply = user.kernel.finish(message)
    assert reply.ename == "RankError" and "succeeded: rank 0" in reply.evalue
    assert is_whole(user)


NOBODY = r"breakpoint\(\) reads commands from the notebook, and this cell accepts no input: run it without --quiet"


def test_without_a_user_an_error_names_the_reason(user):
    for code in (f"{ALL.strip()} --quiet\nbreakpoint()", f"{ALL}breakpoint()"):
        reply = user.kernel.finish(user.kernel.client.execute(code, allow_stdin="quiet" in code))
        assert reply.ename == "RankError" and re.search(NOBODY, reply.evalue)
        assert "cmd.py" not in reply.traceback
    user.run(f"{ALL.strip()} --background\nbreakpoint()")
    assert re.search(NOBODY, user.run("%ddp_wait").evalue)
    code = """from torch.utils.data import DataLoader
class Data:
    def __len__(self): return 4
    def __getitem__(self, i): breakpoint()
list(DataLoader(Data(), num_workers=1, multiprocessing_context='fork'))"""
    reply = user.run(ALL + code)
    assert "in a process that the rank has started: set num_workers=0 in the DataLoader" in reply.evalue
    assert is_whole(user)


def test_mesh_dimensions_select_ranks(user):
    code = (
        f"{ALL}def h():\n    mesh = dist.init_device_mesh('cpu', (2,), mesh_dim_names=('tp',))\n    breakpoint()\nh()"
    )
    reply = user.run(code, ["@tp=1 p rank", "@pp=0 p rank", "c"])
    assert "[1] 1\n" in reply.stdout and "[0] 0" not in reply.stdout
    assert "no mesh in a variable of the ranks has a dimension 'pp'; the names are host, tp\n" in reply.stderr
    code = f"{ALL}mesh = dist.init_device_mesh('cpu', (2,), mesh_dim_names=('tp',))\nif rank == 0: breakpoint()"
    reply = user.run(code, ["@tp=-1 p rank", "@tp=0-1 p rank + 5", "@host=x p rank", "c"])
    assert reply.stderr.count("rank 1: not stopped in a debugger\n") == 2 and "[0] 5\n" in reply.stdout
    assert "no rank is on the host 'x'; the hosts are " in reply.stderr
