"""The stop button and the end of VS Code. VS Code sends SIGINT to every descendant of the kernel and then to the
kernel, and SIGTERM to the descendants when it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from tests.conftest import wait_until
from tests.kernels import NotebookKernel

SETUP = """%%on_all_ranks
import _thread, asyncio, multiprocessing.resource_tracker, os, re, signal, subprocess, time
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, i): return torch.tensor(float(i))
def load(**options): return torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2, **options)
def train(loader, pause_s=0.0):
    for batch in loader:
        dist.all_reduce(total := batch.sum())
        time.sleep(pause_s)
    return int(total)
multiprocessing.resource_tracker.ensure_running()  # spawned workers want it, and it stays
kept = load(persistent_workers=True)
train(kept)
workers = lambda: [worker.pid for worker in kept._iterator._workers]
pids = workers()
"""
# After a stop the same processes exist, and loaders and `session.client` work.
NEXT = "%%on_all_ranks\nprint(train(kept), train(load()), workers() == pids)"
NEXT_OF_CLIENT = """
import os, ddp_notebook
session = ddp_notebook.current()
pids = session.ranks.pids()
print(session.client[:].apply_sync(os.getpid) == pids, *pids, *session.ranks.pids("controller"))
"""
SLEEP = ("sleep", 2)
# The cells. The second item is the name and number of processes below the kernel when all ranks are inside the cell.
CELLS: dict[str, tuple[str, tuple[str, int] | None]] = {
    "a collective": ("dist.recv(torch.ones(1), 1 - rank)", None),
    "a loader": ("while True: train(load(), 0.01)", ("pt_data_worker", 8)),  # four workers belong to the kept loaders
    "a loop": ("while True: pass", None),
    "C code that looks for signals and keeps the interpreter": ("re.match('(a+)+$', 'a' * 99 + 'b')", None),
    "an await": ("await asyncio.sleep(600)", None),
    "a command": ("!sleep 600\nprint('went on')", SLEEP),
    "a subprocess": ("subprocess.run(['sleep', '600'], check=True)\nprint('went on')", SLEEP),
    "a forked child": (
        "child = multiprocessing.get_context('fork').Process(target=os.execlp, args=('sleep', 'sleep', '600'))\n"
        "child.start()\ntry: child.join()\nfinally: print(child.is_alive()); child.kill()",
        SLEEP,
    ),
}


@pytest.fixture(scope="module")
def kernel(waiting_host_server) -> Iterator[NotebookKernel]:
    """Start a notebook kernel with two ranks that have loaders with workers."""
    with closing(NotebookKernel()) as kernel:
        assert kernel.run("%load_ext ddp_notebook\n%ddp_start 2 --hang-after off").status == "ok"
        assert kernel.run(SETUP).status == "ok"
        # starts a controller
        assert kernel.run("import ddp_notebook\nddp_notebook.current().client.ids").status == "ok"
        yield kernel


@pytest.fixture
def in_order(kernel) -> Iterator[None]:
    """Before and after the test the same ranks, workers and controller exist and work."""
    before = _next(kernel)
    yield
    assert _next(kernel) == before


def _next(kernel: NotebookKernel) -> str:
    reply = kernel.run(NEXT)
    assert (reply.status, reply.stdout) == ("ok", "[0-1] 780 780 True\n"), reply
    reply = kernel.run(NEXT_OF_CLIENT)
    assert reply.stdout.startswith("True "), reply
    return reply.stdout


def below(kernel: NotebookKernel, name: str) -> list[psutil.Process]:
    """Return the living processes of this name below the kernel."""
    found = []
    for process in psutil.Process(kernel.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == name and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def start_cell(kernel: NotebookKernel, name: str) -> str:
    """Send one of these cells to all ranks, and wait until they run it. Return the message id."""
    code, processes = CELLS[name]
    message = kernel.client.execute(f"%%on_all_ranks\nprint('there')\n{code}", stop_on_error=False)
    kernel.wait_for_text("there")
    if processes is not None:
        wait_until(lambda: len(below(kernel, processes[0])) >= processes[1], 15.0)
    return message


@pytest.mark.long
@pytest.mark.alone  # on a busy machine a rank may end slowly, which is reported, or may not be inside the command yet
@pytest.mark.parametrize("cell", CELLS)
def test_a_stop_does_what_it_does_everywhere(kernel, in_order, cell):
    """It ends the cell and the processes that the cell has started, and no others."""
    message = start_cell(kernel, cell)
    kernel.interrupt()
    plain = kernel.finish(message)
    assert plain.ename == "KeyboardInterrupt", plain
    wait_until(lambda: not below(kernel, "sleep"))
    message = start_cell(kernel, cell)
    got = kernel.interrupt_in_vscode()
    stopped = kernel.finish(message)
    assert len(got) > 15, "ranks, their workers, host server, watchdog, store, and nine processes of a controller"
    assert (stopped.ename, stopped.stdout, stopped.stderr) == (plain.ename, plain.stdout, plain.stderr)
    wait_until(lambda: not below(kernel, "sleep"))


@pytest.mark.long
@pytest.mark.parametrize(
    "code",
    [
        "for _ in range(2): train(load(), 0.02)",
        "spawned = torch.utils.data.DataLoader(range(8), num_workers=1, multiprocessing_context='spawn')\n"
        "it = iter(spawned); next(it)\nprint('there', flush=True)\ntime.sleep(1.5)\ntotal = sum(it).sum()",
        "!sleep 1.5 && echo whole",
        "print(subprocess.run('sleep 1.5 && echo whole', shell=True, check=True, capture_output=True).stdout)",
        "for n in range(15): time.sleep(0.1); dist.barrier()",
    ],
    ids=["a loader", "spawned workers", "a command", "a subprocess", "collectives"],
)
def test_a_submitted_job_continues_after_a_local_stop(kernel, in_order, code):
    begins = f"dist.barrier(); open('{{there}}' + str(rank), 'w').close()\n{code}\nprint('ended')"
    kernel.run("import tempfile, os, time; there = tempfile.mkdtemp() + '/'")
    sent = f"job = session.submit({begins!r}.replace('{{there}}', there))"
    message = kernel.start(f"{sent}\nwhile len(os.listdir(there)) < 2: time.sleep(0.01)\ntime.sleep(0.3)\n"
                           "print('there', flush=True)\ntime.sleep(600)")  # fmt: skip
    kernel.wait_for_text("there")
    kernel.interrupt_in_vscode()
    assert kernel.finish(message).ename == "KeyboardInterrupt"
    ended = kernel.run("result = job.result(30)\nprint([result[rank].stdout.splitlines()[-1] for rank in (0, 1)])")
    assert (ended.status, ended.stdout) == ("ok", "['ended', 'ended']\n"), ended
    if "whole" in code:
        assert "whole" in kernel.run("print(result[0].stdout)").stdout


@pytest.mark.long
def test_a_background_cell_continues_after_a_local_stop(kernel, in_order):
    job = kernel.start("%%on_all_ranks --background\nfor batch in range(40): time.sleep(0.05); dist.barrier()\n'whole'")
    assert "job " in kernel.finish(job).stdout
    message = kernel.start("import time\nprint('there')\ntime.sleep(600)")
    kernel.wait_for_text("there")
    kernel.interrupt_in_vscode()
    assert kernel.finish(message).ename == "KeyboardInterrupt"
    assert "is done after" in kernel.run("%ddp_wait").stdout
    assert "[0-1] 'whole'" in kernel.wait_under(job, lambda reply: "whole" in reply.stdout).stdout


@pytest.mark.long
def test_a_client_call_continues_after_a_local_stop(kernel, in_order):
    sent = "import time\nview = session.client[:]\njob = view.execute('time.sleep(1.5); done = rank', block=False)"
    message = kernel.start(f"{sent}\ntime.sleep(0.5)\nprint('there', flush=True)\ntime.sleep(600)")
    kernel.wait_for_text("there")
    kernel.interrupt_in_vscode()
    assert kernel.finish(message).ename == "KeyboardInterrupt"
    assert kernel.run("job.get(20)\nprint(view['done'])").stdout == "[0, 1]\n"


HANDLERS = """%%on_all_ranks
def heard(do):
    try:
        do()
        time.sleep(0.2)
    except KeyboardInterrupt: return True
    return False
