"""Stop the processes of a session one after the other, and check the messages in each situation of the user."""

from __future__ import annotations

import contextlib
import queue
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.faults.holding import held, threads_of
from tests.kernels import NotebookKernel, Reply

NAMED_S = 3.0  # until a message names the process
BACK_S = 6.0  # until the prompt is back after a press of stop
_ROOT = Path(__file__).parents[2]
_END_S = 30.0
SUM = "%%on_all_ranks\nx = torch.ones(1); dist.all_reduce(x); print('sum', int(x), 'kept', kept)"
GROUP = "%%on_all_ranks\ngroup = dist.new_group([0, 1])"
SLEEP = "%%on_all_ranks\nimport time\nfor _ in range(600): time.sleep(0.1)"

# Commands that need a process and must name it if it is stopped. Other commands continue.
RANK = ["client", "cell", "group", "stop", "status", "heal", "reform", "pull", "check", "call by client"]
RANK += ["execute by client", "resize", "restart", "memory"]
STORE = ["group", "stop", "status", "heal", "reform"]
HOST_SERVER = ["client", "cell", "group", "running", "stop", "status", "heal", "reform", "resize", "restart"]
KEEPER = ["cell", "group", "running", "stop", "status", "heal", "reform", "pull", "check", "resize"]
CONTROLLER = ["status", "client"]
# A rank that another rank calls by RPC, even if it does not run the cell.
RPC = ["call", "call from some", "to_here", "shutdown"]
TABLE = {"rank": RANK, "store": STORE, "host server": HOST_SERVER, "keeper": KEEPER, "controller": CONTROLLER}
LINES = {
    "cell": SUM,
    "group": GROUP,
    "running": SLEEP,
    "status": "%ddp_status",
    "heal": "%ddp_heal",
    "reform": "session.ranks.reform()",
    "pull": "%ddp_pull kept",
    "check": "%ddp_check",
    "memory": "%ddp_memory",
    "resize": "%ddp_resize 3",
    "client": "session.client",
    "call by client": "session.client[:].apply_sync(abs, -1)",
    "execute by client": "session.client[:].execute('1', block=True)",
    "call": "%%on_all_ranks\nif rank == 0: rpc.rpc_sync('worker1', abs, args=(1,))",
    "call from some": "%%on_ranks 0\nrpc.rpc_sync('worker1', abs, args=(1,))",
    "to_here": "%%on_ranks 0\nrpc.remote('worker1', abs, args=(1,)).to_here()",
    "shutdown": "%%on_all_ranks\nif rank == 0: rpc.shutdown()",
}
INIT_RPC = """%%on_all_ranks
from torch.distributed import rpc
rpc.init_rpc(f'worker{rank}', rank=rank, world_size=world_size)
"""


