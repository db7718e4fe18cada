"""Current position of the main thread in the user's code.

A position is the line of the cell or of a called file, and the function that this line called.
"""

from __future__ import annotations

import importlib.util
import site
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from sys import _current_frames, _getframe
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ddp_notebook.rank.group import waiting
from ddp_notebook.records.words import in_function, with_call
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import asyncio, os, threading

if TYPE_CHECKING:
    from ddp_notebook.rank.cell.children import Children

# Functions that replace functions of torch -> name in the user's API.
_STAND_INS = {
    **{name: name for name in ("init_process_group", "init_rpc", "wait", "get", "multi_get")},
    **{"init_store": "TCPStore", "connect_store": "TCPStore", "wait_for_future": "wait"},
    "stop_here": "breakpoint",  # the debugger
    "trace_dispatch": "",  # called by a debugger that steps through the cell
    "_on_interrupt": "",  # internal function of the interrupt handler
}
_WALKS = 5
_WRAPPERS = {
    *("wrapper", "_wrapped_call_impl", "_call_impl", "__call__", "_fn", "inner", "decorate_context", "_use_grad"),
    *("run_line_magic", "run_cell_magic", "system_piped"),  # in IPython
}
_TORCH = os.path.dirname(torch.__file__) + os.sep
OURS = str(Path(__file__).parents[1]) + os.sep  # everything that runs in a rank
_OURS_OF_BOTH = tuple(str(Path(__file__).parents[2] / name) + os.sep for name in ("messages", "wire", "records"))
_IPYKERNEL = importlib.util.find_spec("ipykernel")  # ipykernel may be in another folder than torch
LIBRARIES = tuple(
    path + os.sep
    for path in (
        *sysconfig.get_paths().values(),
        site.getusersitepackages(),
        os.path.dirname(_TORCH[:-1]),
        *([] if _IPYKERNEL is None else [os.path.dirname(os.path.dirname(str(_IPYKERNEL.origin)))]),
    )
)
_PYTHON = os.path.dirname(threading.__file__) + os.sep
# Python files whose code waits for another thread, process or socket. Not `subprocess`: waiting for it counts as work.
_WAITS = (
    *(_PYTHON + name for name in ("threading.py", "queue.py", "selectors.py")),
    *(_PYTHON + name + os.sep for name in ("concurrent", "multiprocessing")),
    waiting.__file__,
)


class RemoteWork(Protocol):
    """Remote calls that threads wait for, see `rank.rpc.serving`."""

    def words(self, thread: int, *, is_main: bool) -> str:
        """Describe the remote call that a thread waits for; "" if there is none."""


