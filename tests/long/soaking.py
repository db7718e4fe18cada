"""A session with random faults of all kinds, and the checks after each of them."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.conftest import wait_until
from tests.keep.conftest import kill as kill_kernel
from tests.kernels import NotebookKernel, Reply
from tests.long.watching import pids_of_ranks
from tests.test_cell_table import by_rank

RANKS = 3
_CELL_S = 30.0  # no cell here takes nearly as long
_SET_UP = """%%on_ranks {ranks} --quiet
import time, ddp_notebook
kept = [rank]
"""
_MODEL = """%%on_all_ranks --quiet
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
_CHECK = """%%on_all_ranks --fold off
x = torch.full((256,), rank + 1.0); dist.all_reduce(x); print('sum', x.unique().tolist(), kept)
"""
_LOOP = """%%on_all_ranks{options}
print('cell {number} on', chr(97 + rank), 'begins')
for _ in range({steps}):
    dist.all_reduce(torch.ones(64))
    time.sleep(0.005)
print('cell {number} on', chr(97 + rank), 'ends')  # lines that differ in numbers only are folded
"""
_SURVIVING = """%%on_all_ranks
done = []
for step in ddp_notebook.survive(model, optimizer, done, steps={steps}):
    with step:
        if not done: print('cell {number} on', chr(97 + rank), 'begins')
        optimizer.zero_grad(); model(torch.ones(4, 8)).sum().backward(); optimizer.step()
        time.sleep(0.005)
        done.append(int(step))
assert done == list(range({steps})), done
"""
_JOB = """%%on_all_ranks --background
for _ in range({steps}):
    dist.all_reduce(torch.ones(64))
    time.sleep(0.005)
print('job {number} on', rank, 'ends')
"""
_CELLS = [  # and the exception that ends each
    ("for i in range(2000): print('line', i)", ""),
    ("import sys; print('text' * 50_000); print('error', file=sys.stderr)", ""),
    ("from IPython.display import display, HTML\nfor i in range(20): display(HTML('<b>%d</b>' % i))", ""),
    ("dist.all_reduce(torch.ones(3 + rank))", "RankError"),
    ("if rank == 1: raise ValueError('only one')\ndist.barrier()", "RankError"),
    ("inner = dist.new_group(list(range(world_size))); dist.all_reduce(torch.ones(2), group=inner)", ""),
    (
        "inner = globals().pop('inner', None)\n"  # a resize may have destroyed it
        "if inner in dist.distributed_c10d._world.pg_map: dist.destroy_process_group(inner)",
        "",
    ),
    ("model(torch.ones(2, 8)).sum().backward()", ""),
    ("1 / 0", "RankError"),
]
_FLOODS = [
    "i = 0\nprint('begins')\nwhile True: i += 1; print(i)",
    "from IPython.display import clear_output\ni = 0\nprint('begins')\n"
    "while True: i += 1; clear_output(wait=True); print('begins', i)",
    "from IPython.display import display\nshown = display('begins', display_id=True)\ni = 0\nprint('begins')\n"
    "while True: i += 1; shown.update(i)",
    "from ipywidgets import IntProgress\nfrom IPython.display import display\n"
    "bar = IntProgress(max=10**9); display(bar); print('begins')\n"
    "while True: bar.value += 1",
]
_FOR_EVER = 20_000  # steps; longer than any limit here
_A_WHILE = 200  # more than a second, so that a fault at its start occurs during it
_STRIKES_S = 0.3  # longest delay of a fault
_SERVERS = "import ddp_notebook\nprint('pids', *ddp_notebook.current().ranks.pids('host server'))"


