"""Random sequences of debugger commands, stops, deaths, Tabs and `%ddp_whos` in one session.

`DDP_NOTEBOOK_SOAK_SEED` repeats a series, `DDP_NOTEBOOK_DEBUGGER_SEQUENCES` sets its length.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from typing import Any

import psutil
import pytest

from tests.conftest import wait_until
from tests.kernels import NotebookKernel, Reply
from tests.long.test_faults import SEED
from tests.long.watching import pids_of_ranks

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

SEQUENCES = int(os.environ.get("DDP_NOTEBOOK_DEBUGGER_SEQUENCES", "100"))
ALL = "%%on_all_ranks\n"
SETUP = """%%on_all_ranks --quiet
import asyncio, threading, time
from datetime import timedelta
group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), process_group=group)
def f(a):
    for i in range(3):
        a = a + i
        breakpoint()
    dist.barrier(group)
    return a
def g(a):
    size = a + 1
    if a == 1: raise ValueError('bad')
    dist.barrier(group)
def train(steps, stop_at):
    for step in range(steps):
        loss = model(torch.ones(4, 8)).sum()
        if step == stop_at and rank == 0:
            breakpoint()
        loss.backward()
"""
PROGRAMS = [
    "f(rank)",
    "if rank == 0: breakpoint()\ny = torch.ones(1)\ndist.all_reduce(y, group=group)\ny.item()",
    "if rank == 1: breakpoint()\ndist.monitored_barrier(group)",
    "train(4, 1)",
    "thread = threading.Thread(target=f, args=(rank,))\nthread.start()\nthread.join()",
    "for step in range(3):\n    dist.breakpoint(rank=1, skip=1)",
    "await asyncio.sleep(0.01)\nbreakpoint()\nz = 1\nawait asyncio.sleep(0)\nz",
    "g(rank)",
]
TYPED = [
    *("n", "n", "s", "r", "c", "c", "p a", "p group", "w", "u", "d", "l", "a", "pp locals()", "b 3", "b 4, rank > 0"),
    *("tbreak 5", "clear 1", "p nothing", "1 / 0", "y = 5", "", "@0 n", "@1", "@all", "@all c", "@1 p rank", "@9 n"),
    *("p torch.ones(2).sum()", "unt", "j 3", "interact", "commands 1", "display rank", "whatis rank", "until 9"),
]
TABS = ["%%on_all_ranks\nmod", "%%on_all_ranks\nmodel.", "%%on_all_ranks\ngro", "%%on_ranks 1\nra"]
WHOS = ["%ddp_whos", "%ddp_whos mo*", "%ddp_whos --exact"]
SUM = "x = torch.ones(1); dist.all_reduce(x); dist.all_reduce(x, group=group); x.item()"
GROUPS = "dist.distributed_c10d._world.pg_map"
STATE = f"""{ALL}import bdb, sys, threading, psutil
from ddp_notebook.rank.group.held_time import CLOCK as _clock
print(sorted({{g._get_backend(torch.device('cpu')).options._timeout.total_seconds() for g in {GROUPS}}}),
      sys.gettrace(), [b for b in bdb.Breakpoint.bpbynumber if b], _clock._since_ns,
      len(psutil.Process().children()))"""
THREADS = "import threading; print([f'{type(t).__name__} {t.name}' for t in threading.enumerate()])"
OF_PYZMQ = "GarbageCollectorThread Thread"  # it starts with the first large message


class Debugged:
    """A session whose user debugs cells at random.

    Args:
        kernel: the notebook.
        chance: source of the choices.
    """

    def __init__(self, kernel: NotebookKernel, chance: random.Random) -> None:
        self.kernel = kernel
        self.chance = chance
        self.done: list[str] = []  # the events of this sequence
        self.counts: Counter[str] = Counter()
        self.slowest_tab_s = 0.0
        version = kernel.run("import ipykernel; print(ipykernel.__version__)").stdout
        self._can_complete = int(version.split(".")[0]) >= 7  # earlier ones complete only between cells
        self._answers: dict[str, dict[str, Any]] = {}  # content of replies by message id
        self._idle: set[str] = set()  # requests that have ended
        self._victims: list[int] = []  # at most one

    def set_up(self) -> None:
        assert self.kernel.run(SETUP).status == "ok"
        self.pids = pids_of_ranks(self.kernel)

    def play(self) -> None:
        """Run one cell with random events, and heal the session if a rank died."""
        self.done.clear()
        self._victims.clear()
        program = self.chance.choice(PROGRAMS)
        reply = self._debug(ALL + program)
        if program == "g(rank)" and not self._victims:
            reply = self._debug("%ddp_debug")
        assert reply.ename in ("", "KeyboardInterrupt", "RankDiedError", "RankError", "SessionBrokenError"), reply
        if self._victims:
            assert self.kernel.run("%ddp_heal").status == "ok"
            self.set_up()
        if self.chance.random() < 0.3:
            self._note("whos")
            assert self.kernel.run(self.chance.choice(WHOS)).status == "ok"

    def _note(self, event: str) -> None:
        self.done.append(event)
        self.counts[event.split()[0] if event else "(empty)"] += 1

    # ---- one cell

    def _debug(self, code: str) -> Reply:
        """Run a cell. Type some lines at its prompts, and then let it end."""
        self._note("cell")
        self.done.append(code)
        message = self.kernel.client.execute(code, allow_stdin=True)
        reply, typed, lines = Reply(), 0, self.chance.randrange(8)
        while self._prompted(message, reply):
            if typed >= lines:
                self._end()
            else:
                self._act(message, reply)
            typed += 1
            assert typed < 60, "the cell does not end"
        answer = self._answers.pop(message)
        reply.status, reply.ename, reply.evalue = (answer.get(name, "") for name in ("status", "ename", "evalue"))
        return reply

    def _prompted(self, message: str, reply: Reply, timeout_s: float = 60.0) -> bool:
        """Wait for the next prompt. Return False if the cell ends before."""
        client, until = self.kernel.client, time.monotonic() + timeout_s
        while time.monotonic() < until:
            if client.stdin_channel.msg_ready():
                client.stdin_channel.get_msg(timeout=0)
                return True
            self._read(reply)
            if message in self._answers and message in self._idle:
                return False
            time.sleep(0.005)
        raise TimeoutError(f"neither a prompt nor an end in {timeout_s:g} s: {reply}")

    def _read(self, reply: Reply) -> None:
        client = self.kernel.client
        while client.shell_channel.msg_ready():
            answer = client.shell_channel.get_msg(timeout=0)
            self._answers[answer["parent_header"]["msg_id"]] = answer["content"]
        while client.iopub_channel.msg_ready():
            shown = client.iopub_channel.get_msg(timeout=0)
            reply.read(shown)
            if shown["msg_type"] == "status" and shown["content"]["execution_state"] == "idle":
                self._idle.add(shown["parent_header"].get("msg_id", ""))

    def _act(self, message: str, reply: Reply) -> None:
        """Do something at a prompt. It ends with a line or with the cell."""
        drawn = self.chance.random()
        if drawn < 0.2:
            self.tab(reply)
        elif drawn < 0.27 and not self._victims:
            self._victims.append(self.chance.randrange(2))
            self._note(f"kill {self._victims[0]}")
            os.kill(self.pids[self._victims[0]], signal.SIGKILL)
        if self.chance.random() < 0.3:
            time.sleep(self.chance.uniform(0, 0.4))
        if self.chance.random() < 0.06:
            self._stop()
        else:
            self._type(self.chance.choice(TYPED))

    def _end(self) -> None:
        if self.chance.random() < 0.4:
            self._stop()
        else:
            self._type(self.chance.choice(["q", "q", "c", "quit", "@all q"]))

    def _type(self, line: str) -> None:
        self._note(line)
        self.kernel.client.input(line)

    def _stop(self) -> None:
        self._note("(stop)")
        self.kernel.interrupt()

    def tab(self, reply: Reply) -> None:
        """Request completions or help while the prompt is open."""
        if not self._can_complete:
            return
        code = self.chance.choice(TABS)
        self._note(f"tab {code!r}")
        request = self.chance.choice([self.kernel.client.complete, self.kernel.client.inspect])
        began_s, asked = time.monotonic(), request(code, len(code))
        while asked not in self._answers:
            assert time.monotonic() < began_s + 20, "no reply to a Tab"
            self._read(reply)
            time.sleep(0.002)
        assert self._answers.pop(asked)["status"] == "ok"
        self.slowest_tab_s = max(self.slowest_tab_s, time.monotonic() - began_s)

    # ---- the session is whole

    def state(self) -> str:
        """Return facts about the ranks that no sequence may change."""
        return self.kernel.run(STATE).stdout

    def threads(self) -> set[str]:
        """Return the names of threads on the ranks, and of those of the notebook."""
        of_ranks, of_notebook = (self.kernel.run(f"{magic}{THREADS}").stdout for magic in (ALL, ""))
        found = {f"rank: {name}" for name in re.findall(r"'([^']+)'", of_ranks)}
        found |= set(re.findall(r"'([^']+)'", of_notebook))
        return {re.sub(r"-\d+", "", name) for name in found} - {OF_PYZMQ}

    def held(self) -> dict[str, int]:
        """Return counts of the notebook's process that must not grow."""
        process = psutil.Process(self.kernel.pid)
        return {"processes": len(process.children(recursive=True)), "open files": process.num_fds()}

    def sums(self) -> str:
        return self.kernel.run(ALL + SUM).stdout


