"""Read one line of the user while the output of a running cell goes on.

`input()` blocks the main thread until the user has typed a line. A prompt of a debugger must not do that: other ranks
print, fail or stop in the meantime. So the request is sent like that of `input()`, and the caller polls for the reply.
"""

from __future__ import annotations

import select
import sys
from typing import Any, Protocol

from ddp_notebook.run.notebook_kernel import has_front_end, kernel

_END_OF_INPUT = "\x04"  # typed as Ctrl-D


class PromptLine(Protocol):
    """One request for a line."""

    def poll(self) -> str | None:
        """Return the line; None if it was not typed yet. The end of the input is the line "q"."""


class _KernelLine:
    """Request to the front end of a Jupyter kernel, as `ipykernel.kernelbase.Kernel._input_request` sends it.

    Args:
        running: the kernel.
        prompt: text before the line.
    """

    def __init__(self, running: Any, prompt: str) -> None:
        import zmq

        self._kernel = running
        self._again = zmq.Again
        self._no_wait = zmq.NOBLOCK
        while self._receive_raw() is not None:  # late replies to earlier requests
            pass
        running.session.send(
            running.stdin_socket,
            "input_request",
            {"prompt": prompt, "password": False},
            running.get_parent("shell"),
            ident=running._parent_ident["shell"],
        )

    def _receive_raw(self) -> Any:
        try:
            return self._kernel.stdin_socket.recv_multipart(self._no_wait)
        except self._again:
            return None

    def poll(self) -> str | None:
        _, reply = self._kernel.session.recv(self._kernel.stdin_socket)
        if reply is None:
            return None
        line = str(reply["content"].get("value", ""))
        return "q" if line == _END_OF_INPUT else line


class _TerminalLine:
    """Line of a terminal.

    Args:
        prompt: text before the line.
    """

    def __init__(self, prompt: str) -> None:
        print(prompt, end="", flush=True)

    def poll(self) -> str | None:
        if not select.select([sys.stdin], [], [], 0)[0]:
            return None
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else "q"


def can_read() -> bool:
    """Return whether a user can type lines: at the front end of a notebook, or in a terminal."""
    if kernel() is not None:
        return has_front_end()
    try:
        return sys.stdin is not None and sys.stdin.isatty()
    except (AttributeError, ValueError):  # replaced or closed
        return False


def ask_line(prompt: str) -> PromptLine:
    """Request a line in the main thread. A later request of this process replaces it.

    Args:
        prompt: text before the line.
    """
    running = kernel()
    return _TerminalLine(prompt) if running is None else _KernelLine(running, prompt)