class Stopping:
    """A notebook with two ranks.

    Args:
        start: Line that starts the ranks.
        env: Environment of the notebook.
    """

    def __init__(self, start: str = "%ddp_start 2", env: dict[str, str] | None = None) -> None:
        self.kernel = NotebookKernel(env=env, pythonpath=str(_ROOT))
        self._start = start
        started = self.kernel.run(f"%load_ext ddp_notebook\n{start}")
        assert started.status == "ok", started
        self.set_up()

    def set_up(self) -> None:
        """Set the variables that `check_comes_back` expects."""
        assert self.kernel.run("import ddp_notebook; session = ddp_notebook.current()").status == "ok"
        assert self.kernel.run("%%on_all_ranks\nkept = 10 + rank").status == "ok"

    def pid(self, name: str) -> int:
        """Return the process id for a name in the table."""
        if name == "keeper":
            return psutil.Process(self.pid("host server")).ppid()
        if name == "watchdog":
            ours = [pid for kind in ("rank", "store", "controller") for pid in self.pids(kind)]
            [pid] = [one.pid for one in psutil.Process(self.pid("host server")).children() if one.pid not in ours]
            return pid
        if name == "controller":
            assert self.kernel.run("session.client").status == "ok"
        return self.pids(name)[-1]

    def pids(self, kind: str) -> list[int]:
        """Return the process ids of a kind, as `session.ranks.pids` does."""
        return [int(pid) for pid in self.kernel.run(f"print(*session.ranks.pids({kind!r}))").stdout.split()]

    @contextlib.contextmanager
    def stopped(self, pid: int) -> Iterator[None]:
        """Stop a process for the block. Returns when it continues or has ended."""
        process = psutil.Process(pid)
        process.suspend()
        until = time.monotonic() + _END_S
        while process.status() != psutil.STATUS_STOPPED and time.monotonic() < until:
            time.sleep(0.005)
        try:
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def play(self, name: str, where: str, on: str = "") -> None:
        """Stop a process in a situation of the user. Check that a message names it in time, and that the session
        recovers.

        Args:
            name: process, as in the table.
            where: situation, as in the table.
            on: pattern that must follow the process id in the remedy, such as the name of its host.

        Raises:
            AssertionError, TimeoutError: A check failed.
        """
        pid = self.pid(name)
        if "by client" in where:  # calls, without the first use, which starts a controller
            assert self.kernel.run("session.client").status == "ok"
        said = rf"\b{pid}\b.*\b(kill -CONT {pid}\b{on}|was replaced)"
        if where == "running":
            self._while_a_cell_runs(pid, said)
        elif where == "stop":
            self._press_stop(name, pid, said)
        elif where == "restart":
            with self.stopped(pid):
                assert self.kernel.run("%ddp_restart").status == "ok"
            self.set_up()
        else:
            with self.stopped(pid):
                message = self.kernel.start(LINES[where])
                self.expect(said, NAMED_S)
                reply = self.end(message)
            if where == "status":
                assert not re.search(r"\bidle\b", reply.stdout), reply
            assert "no rank has died\n" not in reply.stdout or "was replaced" in reply.stdout, reply
        self.check_comes_back()

    def play_held(self, name: str, line: str, *, only_main: bool = False) -> None:
        """Hold the threads of a process like a debugger. Check that a message names it in time, and that the session
        recovers.

        The message appears after an unanswered request to the process, which takes 1.5 s.
        """
        pid = self.pid(name)
        with held([pid] if only_main else threads_of(pid)) as debugger:
            message = self.kernel.start(line)
            self.expect(rf"\b{pid} is held by a debugger \(.*process {debugger}\)", NAMED_S + 1.0)
            self.end(message)
        self.check_comes_back()

    def _while_a_cell_runs(self, pid: int, said: str) -> None:
        message = self.kernel.start(SLEEP)
        time.sleep(0.5)
        with self.stopped(pid):
            self.expect(said, NAMED_S)
        self.kernel.interrupt()
        assert self.kernel.finish(message, _END_S).ename == "KeyboardInterrupt"

    def _press_stop(self, name: str, pid: int, said: str) -> None:
        if name != "store":  # ranks use the store only while a group forms
            message = self.kernel.start(SLEEP)
            time.sleep(0.5)
        with self.stopped(pid):
            if name == "store":
                message = self.kernel.start(GROUP)
            shown = self.expect(said, NAMED_S)
            self.kernel.interrupt()
            reply = self.kernel.finish(message, BACK_S)
        assert reply.ename == "KeyboardInterrupt", (shown, reply)

    def expect(self, pattern: str, timeout_s: float) -> str:
        """Read the output of the running cell until it matches."""
        reply, until = Reply(), time.monotonic() + timeout_s
        while True:
            shown = "\n".join(
                [reply.stdout, reply.stderr, reply.traceback, *(data.get("text/plain", "") for data in reply.displays)]
            )
            if re.search(pattern, shown, re.DOTALL):
                return shown
            try:
                reply.read(self.kernel.client.get_iopub_msg(timeout=max(0.01, until - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"not within {timeout_s:g} s: {pattern}; only {reply}") from None

    def end(self, message: str) -> Reply:
        """End the cell, by itself or by stop."""
        with contextlib.suppress(TimeoutError):
            return self.kernel.finish(message, 1.0)
        self.kernel.interrupt()
        return self.kernel.finish(message, BACK_S)

    def check_comes_back(self) -> None:
        """Check that the session works, with all variables."""
        until = time.monotonic() + _END_S
        while True:
            reply = self.kernel.run(SUM, _END_S)
            if reply.status == "ok" or time.monotonic() > until:
                break
            time.sleep(0.1)  # an abandoned cell may end only now
        assert "[0-1] sum 2 kept 10 | 11\n" in reply.stdout, reply

    def close(self) -> None:
        """End the notebook. Idempotent."""
        with contextlib.suppress(Exception):
            self.kernel.run("%ddp_stop", _END_S)
        self.kernel.close()
