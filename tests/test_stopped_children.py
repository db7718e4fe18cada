"""A report names a stopped child process for which a rank waits."""

from __future__ import annotations

import re
from contextlib import closing

import psutil
import pytest

from tests.faults.holding import held
from tests.kernels import NotebookKernel, first_line_of_stderr

pytestmark = pytest.mark.long  # `test_typed` tests this with a worker of a DataLoader


@pytest.fixture(scope="module")
def ranks():
    """Start two ranks whose hang reports appear after a minute."""
    with closing(NotebookKernel()) as kernel:
        assert kernel.run("%load_ext ddp_notebook\n%ddp_start 2 --hang-after 60").status == "ok"
        yield kernel


_POPEN = "child = subprocess.Popen(['sleep', '600'], stdout=subprocess.PIPE)\n"
_WAITS_FOR_STOPPED = {
    "in a read of its output": f"{_POPEN}os.kill(child.pid, 19); child.stdout.read()",
    "for its end": f"{_POPEN}os.kill(child.pid, 19); child.wait()",
    "for what its shell runs": """subprocess.run("sh -c 'kill -STOP $$; true'; true", shell=True)""",
}


@pytest.mark.parametrize("how", _WAITS_FOR_STOPPED)
def test_a_stopped_child_of_a_rank_is_named_within_three_seconds(ranks, how):
    message = ranks.start(f"%%on_all_ranks\nimport os, subprocess\nif rank == 1: exec({_WAITS_FOR_STOPPED[how]!r})")
    sentence = r"rank 1: waits for child process \d+.*; (it|process \d+) is stopped; kill -CONT (\d+) resumes it\n"
    found = re.fullmatch(sentence, first_line_of_stderr(ranks, 4.0))
    assert found is not None and (found[1] == "it") == ("shell" not in how)
    psutil.Process(int(found[2])).kill()
    assert ranks.finish(message).status == "ok"


_AT_WORK = {
    "its rank is at work": "os.kill(child.pid, 19); until = time.monotonic() + 4\n"
    "    while time.monotonic() < until: pass",
    "its rank sleeps": "os.kill(child.pid, 19); time.sleep(4)",
    "for a moment": "os.kill(child.pid, 19); time.sleep(0.3); os.kill(child.pid, 18)\n"
    "    try: child.wait(3)\n    except subprocess.TimeoutExpired: pass",
}


@pytest.mark.parametrize("how", _AT_WORK)
def test_a_child_that_is_stopped_on_purpose_is_not_named(ranks, how):
    code = f"import os, time, subprocess\nif rank == 1:\n    {_POPEN}    {_AT_WORK[how]}\n    child.kill()"
    reply = ranks.run(f"%%on_all_ranks\n{code}")
    assert reply.status == "ok" and not reply.stderr


def test_a_child_under_a_debugger_is_not_named(ranks):
    message = ranks.start(f"%%on_all_ranks\nif rank == 1:\n    {_POPEN}    print(child.pid); child.wait()")
    pid = int(ranks.wait_for_text("[1] ").removeprefix("[1] "))
    with held([pid]):
        assert not first_line_of_stderr(ranks, 4.0)
    psutil.Process(pid).kill()
    assert ranks.finish(message).status == "ok"
