"""debugpy on a rank, for the debugger of the front end. It exchanges messages with the notebook over the wire.

debugpy normally listens on a port and starts an adapter process. Its tracer, pydevd, speaks the debug adapter protocol
itself. So this module gives pydevd one end of a socket pair in place of a connection.

The code of cells is traced only while a cell runs. A stopped thread waits inside pydevd's trace function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from ddp_notebook.rank.cell.current_line import OURS
from ddp_notebook.rank.cell.exceptions import with_type
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import json, os, socket, threading

_PACKAGE = os.path.dirname(os.path.dirname(OURS))
_SETTINGS = {
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # otherwise it prints a warning about frozen modules
    "PYDEVD_IPYTHON_COMPATIBLE_DEBUGGING": "1",  # IPython runs each statement of a cell in its own frame
    "PYDEVD_USE_SYS_MONITORING": "0",  # Python 3.12 and later: use a trace function, as on 3.11
}
_CHUNK_BYTES = 1 << 16
_NO_DEBUGPY = "debugpy is not installed there (pip install debugpy)"
_HEADER_END = b"\r\n\r\n"


class Adapter:
    """debugpy in this process. It is started once, and follows cells while `is_on`.

    Args:
        send: sends a message of the debug adapter protocol to the notebook. Called in a thread.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self.is_on = False
        self._send = send
        self._pid = os.getpid()
        self._main = threading.main_thread().ident
        self._debugger: Any = None  # pydevd's `PyDB`; None before the first start
        self._socket: socket.socket | None = None
        self._cell_files: set[str] = set()  # these need not exist
        self._stopped: set[int] = set()  # threads that are stopped
        self._is_interrupted = False  # the main thread was interrupted while it was stopped
        self._traces = False
        self._quits = False  # the running cell is being ended

    # ---- starting and stopping

    def start(self) -> str:
        """Start debugpy, in the main thread. Return why it cannot start; "" if it runs."""
        if self._debugger is None:
            try:
                self._connect()
            except ModuleNotFoundError as error:
                is_missing = str(error.name).partition(".")[0] == "debugpy"
                return _NO_DEBUGPY if is_missing else f"this version of debugpy does not work: {with_type(error)}"
            except Exception as error:  # such as another version of pydevd
                return f"this version of debugpy does not work: {with_type(error)}"
        self.is_on = True
        return ""

    def stop(self) -> bool:
        """Follow no more cells, and let stopped threads run on. Return whether there were any. Thread-safe."""
        had_stopped = self.is_on and bool(self._stopped)
        if self.is_on:
            self.is_on = False
            self.request(json.dumps({"type": "request", "seq": 0, "command": "disconnect", "arguments": {}}).encode())
        return had_stopped

    def _connect(self) -> None:
        hook = sys.breakpointhook  # debugpy replaces it
        before = {name: os.environ.get(name) for name in _SETTINGS}
        os.environ.update(_SETTINGS)
        try:
            import debugpy.server  # makes its copy of pydevd importable, and selects the protocol
            import pydevd
        finally:
            sys.breakpointhook = hook
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        import pydevd_file_utils
        from _pydevd_bundle.pydevd_additional_thread_info import set_additional_thread_info
        from _pydevd_bundle.pydevd_comm_constants import CMD_SET_BREAK
        from _pydevd_bundle.pydevd_constants import STATE_RUN
        from _pydevd_bundle.pydevd_thread_lifecycle import internal_run_thread

        ours, theirs = socket.socketpair()
        connect, exists = pydevd.start_client, pydevd_file_utils.exists
        pydevd.start_client = lambda *_: theirs
        try:
            pydevd.settrace(
                host="the notebook",
                suspend=False,
                trace_only_current_thread=True,  # `begin` traces threads that start in a cell
                wait_for_ready_to_run=False,
                notify_stdin=False,
                dont_trace_start_patterns=(os.path.dirname(debugpy.__file__) + os.sep, _PACKAGE + os.sep),
            )
        finally:
            pydevd.start_client = connect
        debugger = pydevd.get_global_debugger()
        debugger.disable_tracing()
        wait = debugger.do_wait_suspend

        def trace_dispatch(thread: Any, *arguments: Any, **more: Any) -> None:
            # named like the function of a tracer, so that descriptions of a place leave it out
            self._wait(lambda: wait(thread, *arguments, **more))

        debugger.do_wait_suspend = trace_dispatch
        pydevd_file_utils.exists = lambda path: path in self._cell_files or exists(path)
        self._info_of, self._let_run = set_additional_thread_info, internal_run_thread
        self._runs, self._breaks = STATE_RUN, CMD_SET_BREAK
        self._info_of_main = set_additional_thread_info(sys.modules["threading"].main_thread())
        self._socket, self._debugger = ours, debugger
        thread = threading.Thread(target=self._read, name="ddp-adapter", daemon=True)
        thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
        thread.start()

    # ---- messages

    def request(self, message: bytes, cell_file: str = "") -> None:
        """Pass a request to debugpy. Thread-safe.

        Args:
            message: JSON.
            cell_file: file of a cell in the request, which need not exist.
        """
        if self._socket is not None:
            if cell_file:
                self._cell_files.add(cell_file)
            self._socket.sendall(b"Content-Length: %d%b%b" % (len(message), _HEADER_END, message))

    def _read(self) -> None:
        assert self._socket is not None
        received = b""
        while chunk := self._socket.recv(_CHUNK_BYTES):
            received += chunk
            while (found := split_message(received)) is not None:
                message, received = found
                self._send(message)

    # ---- cells, in the main thread

    def begin(self) -> None:
        """Trace the code of a cell, and the threads that it starts."""
        self._traces = True
        self._quits = self._is_interrupted = False
        self._run_on(sys.modules["threading"].main_thread())
        sys.modules["threading"].settrace(self._debugger.trace_dispatch)
        self._debugger.enable_tracing()

    def end(self) -> None:
        """End tracing. Threads of the cell that are stopped run on."""
        if not self._traces:
            return
        self._traces = False
        self._debugger.disable_tracing()
        sys.modules["threading"].settrace(None)
        self._run_on(sys.modules["threading"].main_thread())  # a step does not go on in the next cell
        self.quit_threads(raises=False)

    def stop_at(self, frame: FrameType) -> None:
        """Stop in a frame that has called `breakpoint()`."""
        thread = sys.modules["threading"].current_thread()
        self._info_of(thread)
        self._debugger.enable_tracing()  # after an interrupt in this cell, or in a thread of an earlier cell
        self._debugger.set_suspend(thread, self._breaks)
        self._debugger.do_wait_suspend(thread, frame, "line", None)

    # ---- the end of a cell that is stopped

    def quit_threads(self, *, raises: bool = True) -> None:
        """Let stopped threads other than the main thread run on. Thread-safe.

        Args:
            raises: each of them ends with KeyboardInterrupt.
        """
        self._quits = raises
        for thread in sys.modules["threading"].enumerate():
            if thread.ident != self._main and thread.ident in self._stopped:
                self._run_on(thread)

    def take_interrupt(self, frame: FrameType | None) -> bool:
        """Handle an interrupt of the main thread. Called in a signal handler.

        An exception in pydevd's wait would leave pydevd's state behind. So the main thread leaves the wait, and raises
        KeyboardInterrupt in the line at which it has stopped.

        Returns:
            False if the main thread has not stopped at a line, or evaluates an expression there.
        """
        if self._main not in self._stopped:
            return False
        self._is_interrupted = True
        self._info_of_main.pydev_step_cmd = -1
        self._info_of_main.pydev_state = self._runs  # pydevd looks every 0.2 s; its own functions would take locks
        return not _evaluates(frame)

    def _run_on(self, thread: Any) -> None:
        self._let_run(thread, self._info_of)

    def _wait(self, wait: Callable[[], None]) -> None:
        """Wait until a thread may run on: it is stopped."""
        if os.getpid() != self._pid:  # a forked process has no thread that could let it run on
            self._debugger.disable_tracing()
            return
        here = threading.get_ident()
        self._stopped.add(here)
        try:
            wait()
        finally:
            self._stopped.discard(here)
        ends = self._is_interrupted if here == self._main else self._quits
        if ends:
            raise KeyboardInterrupt


def split_message(received: bytes) -> tuple[bytes, bytes] | None:
    """Split the first message of the debug adapter protocol from the received bytes.

    Returns:
        The content of the message, and the bytes after it; None if the message is not complete.

    Source: "Base protocol" in https://microsoft.github.io/debug-adapter-protocol/overview

    Example:
        >>> split_message(b"Content-Length: 2" + b"\\r\\n" * 2 + b"{}Cont")
        (b'{}', b'Cont')
    """
    header, end, content = received.partition(_HEADER_END)
    if not end:
        return None
    length = next(int(line[15:]) for line in header.splitlines() if line.lower().startswith(b"content-length:"))
    return (content[:length], content[length:]) if len(content) >= length else None


def _evaluates(frame: FrameType | None) -> bool:
    """Return whether a stopped thread evaluates an expression of the front end."""
    while frame is not None and frame.f_code is not Adapter._wait.__code__:
        if frame.f_code.co_name == "do_it":  # a method of pydevd's `InternalThreadCommand`
            return True
        frame = frame.f_back
    return False