sigint = lambda: os.kill(os.getpid(), signal.SIGINT)
print(heard(sigint), heard(_thread.interrupt_main))
ours = signal.signal(signal.SIGINT, signal.SIG_IGN)
print(heard(_thread.interrupt_main))
signal.signal(signal.SIGINT, ours)  # as programs do that have had a handler for a while
print(heard(sigint), heard(sigint), heard(_thread.interrupt_main))
"""


def test_sigint_interrupts_no_rank_and_python_itself_does(kernel):
    assert kernel.run(HANDLERS).stdout == "[0-1] False True\n[0-1] False\n[0-1] False False True\n"


def test_the_stop_button_calls_a_handler_of_the_users(kernel):
    calls = "signal.signal(signal.SIGINT, lambda number, frame: calls.append((number, frame.f_code.co_name)))"
    message = kernel.start(f"%%on_all_ranks\ncalls = []\n{calls}\nprint('there')\nwhile not calls: pass\nprint(calls)")
    kernel.wait_for_text("there")
    kernel.interrupt()
    assert kernel.finish(message).stdout == "[0-1] [(2, '<module>')]\n"


AGAIN = """
import ddp_notebook.wire.signals as signals_
from ddp_notebook.rank import own_signals
calls, real = [], own_signals._get_handler
def get_handler(number):
    own_signals._get_handler = real
    os.kill(os.getpid(), signals_.INTERRUPT)
    return real(number)
