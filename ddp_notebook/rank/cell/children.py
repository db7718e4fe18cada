"""The child process that the main thread of a rank waits for.

| wait | source of information |
|---|---|
| a shell command of the cell, such as `!ls` | `commands` calls `Children.waiting` |
| `subprocess.run`, `Popen.wait`, `Popen.communicate` | frames of the main thread |
| `os.system`, `os.waitpid`, `Process.join` | system call of the main thread, in `/proc` |
| queue or pipe of a stopped worker process, such as a DataLoader worker | states of child processes, in `/proc` |
| read from a pipe or socket while a child process is stopped | that system call and these states |

If `/proc` does not show system calls, the waits of the third and the last row are not detected. If it does not list
child processes, those of the last two rows are not detected.
"""

from __future__ import annotations

import multiprocessing
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import psutil

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import ChildStopped
from ddp_notebook.rank.cell.current_line import frame_of
from ddp_notebook.registry.identities import state_and_start
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, os, signal, threading, time

_SIGNALS = (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_TICK_S = 0.02  # precision of process ages (one clock tick)
_MOST = 200  # maximum number of child processes that are checked
_LONGEST = 100  # maximum length of a command in messages
_LOADER_S = 0.1  # time for a DataLoader to end its workers in order
_DATA_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")
_WAITS = {"wait", "_wait", "communicate", "_communicate"}  # methods of `subprocess.Popen`
_PROCESS = os.path.join("multiprocessing", "process.py")
_SPAWN = os.path.join("torch", "multiprocessing", "spawn.py")
# Numbers of system calls by machine. Source: the kernel's tables, https://syscalls.mebeim.net
_WAIT4, _WAITID, _READ = {"x86_64": ("61", "247", "0"), "aarch64": ("260", "95", "63")}.get(
    platform.machine(), ("", "", "")
)


class ChildWait(NamedTuple):
    """Wait of the main thread for a child process."""

    command: str  # command line of the child process
    since_s: float  # start of the wait, time.monotonic()
    pid: int = 0  # 0: unknown; the process started after `since_s`
    is_elsewhere: bool = False  # another rank runs the command
    is_stopped: bool = False  # the main thread waits in Python, and this worker process is stopped

    @property
    def for_s(self) -> float:
        return time.monotonic() - self.since_s


class Children:
    """Detects the child process that the main thread waits for.

    Args:
        waits: returns a true value if the main thread waits in Python for another thread, process or socket.
    """

    def __init__(self, waits: Callable[[], object] = lambda: None) -> None:
        self._waits = waits
        self._wait: ChildWait | None = None  # shell command of the cell
        self.seen: ChildWait | None = None  # another detected wait, with the time of its detection; reset by each cell
        self._main = threading.main_thread().ident or 0

    @contextlib.contextmanager
    def waiting(self, command: str, *, is_elsewhere: bool = False) -> Iterator[None]:
        """Context in the main thread that runs a shell command.

        Args:
            command: text of the command.
            is_elsewhere: whether another rank runs it.
        """
        before, self._wait = self._wait, ChildWait(_in_a_line(command), time.monotonic(), is_elsewhere=is_elsewhere)
        try:
            yield
        finally:
            self._wait = before

    def now(self) -> ChildWait | None:
        """Return the current wait of the main thread; None if it does not wait for a child process. Thread-safe."""
        if (wait := self._wait) is not None:
            return wait
        frame, is_halted = frame_of(self._main), False
        pid, command = _in_subprocess(frame) or (_in_system_call(), "")
        if pid == 0 and self._waits() and (pid := next(filter(is_stopped, _children_of(os.getpid())), 0)):
            kind = "DataLoader worker" if _is_in_data_loader(frame) else "worker process"
            command, is_halted = f"{kind} {pid}", True
        elif pid == 0 and _reads_pipe():
            pid = next((one for one in _children_of(os.getpid()) if any(map(is_stopped, [one, *descendants(one)]))), 0)
        if pid <= 0:
            self.seen = None
        elif self.seen is None or (self.seen.pid, self.seen.is_stopped) != (pid, is_halted):
            what = _in_a_line(command) or _command_of(pid)
            self.seen = ChildWait(what, time.monotonic(), pid, is_stopped=is_halted)
        return self.seen

    def interrupt(self) -> None:
        """End the processes that the main thread waits for in Python, with descendants. Call it in the main thread.

        These are a command, and processes of `multiprocessing` in `Process.join` and `torch.multiprocessing.spawn`.

        They ignore SIGINT, as the rank does, so they get SIGTERM. In a plain notebook SIGINT ends them: the stop button
        sends it to all processes of the notebook's group. IPython and `subprocess` end only the first process.
        """
        if (wait := self._wait) is not None:
            waits = [] if wait.is_elsewhere else [wait]
        else:
            frame, now = frame_of(self._main), time.monotonic()
            found = _in_subprocess(frame)
            waits = [ChildWait("", now, pid) for pid in ([found[0]] if found else _in_multiprocessing(frame))]
        for process in (process for wait in waits for process in reversed(_processes_of(wait))):
            with contextlib.suppress(psutil.Error):
                process.terminate()

    @contextlib.contextmanager
    def ending_loader_workers(self, *, if_: bool) -> Iterator[None]:
        """Context in which the main thread releases the variables of a failed cell, perhaps a DataLoader.

        Args:
            if_: whether the cell was interrupted. Otherwise torch ends the workers in its own time.
        """
        if not if_:
            yield
            return
        is_over = threading.Event()

        def end() -> None:
            while not is_over.wait(_LOADER_S):
                self.end_loader_workers()

        with contextlib.suppress(RuntimeError):  # no thread can start: torch ends the workers later
            threading.Thread(target=end, name="ddp-loader-workers", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    def end_loader_workers(self) -> None:
        """Terminate the workers of the DataLoader that the main thread shuts down.

        torch waits for each worker for up to 5 s, then terminates it. In a plain notebook SIGINT also reaches the
        workers.

        Source: `_MultiProcessingDataLoaderIter._shutdown_workers` in `torch.utils.data.dataloader`
        """
        for its in _frames(frame_of(self._main)):
            if its.f_code.co_name == "_shutdown_workers" and its.f_code.co_filename.endswith(_DATA_LOADER):
                for worker in list(getattr(its.f_locals.get("self"), "_workers", ())):
                    with contextlib.suppress(Exception):  # it has just ended, or has no process yet
                        worker.terminate()

    def end(self, attempt: int) -> None:
        """Kill the child process that C code of the main thread waits for, such as `os.system`.

        Python runs signal handlers only after that call returns.

        Args:
            attempt: number of the attempt, from 1. Later attempts use SIGTERM, then SIGKILL.
        """
        number = _SIGNALS[min(attempt, len(_SIGNALS)) - 1]
        pid = _in_system_call()
        if pid > 0:
            with contextlib.suppress(psutil.Error):
                child = psutil.Process(pid)
                for process in [*child.children(recursive=True), child]:
                    process.send_signal(number)

    def words(self) -> str:
        """Describe the wait of the main thread, with the CPU time of the child process.

        Example:
            >>> with (children := Children()).waiting("pip install einops", is_elsewhere=True):
            ...     children.words()
            'waits for pip install einops, which another rank of this host runs'
        """
        return self._describe()[0]

    def words_if_stopped(self) -> str:
        """Describe the wait of the main thread if the child process or a descendant is stopped; otherwise return ""."""
        words, is_halted = self._describe()
        return words if is_halted else ""

    def _describe(self) -> tuple[str, bool]:
        """Return the description of the wait, and whether one of its processes is stopped."""
        wait = self.now()
        if wait is None:
            return "", False
        if wait.is_elsewhere:
            return f"waits for {wait.command}, which another rank of this host runs", False
        if wait.is_stopped:
            return f"its {wait.command} {_stopped([wait.pid])}", True
        command = f": {wait.command}" if wait.command else ""
        processes = _processes_of(wait)
        if not processes:
            return f"waits for a child process{command}", False
        pids = [one.pid for one in processes]
        waits = f"waits for child process {pids[0]}{command}"
        if stopped := list(filter(is_stopped, pids)):
            shown = ", ".join(map(str, stopped))
            whose = "it" if stopped == pids[:1] else f"process{'es' * (len(stopped) > 1)} {shown}"
            return f"{waits}; {whose} {_stopped(stopped)}", True
        return f"{waits}; {sum(map(_cpu_s, processes)):.1f} s of CPU time so far", False

    def to_json(self) -> dict[str, Any]:
        """Return the field `child` of `Vitals`."""
        wait = self.now()
        return {} if wait is None else {"command": wait.command, "since_s": wait.for_s}


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _in_subprocess(frame: FrameType | None) -> tuple[int, str] | None:
    """Return the process id and command that `subprocess` waits for in these frames; None if it does not wait."""
    for its in _frames(frame):
        if its.f_code.co_filename == subprocess.__file__ and its.f_code.co_name in _WAITS:
            process = its.f_locals.get("self")
            if isinstance(process, subprocess.Popen) and process.returncode is None:
                return process.pid, _text_of(process.args)
    return None


def _in_multiprocessing(frame: FrameType | None) -> list[int]:
    """Return the ids of the processes to end if `multiprocessing` joins one in these frames; [] if it joins none.

    Programs join one process after the other, so these are all processes of `multiprocessing` that are no daemons.
    Workers of pools and loaders are daemons. They are not joined while they work.
    """
    joins = [its for its in _frames(frame) if its.f_code.co_name == "join"]
    if not any(its.f_code.co_filename.endswith((_PROCESS, _SPAWN)) for its in joins):
        return []
    return [process.pid for process in multiprocessing.active_children() if process.pid and not process.daemon]


def _text_of(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments
    return " ".join(map(str, arguments)) if isinstance(arguments, list | tuple) else ""


def _in_system_call() -> int:
    """Return the process id of the main thread's wait system call; 0 if it is in none, -1 if it waits for any child."""
    try:
        with open("/proc/self/syscall") as file:  # shows the main thread, whichever thread reads it
            number, first, second, *_ = file.read().split()
    except (OSError, ValueError):  # not available, or the main thread runs
        return 0
    if number not in (_WAIT4, _WAITID):
        return 0
    pid = int(first if number == _WAIT4 else second, 16)
    return pid if pid < 1 << 31 else -1


def _command_of(pid: int) -> str:
    try:
        return _in_a_line(" ".join(psutil.Process(pid).cmdline()))
    except psutil.Error:
        return ""


def _processes_of(wait: ChildWait) -> list[psutil.Process]:
    """Return the processes that the main thread waits for, the direct child first."""
    try:
        if wait.pid:
            first = psutil.Process(wait.pid)
            return [first, *first.children(recursive=True)]
        return [
            one
            for one in psutil.Process(os.getpid()).children(recursive=True)
            if _age_s(one.pid) <= wait.for_s + _TICK_S
        ]
    except (psutil.Error, ProcessLookupError):  # it has just exited
        return []


def _reads_pipe() -> bool:
    """Return whether the main thread is in a read from a pipe or socket."""
    try:
        with open("/proc/self/syscall") as file:
            number, descriptor, *_ = file.read().split()
        if number != _READ:
            return False
        return os.readlink(f"/proc/self/fd/{int(descriptor, 16)}").startswith(("pipe:", "socket:"))
    except (OSError, ValueError):  # not available, or the main thread runs
        return False


def descendants(pid: int = 0) -> list[int]:
    """Return the descendants of a process (0: this process) that were started by main threads.

    The list is empty if `/proc` does not list child processes.
    """
    found: list[int] = []
    left = _children_of(pid or os.getpid())
    while left and len(found) < _MOST:
        one = left.pop()
        found.append(one)
        left += _children_of(one)
    return found


def _children_of(pid: int) -> list[int]:
    """Return the child processes started by the main thread of a process. Empty if `/proc` does not list them."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped. A process held by a debugger does not count as stopped."""
    try:
        return state_and_start(pid)[0] == "T"
    except (ProcessLookupError, OSError):
        return False


def _stopped(pids: Sequence[int]) -> str:
    """Return a clause about stopped processes, with the command that continues them."""
    is_one = len(pids) == 1
    resume = f"kill -CONT {' '.join(map(str, pids))}"
    return f"{'is' if is_one else 'are'} stopped; {resume} resumes {'it' if is_one else 'them'}"


def _is_in_data_loader(frame: FrameType | None) -> bool:
    return any(its.f_code.co_filename.endswith(_DATA_LOADER) for its in _frames(frame))


def _age_s(pid: int) -> float:
    """Return the age of a process; 0.0 if unknown, as on systems other than Linux."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    started_s = state_and_start(pid)[1] / os.sysconf("SC_CLK_TCK")
    return float(time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _in_a_line(command: str) -> str:
    text = " ".join(command.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


_LOOK_S = 1.0
_AGAIN_S = 0.6  # a process that continues before this time was stopped on purpose


class StoppedChildren:
    """Sends `ChildStopped` when the wait for a stopped child process starts, and when it ends.

    Args:
        children: wait detection of the rank.
        cell: returns the number of the running cell; 0 if none runs.
        send: sends a message to the notebook.
    """

    def __init__(self, children: Children, cell: Callable[[], int], send: Callable[[Message], None]) -> None:
        self._children = children
        self._cell = cell
        self._send = send
        self._looked_s = 0.0
        self._pause_s = _LOOK_S
        self._stopped: frozenset[int] = frozenset()  # at the last check
        self._said = ChildStopped(cell=0)

    def poll(self) -> float:
        """Check for stopped child processes if it is time. Return the seconds until the next check."""
        now = time.monotonic()
        if (left_s := self._looked_s + self._pause_s - now) > 0:
            return left_s
        self._looked_s = now
        cell, before, words = self._cell(), self._stopped, ""
        self._stopped = frozenset(pid for pid in descendants() if is_stopped(pid)) if cell else frozenset()
        if self._stopped & before:
            words = self._children.words_if_stopped()
        if words != self._said.words:
            self._said = ChildStopped(cell=cell, words=words)
            self._send(self._said)
        self._pause_s = _AGAIN_S if self._stopped and not self._stopped & before else _LOOK_S
        return self._pause_s
