"""No process outlives its owner, and a killed process ends no more processes than necessary."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddp_notebook.errors import SessionBrokenError
from ddp_notebook.launch import warm
from tests.conftest import is_within, marked_processes, wait_until

WITH_DESCENDANTS = """%%on_all_ranks
import os, subprocess, time
import torch.multiprocessing as mp
children = [
    subprocess.Popen(['sleep', '600']),                            # a plain child
    subprocess.Popen(['sleep', '600'], start_new_session=True),    # one that left the process group
    mp.get_context('fork').Process(target=time.sleep, args=(600,)),
]
children[2].start()
os.system('sleep 600 &')                                           # one whose parent is gone
os.system('env -i sleep 600 &')                                    # and its environment cleared
os.system('setsid sleep 600 &')                                    # or its OS session left
"""
STORM = "while :; do sleep 600 & sleep 0.002; done"
LEFT_IN_EVERY_WAY = "%%on_all_ranks\nos.system('env -i setsid sleep 600 &')"


MAKES_SHARED = (
    "import multiprocessing\n"
    "from multiprocessing import shared_memory\n"
    "queue = multiprocessing.get_context('spawn').Queue()\n"
    "memory = shared_memory.SharedMemory(create=True, size=1 << 20)\n"
    "print('sem.' + queue._sem._semlock.name.strip('/'), memory.name)"
)


def in_shared_memory(names: str) -> list[Path]:
    paths = [Path("/dev/shm", name) for name in names.split()]
    assert paths and all(path.exists() for path in paths)
    return paths


def start_in(kernel) -> set[psutil.Process]:
    """Start ranks with descendants in a kernel. Return all processes except the kernel itself."""
    warm.drop()  # an idle host server here has the mark too, but does not belong to the kernel
    assert kernel.run("%load_ext ddp_notebook").status == "ok"
    reply = kernel.run("%ddp_start 2")
    assert reply.status == "ok", reply.traceback
    return start_descendants_in(kernel)


def start_descendants_in(kernel) -> set[psutil.Process]:
    """Start descendants of the running ranks. Return all processes except the kernel itself."""
    assert kernel.run(WITH_DESCENDANTS).status == "ok"
    found = marked_processes() | set(psutil.Process(host_server_of(kernel)).children(recursive=True))
    return {process for process in found if process.pid != kernel.pid}


def host_server_of(kernel) -> int:
    code = "import ddp_notebook; print(*ddp_notebook.current().ranks.pids('host server'))"
    return int(kernel.run(code).stdout)


def expect_all_gone(processes, but=()) -> None:
    left = [process for process in processes if process.pid not in but]
    assert len(left) > 10
    wait_until(lambda: not any(map(_runs, left)), 5.0, "processes outlive their owner")


def _runs(process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.mark.long
def test_stop_and_unload_ext_end_the_session_and_its_descendants(make_kernel):
    kernel = make_kernel()
    processes = start_in(kernel)
    known = marked_processes()
    assert kernel.run(LEFT_IN_EVERY_WAY).status == "ok"  # the host server has adopted these, so it finds them
    processes |= set(psutil.Process(host_server_of(kernel)).children(recursive=True)) - known
    server = host_server_of(kernel)
    assert kernel.run("%ddp_stop").status == "ok"
    waiting = [server, *(process.pid for process in psutil.Process(server).children())]  # for the next start
    assert len(waiting) == 2, "the host server, which `%load_ext` has started, and its watchdog"
    expect_all_gone(processes, but=waiting)
    kernel.run("%reload_ext ddp_notebook")
    processes = start_in(kernel)
    assert kernel.run("rank").stderr.count("put %%on_all_ranks above") == 1
    assert kernel.run("%unload_ext ddp_notebook").status == "ok"
    assert "put %%" not in kernel.run("rank").stderr
    expect_all_gone(processes)


@pytest.mark.long
def test_shutdown_of_the_kernel(make_kernel):
    kernel = make_kernel()
    processes = start_in(kernel)
    kernel.close()
    expect_all_gone(processes)


@pytest.mark.long
def test_restart_of_the_kernel(make_kernel):
    kernel = make_kernel()
    processes = start_in(kernel)
    kernel.manager.restart_kernel(now=True)
    expect_all_gone(processes)


def test_sigkill_of_the_kernel(make_kernel):
    kernel = make_kernel()
    processes = start_in(kernel)
    shared = in_shared_memory(kernel.run(f"%%on_ranks 0\n{MAKES_SHARED}").stdout.removeprefix("[0]"))
    os.kill(kernel.pid, signal.SIGKILL)
    expect_all_gone(processes)
    assert not [path for path in shared if path.exists()]


@pytest.mark.long
def test_sigkill_of_the_kernel_ends_blocked_ranks_and_forks(make_kernel):
    kernel = make_kernel()
    processes = start_in(kernel)
    assert kernel.run(f"%%on_all_ranks\nstorm = subprocess.Popen(['bash', '-c', {STORM!r}])").status == "ok"
    kernel.start("%%on_all_ranks\nprint('go')\nif rank: dist.recv(torch.ones(1), 0)\nelse: sum(range(10**10))")
    kernel.wait_for_text("] go")
    os.kill(kernel.pid, signal.SIGKILL)
    expect_all_gone(processes)  # the fixture also finds remaining processes


@pytest.mark.long
def test_a_host_server_that_is_killed_and_one_that_is_stopped(make_kernel):
    """The death of a host server is reported. A stopped one is named at once.

    A press of stop ends a cell without it, and it does not outlive its owner.
    """
    kernel = make_kernel()
    processes = start_in(kernel)
    os.kill(host_server_of(kernel), signal.SIGKILL)
    expect_all_gone(processes)
    for line in ("%%on_all_ranks\n1", "%ddp_heal", "%ddp_interrupt"):
        reply = kernel.run(line)
        assert reply.ename == "SessionBrokenError", line
        assert reply.evalue == "the host server ended, and all ranks with it; %ddp_restart starts new ranks"
    status = kernel.run("%ddp_status").stdout
    assert status.count("died") == 2 and "the host server ended, and all ranks with it" in status
    assert kernel.run("%ddp_restart").status == "ok"

    processes = start_descendants_in(kernel)
    server = host_server_of(kernel)
    cell = kernel.start("%%on_all_ranks\nprint('go')\nif rank: dist.recv(torch.ones(1), 0)\nelse: time.sleep(600)")
    kernel.wait_for_text("] go")
    os.kill(server, signal.SIGSTOP)
    named = f"the host server (pid {server}), which passes cells to the ranks, is stopped: kill -CONT {server}"
    kernel.interrupt()
    began = time.monotonic()
    reply = kernel.finish(cell)
    assert is_within(time.monotonic() - began, 3)
    assert reply.ename == "KeyboardInterrupt" and named in reply.stderr
    assert re.search("rank 1 (waited in recv|was interrupted at .* in recv)", reply.evalue)  # while entering the call
    for line in ("%%on_all_ranks\n1", "%ddp_heal"):
        reply = kernel.run(line)
        assert reply.ename == "SessionBrokenError" and named in reply.evalue, line
        assert is_within(reply.duration_s, 3)
    assert kernel.run("%ddp_pull rank").stdout == "[0] 0\n[1] 1\n", "values do not need it"
    assert kernel.run("%ddp_interrupt").stdout == "no cell is under way\n"
    reply = kernel.run("%ddp_status")
    assert reply.stdout.count("in no cell") == 2 and "idle" not in reply.stdout and named in reply.stdout
    os.kill(kernel.pid, signal.SIGKILL)
    expect_all_gone(processes)


@pytest.mark.long
def test_a_host_server_that_is_stopped_at_the_restart(make_kernel):
    kernel = make_kernel()
    start_in(kernel)
    server = host_server_of(kernel)
    for line in ("%ddp_restart", "%ddp_stop", "%ddp_start 2"):
        os.kill(server, signal.SIGSTOP)
        reply = kernel.run(line)
        assert reply.status == "ok" and reply.duration_s < 5
        if line != "%ddp_start 2":
            assert f"the host server (pid {server}) does not answer" in reply.stdout
    assert kernel.run("%%on_all_ranks\nx = torch.ones(1); dist.all_reduce(x); int(x)").stdout == "[0-1] 2\n"


@pytest.mark.long
def test_a_host_server_that_hangs(make_session, monkeypatch):
    """A host server that is not stopped but does not answer, because no message reaches it."""
    session = make_session(2)
    host = session._hosts.all[0]
    monkeypatch.setattr(host.transport, "send", lambda data: None)
    began = time.monotonic()
    with pytest.raises(
        SessionBrokenError, match=r"the host server \(pid \d+\) did not answer 'ping' in 1.5 s; %ddp_res"
    ):
        session.ranks.heal()
    assert "did not answer" in repr(session.status())
    session.stop()
    assert time.monotonic() - began < 12


@pytest.mark.long
def test_crash_of_the_jupyter_server(make_kernel):
    """A separate server starts the kernel and is killed. The kernel notices this and ends, and all other processes
    follow."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with server:
        assert server.stdout is not None
        pid, connection_file = server.stdout.readline().split()
        kernel = make_kernel(connection_file=connection_file, pid=int(pid))
        processes = start_in(kernel)
        server.kill()
        server.wait()
        expect_all_gone({*processes, psutil.Process(int(pid))} if psutil.pid_exists(int(pid)) else processes)
    os.unlink(connection_file)