exec(compile(inspect.getsource(get_handler), own_signals.__file__, "exec"))  # as if it were that module's
before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(frame.f_code.co_name))
own_signals._get_handler = get_handler
os.kill(os.getpid(), signals_.INTERRUPT)
while not calls: pass
signal.signal(signal.SIGINT, before)
print(calls, own_signals._get_handler is real)
"""


def test_a_user_handler_gets_its_frame_if_an_interrupt_is_resent(kernel):
    assert kernel.run(f"%%on_all_ranks\nimport inspect, os, signal{AGAIN}").stdout == "[0-1] ['<module>'] True\n"


@pytest.mark.long
def test_a_start_goes_on(make_kernel):
    """While a host server imports torch and the ranks start, the user stops a cell or VS Code seems to close."""
    kernel, is_up, got = make_kernel(), threading.Event(), set()

    def bombard() -> None:
        while not is_up.wait(0.02):
            for number in (signal.SIGINT, signal.SIGTERM):
                got.update(kernel.signal_below(number))

    thread = threading.Thread(target=bombard)
    thread.start()
    try:
        started = kernel.run("%load_ext ddp_notebook\n%ddp_start 2")
        client = kernel.run("import ddp_notebook\nddp_notebook.current().client.ids")
    finally:
        is_up.set()
        thread.join()
    assert started.status == client.status == "ok", (started, client)
    assert len(got) > 10, "host server, watchdog, ranks, store, and nine processes of a controller"
    assert kernel.run("%%on_all_ranks\ndist.barrier()").status == "ok"


_AT_A_BAD_MOMENT = """
import signal, _thread
from ddp_notebook.rank.cell import signal_handlers

ignore, interrupted = signal_handlers._ignore_sigint, []
def ignore_too_late():  # as if it had come before, to another thread, and Python called its handler behind that
    before = ignore()
    _thread.interrupt_main()
    return before
signal_handlers._ignore_sigint = ignore_too_late
made = signal_handlers.SignalHandlers(lambda *_: interrupted.append(1), lambda: True)
signal_handlers._ignore_sigint = ignore
signal.signal(signal.SIGINT, signal.default_int_handler)
signal_handlers._ignore_sigint = ignore_too_late
made._set(signal.SIGINT, made._ours[signal.SIGINT])
signal_handlers._ignore_sigint = ignore
assert not interrupted
made.put_back()
_thread.interrupt_main()  # which programs use
assert interrupted
"""


@pytest.mark.long
def test_a_sigint_that_comes_while_handlers_are_set_does_nothing():
    ran = subprocess.run([sys.executable, "-c", _AT_A_BAD_MOMENT], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.long
def test_ranks_end_at_sigterm_only_together_with_their_notebook(kernel):
    """This must be the last test, because it ends the kernel of the module. Workers do end at SIGTERM: this is how
    their rank ends them."""
    kernel.run("%%on_all_ranks\ndel kept")
    wait_until(lambda: not below(kernel, "pt_data_worker"))
    before = kernel.run(NEXT_OF_CLIENT).stdout
    kernel.run("job = session.submit('for n in range(20): time.sleep(0.05); dist.barrier()\\nn')")
    got = kernel.signal_below(signal.SIGTERM)
    ended = kernel.run("print({rank: job.result(20)[rank].result for rank in (0, 1)})")
    assert ended.stdout.endswith("{0: '19', 1: '19'}\n"), ended
    said = kernel.run("print(job.result()[0].stderr)").stdout
    assert "this rank goes on after SIGTERM: it ends with its notebook, or at %ddp_stop; kill -KILL ends it" in said
    assert kernel.run(NEXT_OF_CLIENT).stdout == before
    os.kill(kernel.pid, signal.SIGTERM)
    wait_until(lambda: not any(process.is_running() for process in got), 10.0, "the ranks end with the kernel")