class Soak:
    """Faults in a row. The session continues after each fault. If it does not survive one, a new session is started.

    Args:
        make: Function that starts a kernel, and runs a line in it.
        keeper: Function that returns the process id of the keeper; None if the session is not kept.
        seed: Seed of the random choices.
    """

    def __init__(self, make: Callable[[str], NotebookKernel], keeper: Callable[[], int] | None, seed: int) -> None:
        self._make = make
        self._keeper = keeper
        self._chance = random.Random(seed)
        self.tried: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.failed: list[str] = []
        self.worst_s: dict[str, float] = defaultdict(float)
        self.held: list[dict[str, int]] = []  # resources of the session's lasting processes, sampled repeatedly
        self._number = 0
        self.kinds: dict[str, Callable[[], float]] = {
            "kill": self._kill,
            "kill between cells": self._kill_between,
            "kill under survive": self._kill_under_survive,
            "hang": self._hang,
            "raise": self._raise,
            "stop": self._stop,
            "stopped process": self._stopped_process,
            "resize": self._resize,
            "cell": self._cell,
            "flood": self._flood,
            "job": self._job,
            "cancelled job": self._cancelled_job,
            "pull and push": self._pull_and_push,
            "cleaned folders": self._cleaned_folders,
            "stopped host server": lambda: self._stopped_service(self._host_server()),
        }
        if keeper is not None:
            self.kinds["stopped keeper"] = lambda: self._stopped_service(keeper())
            self.kinds["second notebook"] = self._second_notebook
            self.kinds["takeover"] = self._takeover
            self.kinds["kernel death"] = self._kernel_death
            self.kinds["kernel death in a cell"] = self._kernel_death_in_a_cell
        self._start()

    def _start(self) -> None:
        kept = "" if self._keeper is None else " --keep 1"
        self.kernel = self._make(f"%ddp_start {RANKS} --grace 1 --hang-after 1 --live off{kept}")
        self._world_size = RANKS
        self._set_up(range(RANKS))
        self._run(_MODEL)
        self._pids = pids_of_ranks(self.kernel)

    def strike(self, times: int) -> None:
        """Inject faults, all kinds equally often, and sample the resources of the session."""
        row: list[str] = []
        while len(row) < times:
            row += self._chance.sample(list(self.kinds), len(self.kinds))
        for at, kind in enumerate(row[:times]):
            self._number += 1
            self.tried[kind] += 1
            try:
                struck_at = self.kinds[kind]()
                self._check()
                self.worst_s[kind] = max(self.worst_s[kind], time.monotonic() - struck_at)
            except Exception as error:  # any failure of the session is counted
                self.failed.append(f"fault {self._number}, {kind}: {type(error).__name__}: {error}")
                self._end()
                self._start()
            if at % 20 == 0:
                self.held.append(self._held())
        if self._world_size != RANKS:
            self._run(f"%ddp_resize {RANKS}")
            self._world_size = RANKS
        self.held.append(self._held())

    def _end(self) -> None:
        self.kernel.interrupt()
        self.kernel.run("%ddp_stop", _CELL_S)
        self.kernel.close()

    @property
    def survived(self) -> int:
        """Return the number of faults that the session has survived."""
        return self.tried.total() - len(self.failed)

    def report(self) -> str:
        """Return a text with survived faults, and the longest time of each kind until the group was checked.

        The time includes the recovery. For a cell that survives, it ends with the cell. For a kernel, it starts when a
        new one exists.
        """
        lines = [f"{self.survived} of {self.tried.total()} faults survived"]
        for kind in sorted(self.kinds):
            refused = f", {self.refused[kind]} refused" if self.refused[kind] else ""
            lines.append(f"  {kind}: {self.tried[kind]}{refused}; at worst {self.worst_s[kind]:.2f} s")
        lines += [f"  {name}: {[one[name] for one in self.held]}" for name in self.held[-1]]
        return "\n".join([*lines, *self.failed])

    # ---- what has to hold

    def _run(self, code: str) -> Reply:
        reply = self.kernel.run(code, _CELL_S)
        assert reply.status == "ok", reply
        return reply

    def _set_up(self, ranks: range | list[int]) -> None:
        self._run(_SET_UP.format(ranks=",".join(map(str, ranks))))

    def _check(self) -> None:
        """Check that the ranks communicate and have their variables, in the same processes."""
        total = float(sum(rank + 1 for rank in range(self._world_size)))
        shown = by_rank(self._run(_CHECK).stdout)
        assert shown == {rank: [f"sum [{total}] [{rank}]"] for rank in range(self._world_size)}, shown
        pids = pids_of_ranks(self.kernel)
        assert pids == self._pids, f"{pids} where {self._pids} were"

    def _replaced(self, victim: int) -> None:
        """Check that the victim has a new process, and the other ranks have the same."""
        pids = pids_of_ranks(self.kernel)
        changed = [rank for rank in range(self._world_size) if pids[rank] != self._pids[rank]]
        assert changed == [victim], f"ranks {changed} were replaced, not {victim}"
        self._pids = pids

    def _heal(self, victim: int) -> None:
        source = (victim + 1) % self._world_size
        reply = self._run(f"%ddp_heal --from {source}")
        assert f"variables of rank {source} copied to rank {victim}" in reply.stdout, reply
        self._replaced(victim)
        shown = by_rank(self._run("%%on_all_ranks --fold off\nprint(kept)").stdout)
        assert shown[victim] == [f"[{source}]"], shown
        self._set_up([victim])

    def _held(self) -> dict[str, int]:
        """Return counts that must not grow: processes below the lasting ones, and their open files."""
        lasting = [int(pid) for pid in self.kernel.run(_SERVERS).stdout.split()[1:]]
        lasting += [] if self._keeper is None else [self._keeper()]
        return {
            "processes": len({child for pid in lasting for child in psutil.Process(pid).children(recursive=True)}),
            "open files": sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in lasting),
            "ranks": self._world_size,
        }

    # ---- faults: each returns when it has struck

    def _victim(self) -> int:
        return self._chance.randrange(self._world_size)

    def _in_a_loop(self, options: str = "", steps: int = _FOR_EVER) -> str:
        """Start a cell with a loop. Return its message id when the loop runs."""
        message = self.kernel.start(_LOOP.format(options=options, number=self._number, steps=steps))
        self._wait_until_it_begins()
        return message

    def _wait_until_it_begins(self) -> None:
        self.kernel.wait_for_text("begins", _CELL_S)
        time.sleep(self._chance.uniform(0.0, _STRIKES_S))  # the moment of the fault is random

    def _asked_for(self, fault: str, victim: int, options: str = "") -> tuple[Reply, float]:
        """Run a cell into a fault of `%ddp_fault`. Return how it ended, and the time of the fault."""
        after_s = self._chance.uniform(0.0, _STRIKES_S)
        self._run(f"%ddp_fault {fault} --ranks {victim} --after {after_s:.3f}")
        struck_at = time.monotonic() + after_s
        return self.kernel.run(_LOOP.format(options=options, number=self._number, steps=_FOR_EVER), _CELL_S), struck_at

    def _kill(self) -> float:
        victim = self._victim()
        reply, struck_at = self._asked_for("kill", victim)
        assert reply.ename == "RankDiedError" and "killed by SIGKILL" in reply.traceback, reply
        self._heal(victim)
        return struck_at

    def _kill_between(self) -> float:
        victim = self._victim()
        os.kill(self._pids[victim], signal.SIGKILL)
        struck_at = time.monotonic()
        wait_until(lambda: not psutil.pid_exists(self._pids[victim]), what="the rank's end")
        self._heal(victim)
        return struck_at

    def _kill_under_survive(self) -> float:
        victim = self._victim()
        message = self.kernel.start(_SURVIVING.format(number=self._number, steps=_A_WHILE))
        self._wait_until_it_begins()
        os.kill(self._pids[victim], signal.SIGKILL)
        struck_at = time.monotonic()
        reply = self.kernel.finish(message, _CELL_S)
        told = f"rank {victim} died (killed by SIGKILL) and was replaced"
        assert reply.status == "ok" and told in reply.stderr, reply
        self._replaced(victim)
        return struck_at

    def _hang(self) -> float:
        reply, struck_at = self._asked_for("hang", self._victim(), " --timeout 1")
        assert reply.ename == "CellTimeoutError", reply
        return struck_at

    def _raise(self) -> float:
        victim = self._victim()
        reply, struck_at = self._asked_for("raise", victim)
        assert reply.ename == "RankError" and f"InjectedFaultError: rank {victim} fails" in reply.evalue, reply
        return struck_at

    def _stop(self) -> float:
        message = self._in_a_loop()
        struck_at = time.monotonic()
        self.kernel.interrupt()
        reply = self.kernel.finish(message, _CELL_S)
        assert reply.ename == "KeyboardInterrupt", reply
        return struck_at

    def _stopped_process(self) -> float:
        """Stop a process. A first press of stop names it, and a second one replaces it."""
        victim, message = self._victim(), self._in_a_loop()
        os.kill(self._pids[victim], signal.SIGSTOP)
        struck_at = time.monotonic()
        self.kernel.interrupt()
        told = self.kernel.wait_for_text("press stop again", _CELL_S)
        assert f"kill -CONT {self._pids[victim]} resumes it" in told, told
        self.kernel.interrupt()
        reply = self.kernel.finish(message, _CELL_S)
        assert reply.ename == "KeyboardInterrupt", reply
        self._heal(victim)
        return struck_at

    def _resize(self) -> float:
        # a single rank has no successor
        size = self._chance.choice([n for n in range(2, RANKS + 2) if n != self._world_size])
        struck_at = time.monotonic()
        reply = self.kernel.run(f"%ddp_resize {size}", _CELL_S)
        if reply.status != "ok":
            assert self._keeper is not None and "a kept session cannot get more or fewer ranks" in reply.evalue, reply
            self.refused["resize"] += 1
            return struck_at
        assert f"{size} rank{'s' * (size > 1)} now: " in reply.stdout, reply
        pids = pids_of_ranks(self.kernel)
        stayed = min(size, self._world_size)
        assert pids[:stayed] == self._pids[:stayed] and len(pids) == size, f"{pids} where {self._pids} were"
        self._pids, self._world_size = pids, size
        if size > stayed:
            self._set_up(list(range(stayed, size)))
        return struck_at

    # ---- what users do all day, in between

    def _cell(self) -> float:
        code, ename = self._chance.choice(_CELLS)
        began_at = time.monotonic()
        reply = self.kernel.run(f"%%on_all_ranks --timeout 10\n{code}", _CELL_S)
        assert reply.ename == ename, reply
        return began_at

    def _flood(self) -> float:
        message = self.kernel.start("%%on_all_ranks\n" + self._chance.choice(_FLOODS))
        self._wait_until_it_begins()
        struck_at = time.monotonic()
        self.kernel.interrupt()
        reply = self.kernel.finish(message, _CELL_S)
        assert reply.ename == "KeyboardInterrupt", reply
        return struck_at

    def _job(self) -> float:
        began_at = time.monotonic()
        message = self.kernel.start(_JOB.format(number=self._number, steps=50))
        assert self.kernel.finish(message, _CELL_S).status == "ok"
        self._run("%ddp_wait")
        return began_at

    def _cancelled_job(self) -> float:
        message = self.kernel.start(_JOB.format(number=self._number, steps=_FOR_EVER))
        assert self.kernel.finish(message, _CELL_S).status == "ok"
        time.sleep(self._chance.uniform(0.0, _STRIKES_S))  # cancel at a random moment
        struck_at = time.monotonic()
        self._run("%ddp_cancel all")
        return struck_at

    def _pull_and_push(self) -> float:
        began_at = time.monotonic()
        length = self._chance.choice([1, 1000, 300_000])
        self._run(f"%%on_all_ranks --quiet\nvalues = torch.arange({length}) + rank")
        self._run("%ddp_pull values")
        self._run(
            "import torch\nassert all((value - r == torch.arange(len(value))).all() for r, value in values.items())"
        )
        self._run("doubled = 2 * values[0]\n%ddp_push doubled")
        self._run("%%on_all_ranks --quiet\nassert (doubled == 2 * (values - rank)).all()")
        return began_at

    def _cleaned_folders(self) -> float:
        struck_at = time.monotonic()
        for folder in Path(tempfile.gettempdir()).glob("ddp_notebook-*"):
            shutil.rmtree(folder, ignore_errors=True)
        return struck_at

    def _host_server(self) -> int:
        return int(self.kernel.run(_SERVERS).stdout.split()[1])

    def _stopped_service(self, pid: int) -> float:
        """Stop a process between notebook and ranks while a cell runs. A message names it, and the session continues
        with it."""
        message = self._in_a_loop(steps=_A_WHILE)
        os.kill(pid, signal.SIGSTOP)
        try:
            self.kernel.wait_for_text(str(pid), _CELL_S)
        finally:
            os.kill(pid, signal.SIGCONT)
        struck_at = time.monotonic()
        reply = self.kernel.finish(message, _CELL_S)
        assert reply.status == "ok", reply
        return struck_at

    def _second_notebook(self) -> float:
        began_at = time.monotonic()
        second = self._make("")
        try:
            assert "This notebook has the monitor" in second.run("%ddp_attach", _CELL_S).stdout
            assert second.run("%ddp_status", _CELL_S).status == "ok"
            assert second.run("%ddp_stop", _CELL_S).status == "ok"
        finally:
            second.close()
        return began_at

    def _takeover(self) -> float:
        second = self._make("")
        struck_at = time.monotonic()
        reply = second.run("%ddp_attach --take-over", _CELL_S)
        assert reply.status == "ok", reply
        self.kernel.close()
        self.kernel = second
        return struck_at

    def _kernel_death(self) -> float:
        struck_at = self._lose_the_kernel()
        reply = self._run("%ddp_attach")
        assert f"<Session: {self._world_size} rank" in reply.stdout, reply
        return struck_at

    def _kernel_death_in_a_cell(self) -> float:
        """Kill the kernel during a cell. The old or the new kernel shows all output, and the new one shows the end
        once."""
        self._in_a_loop(steps=_A_WHILE)
        struck_at = self._lose_the_kernel()
        attaches = self.kernel.start("%ddp_attach")
        assert self.kernel.finish(attaches, _CELL_S).status == "ok"
        self._run("%ddp_attach --wait")  # its output appears below the first of both cells
        ends = {rank: [f"cell {self._number} on {chr(97 + rank)} ends"] for rank in range(self._world_size)}
        shown = self.kernel.wait_under(attaches, lambda reply: _ends(reply).keys() == ends.keys(), _CELL_S)
        assert _ends(shown) == ends, shown
        return struck_at

    def _lose_the_kernel(self) -> float:
        """Kill the kernel. Return the time when a new one exists, because its start takes longer than anything else."""
        kill_kernel(self.kernel)
        self.kernel.close()
        self.kernel = self._make("")
        return time.monotonic()


def _ends(reply: Reply) -> dict[int, list[str]]:
    """Return the lines with which ranks report the end of a cell."""
    return by_rank("\n".join(line for line in reply.stdout.splitlines() if line.endswith(" ends")))
