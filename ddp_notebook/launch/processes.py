"""Processes as this package knows them: by id *and* start time, so that a reused id is never mistaken.

Everything of one session carries the session's token in its environment, and every rank leads a session of the
operating system. Both are inherited, so descendants that have lost their parent are still found.
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
TIDY_S = 1.0  # what those get that remove what the others leave behind
_RESOURCE_TRACKER, _SHM_MANAGER = "from multiprocessing.resource_tracker import main", "torch_shm_manager"


def is_stopped(child: int) -> bool:
    """Whether a child of this process was stopped (SIGSTOP, SIGTSTP). Asked before each cell: `waitid` takes 1 us, to
    open and read /proc 9 to 20."""
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

    The description goes after "rank 1: ".
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
    return f"{which} {pid} is held by a debugger ({name}process {tracer}); it goes on when the debugger detaches"


def descendants(pid: int) -> list[psutil.Process]:
    """The process and all below it, as far as the tree is unbroken."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def relatives(token: str, leaders: Iterable[int]) -> list[psutil.Process]:
    """Processes that carry the token in their environment or belong to the OS session of one of `leaders`.

    Used when the tree is broken: whoever forked them is gone.
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
    """SIGTERM, then SIGKILL after `grace_s`; those that tidy up get time when the others have gone. Returns those that
    are still there `deadline_s` after that.

    psutil checks the start time before each signal, so no stranger is hit.
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
    """SIGKILL for those that still run."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def tidies_up(process: psutil.Process) -> bool:
    """Whether it removes the semaphores and the shared memory of processes that have ended, and ends then by itself.
    Without it they stay in the machine's memory."""
    with contextlib.suppress(psutil.Error):
        program, *words = process.cmdline() or [""]
        return os.path.basename(program) == _SHM_MANAGER or any(word.startswith(_RESOURCE_TRACKER) for word in words)
    return False


def wait_gone(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until none of these runs. Children of this process are reaped. Returns those still running."""
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
        os.waitpid(process.pid, os.WNOHANG)  # behind the look, or what ends between the two is left a zombie
    return runs


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends (Linux; elsewhere this does nothing).

    Source: prctl(2), PR_SET_PDEATHSIG
    """
    if _LINUX:
        _prctl(1, int(by))
        if os.getppid() != parent:  # it ended before we could ask
            os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of all descendants that lose theirs, so that none of them is out of sight (Linux).

    Source: prctl(2), PR_SET_CHILD_SUBREAPER
    """
    if _LINUX:
        _prctl(36, 1)


def _prctl(option: int, argument: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"prctl({option})")
