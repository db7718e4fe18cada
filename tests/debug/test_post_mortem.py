"""`%ddp_debug` and `%debug` after a failed, stopped or timed-out cell."""

from __future__ import annotations

import re

import pytest

from tests.debug.driver import Debugged

ALL = "%%on_all_ranks\n"
FAILS = f"""{ALL}import torch.nn.functional as F
def h(x):
    size = 4 + rank
    return F.linear(x, torch.ones(3, size))
h(torch.ones(2, 4))"""


@pytest.fixture(scope="module")
def user(kernel):
    assert kernel.run("%ddp_start 2").status == "ok"
    yield Debugged(kernel)
    kernel.run("%ddp_stop")


@pytest.mark.parametrize("command", ["%ddp_debug", "%ddp_debug 0-1", "%debug"])
def test_the_innermost_frame_of_the_user_opens(user, command):
    number = int(user.run(f"{ALL}1").stdout.count("1"))
    assert user.run(FAILS).ename == "RankError" and number
    reply = user.run(command, ["p size, x.shape", "u", "q"])
    assert user.prompts == ["(rank 1) "] * 3 and reply.status == "ok"
    lines = reply.stdout.splitlines()
    assert re.match(r"\[1\] RuntimeError: (mm: )?mat1 and mat2 shapes cannot be multiplied", lines[0])  # torch 2.15: mm
    assert lines[1].endswith("line 4 in h") and lines[2] == "[1] -> return F.linear(x, torch.ones(3, size))"
    assert lines[3] == "[1] (5, torch.Size([2, 4]))" and lines[4].endswith("line 5")
    assert "[1] 5\n" in user.run("%ddp_debug", ["p size", "q"]).stdout, "it opens again until the next cell"


def test_pdb_on_opens_a_failed_cell_at_once(user):
    user.run("%pdb on")
    try:
        reply = user.run(FAILS, ["p size", "q"])
        assert reply.ename == "RankError" and "[1] 5\n" in reply.stdout and user.prompts == ["(rank 1) "] * 2
    finally:
        user.run("%pdb off")


def test_debug_in_a_cell_of_ranks(user):
    user.run(FAILS)
    reply = user.run(f"{ALL}%debug", ["p size", "q"])
    assert "[1] 5\n" in reply.stdout
    assert "[0] no failure is kept" in reply.stdout


def test_a_timed_out_cell_has_frames_on_all_ranks(user):
    code = "import time\nif rank == 0:\n    dist.all_reduce(torch.ones(1))\nelse:\n    mine = 8\n    time.sleep(60)"
    assert user.run(f"{ALL.strip()} --timeout 0.5\n{code}").ename == "CellTimeoutError"
    reply = user.run("%ddp_debug", ["@0 p rank", "@1 p mine", "q"])
    assert reply.stderr.startswith("stopped: rank 0 at In[") and "[1] 8\n" in reply.stdout


def test_without_a_failure_one_sentence(user):
    user.run(f"{ALL}1")
    reply = user.run("%ddp_debug")
    assert reply.stdout.startswith("no failure is kept on any rank: %ddp_debug opens the last cell of a rank if")
    assert "[0-1] no failure is kept: %debug opens" in user.run(f"{ALL}%debug").stdout


def test_a_syntax_error_is_no_success(user):
    assert user.run(f"{ALL}exec('x = (')").ename == "RankError"
    reply = user.run("%ddp_debug 1")
    assert reply.stdout.startswith("no failure is kept on rank 1: ") and "not a syntax error" in reply.stdout
    assert "[0-1] no failure is kept" in user.run(f"{ALL}%debug").stdout


def test_memory_of_the_frames_is_released_by_the_next_cell(user):
    rss = f"{ALL}import psutil; psutil.Process().memory_info().rss // 10**6"

    def megabytes() -> int:
        return max(int(line.split()[-1]) for line in user.run(rss).stdout.replace("|", "\n").splitlines())

    before = megabytes()
    user.run(f"{ALL}def large():\n    held = torch.ones(100_000_000)\n    raise ValueError('no')\nlarge()")
    reply = user.run("%ddp_debug", ["p held.nbytes, __import__('psutil').Process().memory_info().rss // 10**6", "q"])
    assert "400000000" in reply.stdout
    assert megabytes() < before + 100


def test_after_an_out_of_memory_error_variables_are_described(user):
    code = "def grow(n):\n    some = torch.ones(10**6)\n    raise torch.OutOfMemoryError('CUDA out of memory')\ngrow(3)"
    assert user.run(ALL + code).ename == "RankError"
    reply = user.run("%ddp_debug")
    assert reply.stdout.splitlines()[:1] == ["[0-1] OutOfMemoryError: CUDA out of memory"]
    assert "cell line 3 in grow" in reply.stdout and "  n: int" in reply.stdout
    assert "some: float32 (1000000,) on cpu, 4.0 MB" in reply.stdout and user.prompts == []
