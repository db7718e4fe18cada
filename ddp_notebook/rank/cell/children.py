"""The child process that the main thread of a rank waits for.

| wait | how it is seen |
|---|---|
| a command of the cell, such as `!ls` | `commands` says so |
| `subprocess.run`, `Popen.wait`, `Popen.communicate` | frames of the main thread |
| `os.system`, `os.waitpid`, `Process.join` | the system call of the main thread, in `/proc` |
| a queue or pipe of a stopped worker process, such as a DataLoader's | the states of child processes, in `/proc` |
| a read from a pipe or socket while a child process is stopped | that system call, and those states |

Where `/proc` does not show system calls, waits of the third and of the last row are not seen, and without lists of
children in `/proc` those of the last two rows.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import psutil

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import ChildStopped
from ddp_notebook.registry.identities import state_and_start
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, os, signal, threading, time

_SIGNALS = (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_TICK_S = 0.02  # ages are rounded to a tick
_MOST = 200  # child processes that are looked at
_LONGEST = 100  # characters of a command that are shown
_DATA_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")
_WAITS = {"wait", "_wait", "communicate", "_communicate"}  # methods of `subprocess.Popen`
# Numbers of system calls, by machine. Source: the kernel's tables, https://syscalls.mebeim.net
_WAIT4, _WAITID, _READ = {"x86_64": ("61", "247", "0"), "aarch64": ("260", "95", "63")}.get(
    platform.machine(), ("", "", "")
)


class ChildWait(NamedTuple):
    """A wait of the main thread."""

    command: str  # the command line of the child process
    since_s: float  # time.monotonic()
    pid: int = 0  # 0: a process that was started after `since_s`
    is_elsewhere: bool = False  # another rank runs the command
    is_stopped: bool = False  # the main thread waits in Python, and this worker process is stopped

    @property
    def for_s(self) -> float:
        return time.monotonic() - self.since_s


class Children:
    """Tracks the child process that the main thread waits for.

    Args:
        waits: returns something if the main thread waits in Python for another thread, process or socket.
    """

    def __init__(self, waits: Callable[[], object] = lambda: None) -> None:
        self._waits = waits
        self._wait: ChildWait | None = None  # a command of the cell
        self.seen: ChildWait | None = None  # another wait, since it was first seen; each cell forgets it
        self._main = threading.main_thread().ident or 0

    @contextlib.contextmanager
    def waiting(self, command: str, *, is_elsewhere: bool = False) -> Iterator[None]:
        """Mark in the main thread that the block runs a command.

        Args:
            command: its text.
            is_elsewhere: another rank runs it.
        """
        before, self._wait = self._wait, ChildWait(_in_a_line(command), time.monotonic(), is_elsewhere=is_elsewhere)
        try:
            yield
        finally:
            self._wait = before

    def now(self) -> ChildWait | None:
        """Return the wait of the main thread; None: it waits for no child process. From any thread."""
        if (wait := self._wait) is not None:
            return wait
        frame, is_halted = sys._current_frames().get(self._main), False
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

    def end(self, attempt: int) -> None:
        """End the child process that C code of the main thread waits for, as `os.system` does. Python does not run the
        handler of a signal before that returns.

        Args:
            attempt: 1 or more; the later ones use SIGTERM, and then SIGKILL.
        """
        number = _SIGNALS[min(attempt, len(_SIGNALS)) - 1]
        pid = _in_system_call()
        if pid > 0:
            with contextlib.suppress(psutil.Error):
                child = psutil.Process(pid)
                for process in [*child.children(recursive=True), child]:
                    process.send_signal(number)

    def words(self) -> str:
        """Describe the wait of the main thread, with the CPU time that the child process has used.

        Example:
            >>> with (children := Children()).waiting("pip install einops", is_elsewhere=True):
            ...     children.words()
            'waits for pip install einops, which another rank of this host runs'
        """
        return self._describe()[0]

    def words_if_stopped(self) -> str:
        """Describe the wait of the main thread if the child process, or one that this has started, is stopped."""
        words, is_halted = self._describe()
        return words if is_halted else ""

    def _describe(self) -> tuple[str, bool]:
        """Describe the wait. Returns also whether a process that it is for is stopped."""
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


def _in_subprocess(frame: FrameType | None) -> tuple[int, str] | None:
    """Return the process that `subprocess` waits for in these frames, and its command; None if it waits for none."""
    while frame is not None:
        if frame.f_code.co_filename == subprocess.__file__ and frame.f_code.co_name in _WAITS:
            process = frame.f_locals.get("self")
            if isinstance(process, subprocess.Popen) and process.returncode is None:
                return process.pid, _text_of(process.args)
        frame = frame.f_back
    return None


def _text_of(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments
    return " ".join(map(str, arguments)) if isinstance(arguments, list | tuple) else ""


def _in_system_call() -> int:
    """Return the process that the main thread waits for in the kernel; 0: it is not in such a call, -1: any child."""
    try:
        with open("/proc/self/syscall") as file:  # the main thread, whichever thread reads it
            number, first, second, *_ = file.read().split()
    except (OSError, ValueError):  # not shown; it runs
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
    """The processes that the main thread waits for, the one that it has started first."""
    try:
        if wait.pid:
            first = psutil.Process(wait.pid)
            return [first, *first.children(recursive=True)]
        return [
            one
            for one in psutil.Process(os.getpid()).children(recursive=True)
            if _age_s(one.pid) <= wait.for_s + _TICK_S
        ]
    except (psutil.Error, ProcessLookupError):  # it has just ended
        return []


def _reads_pipe() -> bool:
    """Return whether the main thread is in a read from a pipe or socket."""
    try:
        with open("/proc/self/syscall") as file:
            number, descriptor, *_ = file.read().split()
        if number != _READ:
            return False
        return os.readlink(f"/proc/self/fd/{int(descriptor, 16)}").startswith(("pipe:", "socket:"))
    except (OSError, ValueError):  # not shown; it runs
        return False


def descendants(pid: int = 0) -> list[int]:
    """Return the processes below a process, as far as main threads have started them; 0: below this one. None where
    `/proc` does not list them."""
    found: list[int] = []
    left = _children_of(pid or os.getpid())
    while left and len(found) < _MOST:
        one = left.pop()
        found.append(one)
        left += _children_of(one)
    return found


def _children_of(pid: int) -> list[int]:
    """Return the child processes that the main thread of a process has started; none where `/proc` does not list
    them."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped. One that a debugger holds is not."""
    try:
        return state_and_start(pid)[0] == "T"
    except (ProcessLookupError, OSError):
        return False