@pytest.fixture(scope="module")
def front(kernel):
    kernel.run("%ddp_start 2")  # leaves the host server, which waits for the next session
    kernel.run("%ddp_stop")
    return kernel


@pytest.mark.parametrize("guard", ["on", "off"], ids=["guard on", "guard off"])
def test_random_sequences_leave_the_session_whole(front, tally, guard):
    print(f"seed {SEED}")
    kernel, user = front, Debugged(front, random.Random(SEED))
    assert kernel.run(f"%ddp_start 2 --grace 1 --hang-after 1 --live off --guard {guard}").status == "ok"
    user.set_up()
    for line in ("%ddp_whos", f"{ALL}raise ValueError('no')"):  # these may start threads that stay
        kernel.run(line)
    message = kernel.client.execute(f"{ALL}breakpoint()", allow_stdin=True)
    kernel.client.get_stdin_msg(timeout=60)
    user.tab(Reply())
    kernel.client.input("c")
    assert kernel.finish(message).status == "ok" and user.sums() == "[0-1] 4.0\n"
    user.tab(Reply())
    before, threads, held = user.state(), user.threads(), user.held()
    try:
        what = "random sequences of debugger commands, stops, deaths, Tabs and whos"
        for n in tally(SEQUENCES, f"{what}, guard {guard}, seed {SEED}"):
            user.play()
            assert user.sums() == "[0-1] 4.0\n", (n, user.done)
            assert user.state() == before != "", (n, user.done)
            wait_until(lambda: user.threads() <= threads, 20, lambda: f"threads are left: {user.threads() - threads}")
    except (AssertionError, TimeoutError):
        print(f"sequence {n}: {user.done}")
        raise
    finally:
        print(f"seed {SEED}: {dict(user.counts)}; slowest Tab {user.slowest_tab_s * 1000:.0f} ms")
        print(f"processes and files before {held}, after {user.held()}")
    assert user.held()["processes"] == held["processes"]
    assert user.held()["open files"] <= held["open files"] + 4
    kernel.run("%ddp_stop")