def frame_of(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread; for this thread, the frame below the calling function.

    A function with its own frame in a variable would keep all variables of an interrupted cell alive, such as a
    DataLoader with its workers.
    """
    if thread == threading.get_ident():
        return _getframe(1).f_back
    return _current_frames().get(thread)


class CurrentLine:
    """Finds the position of a thread in the code of cells.

    Args:
        is_script: for torchrun scripts, which have no cells: count lines of all user files.
    """

    def __init__(self, *, is_script: bool = False) -> None:
        self._is_script = is_script
        self.cells: dict[str, int] = {}  # file -> number in `In [n]`
        self._current = 0
        self._main = threading.main_thread().ident or 0
        self.task: asyncio.Task[Any] | None = None  # task of a cell with a top-level `await`
        self.serving: RemoteWork | None = None  # remote calls that threads wait for
        self.children: Children | None = None  # processes that the main thread waits for
        self.action: Callable[[int], str] | None = None  # returns the pipeline action of a thread
        self.failed = ""  # error of a failed cell whose traceback is being formatted

    def enter(self, file: str, execution_count: int) -> None:
        """Register the file of a cell that starts. Called for each cell."""
        self.cells[file] = self._current = execution_count

    def describe(self, thread: int = 0) -> str:
        """Describe the position of a thread; "" outside the code of cells. Thread-safe.

        Examples: `"cell line 3, in all_reduce"`, `"dataset.py:88 in __getitem__, from cell line 3"`.

        Args:
            thread: id of the thread; 0 for the main thread.
        """
        for _ in range(_WALKS):  # retry: if a call returns while its frames are read, the walk ends too early
            frame = frame_of(thread or self._main)
            if frame is not None and (place := self.of_frame(frame)):
                return self.with_words(place, thread)
        return "" if thread else self._of_task()

    def with_words(self, place: str, thread: int = 0) -> str:
        """Return a position with the thread's pipeline action, remote calls and child processes.

        Args:
            place: position of the thread.
            thread: id of the thread; 0 for the main thread.
        """
        thread = thread or self._main
        try:
            told = [
                "" if self.action is None else self.action(thread),
                "" if self.serving is None else self.serving.words(thread, is_main=thread == self._main),
                "" if self.children is None or thread != self._main else self.children.words(),
            ]
            words = ", ".join(filter(None, told))
            return f"{place} ({words})" if place and words else place
        except Exception:  # no memory or descriptor left; the interrupt handler calls this method and must not fail
            return place

    def of_thread(self, thread: int) -> str:
        """Describe the position of another thread, with its name.

        Example: `"thread 'Thread-5 (worker)' at cell line 3 in worker"`.
        """
        name = next((one.name for one in threading.enumerate() if one.ident == thread), str(thread))
        place = self.describe(thread)
        return f"thread {name!r}" + (f" at {place}" if place else "")

    def waits(self, frame: FrameType | None = None) -> tuple[int, int] | None:
        """Return an id of the wait if the cell waits in Python for another thread, process or socket, else None.

        Thread-safe.

        Args:
            frame: frame to check; None for the innermost frame of the main thread.
        """
        innermost = frame = frame or frame_of(self._main)
        if innermost is None or not innermost.f_code.co_filename.startswith(_WAITS):
            return None
        while frame is not None and frame.f_code.co_filename not in self.cells:
            if frame.f_code.co_name == "__del__":  # an interrupt in `__del__` has no effect: Python only prints it
                return None
            if frame.f_code.co_filename == subprocess.__file__:  # `communicate` uses `selectors`
                return None
            frame = frame.f_back
        return None if frame is None else (id(innermost), innermost.f_lasti)

    def is_in_torch(self, frame: FrameType | None = None) -> bool:
        """Return whether this frame (default: the main thread's innermost one) is in torch. Thread-safe."""
        frame = frame or frame_of(self._main)
        return frame is not None and frame.f_code.co_filename.startswith(_TORCH)

    @property
    def is_in_event_loop(self) -> bool:
        """Return whether the main thread waits in its event loop. Thread-safe."""
        frame = frame_of(self._main)
        caller = None if frame is None else frame.f_back
        return caller is not None and caller.f_code.co_filename == asyncio.base_events.__file__

    def of_frame(self, innermost: FrameType) -> str:
        """Describe the position of these frames, as in `describe`."""
        calls: list[tuple[str, int, str]] = []
        frame: FrameType | None = innermost
        while frame is not None:
            calls.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        return self.of_calls(calls) or _of_statement(innermost)

    def _of_task(self) -> str:
        """Describe the position at which the cell's coroutine is suspended."""
        calls: list[tuple[str, int, str]] = []
        coroutine = None if self.task is None else self.task.get_coro()
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            calls.insert(0, (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            coroutine = getattr(coroutine, "cr_await", None)
        return self.of_calls(calls)

    def of_traceback(self, traceback: TracebackType | None) -> str:
        """Describe the position at which an exception was raised."""
        calls: list[tuple[str, int, str]] = []
        while traceback is not None:
            code = traceback.tb_frame.f_code
            calls.insert(0, (code.co_filename, traceback.tb_lineno, code.co_name))
            traceback = traceback.tb_next
        return self.of_calls(calls)

    def of_calls(self, calls: list[tuple[str, int, str]], current: int | None = None) -> str:
        """Describe the position of these calls, as in `describe`.

        Args:
            calls: (file, line, function) of each call, innermost first.
            current: number of their cell; None for the running cell.
        """
        current = self._current if current is None else current
        called = users = ""
        for file, line, function in calls:
            if file.startswith((OURS, *_OURS_OF_BOTH)):
                called = _STAND_INS.get(function, called)
                continue
            number = self.cells.get(file)
            if number is not None:
                cell = "cell" if number == current else f"In[{number}]"
                place = f"{cell} line {line}{in_function(function)}"
                return f"{users}, from {place}" if users else with_call(place, called)
            if not users and not file.startswith((*LIBRARIES, "<")):
                users = with_call(f"{os.path.basename(file)}:{line} in {function}", called)
            elif function not in _WRAPPERS:
                called = function
        return users if self._is_script else ""


def _of_statement(innermost: FrameType) -> str:
    """Describe the statement that IPython compiles at the moment; it compiles each statement before running it."""
    frame: FrameType | None = innermost
    while frame is not None:
        if frame.f_globals.get("__name__") == "IPython.core.interactiveshell":
            if frame.f_code.co_name == "run_ast_nodes":
                line = getattr(frame.f_locals.get("node"), "lineno", None)
                return "" if line is None else f"cell line {line}"
            if frame is not innermost and frame.f_code.co_name == "run_code":  # a function called between statements
                return ""
        frame = frame.f_back
    return ""