SERVER = """
import sys
from jupyter_client.manager import KernelManager
manager = KernelManager()
manager.start_kernel()
print(manager.provisioner.process.pid, manager.connection_file, flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_two_notebooks_start_at_the_same_moment(make_kernel):
    kernels = [make_kernel() for _ in range(2)]
    for kernel in kernels:
        kernel.run("%load_ext ddp_notebook")
    messages = [kernel.start("%ddp_start 2") for kernel in kernels]
    for kernel, message in zip(kernels, messages, strict=True):
        assert kernel.finish(message).status == "ok"
    messages = [k.start("%%on_all_ranks\nx = torch.ones(1); dist.all_reduce(x); x") for k in kernels]
    for kernel, message in zip(kernels, messages, strict=True):
        assert kernel.finish(message).stdout == "[0-1] tensor([2.])\n"


@pytest.mark.long
def test_a_forked_child_of_the_notebook_ends_nothing(make_session):
    session = make_session(1)
    if (child := os.fork()) == 0:
        session._hosts.all[0].close()
        os._exit(0)
    os.waitpid(child, 0)
    assert session.run("rank").ok


@pytest.mark.long
def test_sigkill_of_the_host_server_during_a_cell(make_session):
    session = make_session(2)
    (server,) = session.ranks.pids("host server")
    with pytest.raises(SessionBrokenError, match="the host server ended"):
        session.run(f"import os, signal, time\nif rank == 0: os.kill({server}, signal.SIGKILL)\ntime.sleep(60)")


@pytest.mark.long
def test_what_a_dead_rank_leaves_behind_goes_with_it(make_session):
    session = make_session(2)
    session.run("import os, subprocess\nchild = subprocess.Popen(['sleep', '600']).pid; me = os.getpid()")
    children = session.pull("child")
    os.kill(session.ranks.pids()[1], signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(children[1]))
    assert psutil.pid_exists(children[0])


@pytest.mark.long
def test_semaphores_and_shared_memory_of_ranks_go_with_them(make_session):
    """Python's resource tracker removes them after their process has ended, so it must not be ended first."""
    session = make_session(2)
    made = session.run(MAKES_SHARED, quiet=True)
    of_rank = [in_shared_memory(made[rank].stdout) for rank in made.ranks]
    os.kill(session.ranks.pids()[1], signal.SIGKILL)
    wait_until(lambda: not any(path.exists() for path in of_rank[1]), 5.0, "they outlive a rank that was killed")
    assert all(path.exists() for path in of_rank[0])
    session.stop()
    assert not [path for path in of_rank[0] if path.exists()]
