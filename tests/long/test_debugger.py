"""The debugger of ranks: time of a command, and many stops in one session."""

from __future__ import annotations

import random
import statistics

import pytest

from tests.conftest import busy_factor, is_within
from tests.debug.driver import Debugged
from tests.keep.conftest import kill, notebook, runtime  # noqa: F401  # fixtures

pytestmark = [pytest.mark.long, pytest.mark.alone]
ALL = "%%on_all_ranks\n"
CODE = f"""{ALL}x = torch.ones(4)
breakpoint()
for step in range(1000):
    y = x + step
    z = y.sum()"""
COMMANDS = ["p step, z" if at % 3 == 2 else "n" for at in range(60)]
FUNCTION = f"""{ALL}def f(a):
    for i in range(3):
        a = a + i
        breakpoint()
    dist.barrier()
    return a"""
GROUPS = "dist.distributed_c10d._world.pg_map"
TIMEOUTS = f"[g._get_backend(device).options._timeout.total_seconds() for g in {GROUPS}]"
# The thread `ddp-loader-workers` ends soon.
THREADS = "sorted(t.name for t in threading.enumerate() if t.name != 'ddp-loader-workers')"
STATE = f"{ALL}import sys, threading\n{THREADS}, sys.gettrace(), {TIMEOUTS}"
TYPED = ["n", "s", "p a", "w", "u", "d", "@0 n", "@1", "@all", "l", "b 3", "p nothing", "1 / 0"]
SUM = f"{ALL}x = torch.ones(1); dist.all_reduce(x); x.item()"


KEPT = f"""{ALL}if rank == 0:
    found = {{n}}
    breakpoint()
y = torch.ones(1)
dist.all_reduce(y)
y.item()"""


@pytest.fixture(scope="module")
def user(kernel):
    kernel.run("%ddp_start 4")  # leaves the host server, which waits for the next session
    kernel.run("%ddp_stop")
    return Debugged(kernel)


@pytest.mark.parametrize(("ranks", "limit_s"), [(2, 0.08), (4, 0.12)])
def test_the_time_of_a_command(user, ranks, limit_s):
    assert user.run(f"%ddp_start {ranks}").status == "ok"
    reply = user.run(CODE, ["n", "n", "n", *COMMANDS, "q"])
    median_s = statistics.median(user.waits_s[5:])
    user.run("%ddp_stop")
    assert reply.status == "ok"
    print(f"{ranks} ranks: {median_s * 1000:.1f} ms a command, load factor {busy_factor():.1f}")
    assert is_within(median_s, limit_s)


def test_twenty_ends_at_the_prompt(user):
    """The next collective is right each time, and variables are kept."""
    user.run("%ddp_start 2")
    for at in range(20):
        is_stop = at % 4 < 3
        code = f"{ALL}kept = {at}\nif rank == {at % 2}: breakpoint()\ndist.barrier()\nkept = -1"
        reply = user.run(code, ["(stop)" if is_stop else "q"])
        assert reply.ename == ("KeyboardInterrupt" if is_stop else "") and is_within(reply.duration_s, 1.0), at
        assert user.run(f"{SUM}, kept").stdout == f"[0-1] (2.0, {at})\n"
    user.run("%ddp_stop")


@pytest.mark.timeout(900)
def test_twenty_notebooks_die_at_the_prompt(notebook, tally):  # noqa: F811
    """The next notebook gets the prompt of the kept session."""
    driver = Debugged(notebook("%ddp_start 2 --keep 1"))
    for n in tally(20, "a notebook dies at the prompt: the next one gets it"):
        driver.start(KEPT.format(n=n))
        assert driver.prompt() == "(rank 0) "
        kill(driver.kernel)
        driver.kernel.close()
        driver = Debugged(notebook())
        driver.run("%ddp_attach")
        reply = driver.run("%ddp_attach --wait", ["p found + 1", "c"])
        assert driver.prompts == ["(rank 0) "] * 2 and f"[0] {n + 1}\n" in reply.stdout, reply
        assert driver.run(SUM).stdout == "[0-1] 2.0\n"


def test_random_commands_leave_the_session_whole(user):
    chance = random.Random(7)
    user.run("%ddp_start 2")
    user.run(FUNCTION)
    user.run(f"{ALL}f(0)", ["q"])
    before = user.run(STATE).stdout
    for _ in range(60):
        lines = [chance.choice(TYPED) for _ in range(chance.randrange(1, 6))]
        reply = user.run(f"{ALL}f(rank)", [*lines, chance.choice(["q", "(stop)"])])
        assert reply.status == "ok" or reply.ename == "KeyboardInterrupt", lines
        assert user.run(SUM).stdout == "[0-1] 2.0\n", lines
    assert user.run(STATE).stdout == before
    user.run("%ddp_stop")
