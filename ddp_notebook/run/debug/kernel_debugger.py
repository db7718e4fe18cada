"""The debugger of this notebook's kernel: its requests, its breakpoints and its events.

The front end sends requests of the debug adapter protocol to the kernel. ipykernel passes them to debugpy, which
follows the kernel process. Its debugger has no public interface, so all parts that this package uses are here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)
Reply = dict[str, Any]
Handle = Callable[[Reply], Awaitable[Reply]]  # a request -> its response
PACKAGE = str(Path(__file__).parents[2]) + os.sep  # folder of this package


class KernelDebugger:
    """Debugger of a kernel.

    Args:
        kernel: a kernel of ipykernel, with a debugger.
    """

    @classmethod
    def of(cls, kernel: Any) -> KernelDebugger | None:
        """Return the debugger of a kernel. None: debugpy is not installed, or this version of ipykernel is unknown."""
        if getattr(kernel, "debugger", None) is None:
            return None
        try:
            return cls(kernel)
        except (AttributeError, ImportError):
            _log.warning("this version of ipykernel is unknown: the front end's debugger does not stop ranks")
            return None

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._debugger = kernel.debugger
        self._original: Handle = kernel.do_debug_request
        from ipykernel.compiler import get_file_name, get_tmp_directory

        self.folder: str = get_tmp_directory()  # folder of the files of cells
        self.file_of: Callable[[str], str] = get_file_name  # the file of a cell's code
        self.loop: asyncio.AbstractEventLoop = kernel.control_thread.io_loop.asyncio_loop
        self.send_event: Callable[[Reply], None] = self._debugger.event_callback
        self.accepts: Callable[[str], bool] = self._debugger.accept_variable  # returns whether to show a variable

    def intercept(self, handle: Handle) -> None:
        """Handle the requests of the front end from now on. They arrive in `loop`."""
        self._kernel.do_debug_request = handle

    def remove(self) -> None:
        """Let the kernel handle all requests itself again."""
        self._kernel.do_debug_request = self._original

    async def ask(self, request: Reply) -> Reply:
        """Let the kernel handle a request. Its errors become responses; ipykernel itself would not respond."""
        try:
            return await self._original(request)
        except Exception as error:
            _log.debug("ipykernel failed to handle a request", exc_info=True)
            answered = {"seq": request["seq"], "request_seq": request["seq"], "command": request["command"]}
            return {"type": "response", **answered, "success": False, "message": repr(error), "body": {}}

    @property
    def is_on(self) -> bool:
        """Return whether the front end's debugger is on."""
        return bool(self._debugger.is_started)

    @property
    def breakpoints(self) -> dict[str, list[Reply]]:
        """Breakpoints by file. `debugInfo` shows them to front ends, which set them again after a reload."""
        found: dict[str, list[Reply]] = self._debugger.breakpoint_list
        return found

    def executed(self) -> Sequence[str]:
        """Return the cells that the user has run."""
        found: Sequence[str] = self._kernel.shell.history_manager.input_hist_raw
        return found

    @property
    def stopped_threads(self) -> Collection[int]:
        """Stopped threads of the kernel."""
        found: Collection[int] = self._debugger.stopped_threads
        return found

    def skip_this_package(self) -> None:
        """Let steps of plain cells not enter this package, nor numpy, which it calls."""
        if (pydevd := sys.modules.get("pydevd")) is None or (debugger := pydevd.get_global_debugger()) is None:
            return
        import debugpy
        import numpy
        from _pydevd_bundle.pydevd_api import PyDevdAPI

        folders = os.path.dirname(debugpy.__file__), PACKAGE, os.path.dirname(numpy.__file__)
        PyDevdAPI().set_dont_trace_start_end_patterns(debugger, folders, ("debugpy_launcher.py",))
