"""Identity of processes, by id *and* start time, so that a reused id is never mistaken for the old process.

Every process of a session carries the session's token in its environment, and every rank leads a session of the
operating system. Children inherit both, so descendants that have lost their parent are still found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

import psutil

from ddp_notebook.registry.identities import Identity as Identity
from ddp_notebook.registry.identities import identity as identity
from ddp_notebook.registry.identities import is_running as is_running
from ddp_notebook.registry.identities import state_and_start

_LINUX = sys.platform == "linux"
TOKEN_VARIABLE = "DDP_NOTEBOOK_TOKEN"
TIDY_S = 1.0  # grace for processes that clean up after the others
_RESOURCE_TRACKER, _SHM_MANAGER = "from multiprocessing.resource_tracker import main", "torch_shm_manager"


def is_stopped(child: int) -> bool:
    """Return whether a child of this process is stopped (SIGSTOP, SIGTSTP).

    Called before each cell: `waitid` takes 1 us, reading /proc takes 9 to 20.
    """
    try:
        if not _LINUX:
            return state_and_start(child)[0] == "T"
        return os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except (ChildProcessError, ProcessLookupError):  # it has ended
        return False


def is_stopped_anywhere(pid: int) -> bool:
    """Return whether any process, not only a child, is stopped."""
    try:
        return state_and_start(pid)[0] == "T"
    except ProcessLookupError:
        return False


def held(pid: int) -> str:
    """Describe the debugger that holds a process or one of its threads; "" if there is none, or off Linux.

    A debugger can hold one thread alone, which stops neither the process nor its other threads.

    The description is meant to follow a prefix such as "rank 1: ".
    """
    try:
        threads = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return ""
    tracers: dict[int, int] = {}  # key: the thread that the tracer holds
    for thread in threads:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/status") as file:
            lines = dict(line.split(":\t", 1) for line in file if ":\t" in line)
            if lines["State"].startswith("t"):
                tracers[thread] = int(lines["TracerPid"])
    if not tracers:
        return ""
    tracer = next(iter(tracers.values()))
    name = ""
    with contextlib.suppress(OSError), open(f"/proc/{tracer}/comm") as file:
        name = f"{file.read().strip()}, "
    which = "its process" if pid in tracers else f"thread {next(iter(tracers))} of its process"
    return f"{which} {pid} is held by a debugger ({name}process {tracer}); it continues when the debugger detaches"


def descendants(pid: int) -> list[psutil.Process]:
    """Return the process and all its descendants, as far as the process tree is unbroken."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def relatives(token: str, leaders: Iterable[int]) -> list[psutil.Process]:
    """Return processes that carry the token in their environment or belong to the OS session of one of `leaders`.

    Used if the process tree is broken because a parent has ended.
    """
    leaders = set(leaders)
    mark = f"{TOKEN_VARIABLE}={token}".encode()
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) in leaders or (token and mark in _environment_block(process)):
                found.append(process)
    return found


def _environment_block(process: psutil.Process) -> bytes:
    if _LINUX:  # several times faster than psutil's parsed form
        with open(f"/proc/{process.pid}/environ", "rb") as file:
            return file.read()
    return "\0".join(f"{key}={value}" for key, value in process.environ().items()).encode()


def end(processes: Iterable[psutil.Process], grace_s: float = 0.0, deadline_s: float = 3.0) -> list[psutil.Process]:
    """Send SIGTERM, then SIGKILL after `grace_s`. Processes that clean up get more time after the others have ended.

    psutil checks the start time before each signal, so an unrelated process never gets it.

    Returns:
        Processes that are still running `deadline_s` after SIGKILL.
    """
    alive = list(processes)
    tidying = [process for process in alive if tidies_up(process)]
    others = [process for process in alive if process not in tidying]
    if grace_s > 0:
        for process in others:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        others = wait_gone(others, grace_s)
    kill(others)
    left = wait_gone(others, deadline_s)
    kill(tidying := wait_gone(tidying, TIDY_S))
    return left + wait_gone(tidying, deadline_s)


def kill(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to the processes that still run."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def tidies_up(process: psutil.Process) -> bool:
    """Return whether a process removes semaphores and shared memory of ended processes, and then ends by itself.

    If it is killed, these objects stay in the machine's memory.
    """
    with contextlib.suppress(psutil.Error):
        program, *words = process.cmdline() or [""]
        return os.path.basename(program) == _SHM_MANAGER or any(word.startswith(_RESOURCE_TRACKER) for word in words)
    return False


def wait_gone(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until none of these processes runs. Children of this process are reaped. Returns those still running."""
    until = time.monotonic() + timeout_s
    alive = list(processes)
    while True:
        alive = [process for process in alive if _runs(process)]
        if not alive or time.monotonic() > until:
            return alive
        time.sleep(0.005)


def _runs(process: psutil.Process) -> bool:
    try:
        runs = bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        runs = False
    with contextlib.suppress(ChildProcessError, OSError):
        os.waitpid(process.pid, os.WNOHANG)  # after the check: a process that ends between the two would stay a zombie
    return runs


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when its parent ends (Linux; no effect elsewhere).

    Source: prctl(2), PR_SET_PDEATHSIG
    """
    if _LINUX:
        _prctl(1, int(by))
        if os.getppid() != parent:  # the parent ended before the request
            os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of all orphaned descendants, so that all of them stay in the process tree (Linux).

    Source: prctl(2), PR_SET_CHILD_SUBREAPER
    """
    if _LINUX:
        _prctl(36, 1)


def _prctl(option: int, argument: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"prctl({option})")