def _stopped(pids: Sequence[int]) -> str:
    """Return the clause about stopped processes, with the remedy."""
    is_one = len(pids) == 1
    resume = f"kill -CONT {' '.join(map(str, pids))}"
    return f"{'is' if is_one else 'are'} stopped; {resume} lets {'it' if is_one else 'them'} go on"


def _is_in_data_loader(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.endswith(_DATA_LOADER):
            return True
        frame = frame.f_back
    return False


def _age_s(pid: int) -> float:
    """Return how long a process has run; 0.0 if this is not known, as on systems other than Linux."""
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
_AGAIN_S = 0.6  # a process that goes on before this time was stopped on purpose


class StoppedChildren:
    """Sends `ChildStopped` when such a wait begins, and when it ends.

    Args:
        children: of the rank.
        cell: returns the number of the running cell; 0: none runs.
        send: sends a message to the notebook.
    """

    def __init__(self, children: Children, cell: Callable[[], int], send: Callable[[Message], None]) -> None:
        self._children = children
        self._cell = cell
        self._send = send
        self._looked_s = 0.0
        self._pause_s = _LOOK_S
        self._stopped: frozenset[int] = frozenset()  # at the last look
        self._said = ChildStopped(cell=0)

    def poll(self) -> float:
        """Look if it is time. Returns the seconds until the next look."""
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
