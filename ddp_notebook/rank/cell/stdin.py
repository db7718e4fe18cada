"""`input()` and `getpass()` of a cell, forwarded to the notebook."""

from __future__ import annotations

import builtins
import getpass
import sys
from collections.abc import Callable
from typing import Any

from IPython.core.error import StdinNotImplementedError

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import InputReply, InputRequest
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import itertools, os, queue, threading

_LOOK_S = 0.2  # an interrupt just before the wait is noticed after this time


class Stdin:
    """Replaces `input` and `getpass.getpass` on a rank. `%%px` temporarily replaces them with its own functions.

    Args:
        send: sends a message to the notebook.
        running_cell: returns the number of the running cell; None if none runs.
    """

    def __init__(self, send: Callable[[Message], None], running_cell: Callable[[], int | None]) -> None:
        self._send = send
        self._running_cell = running_cell
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._replies: dict[int, queue.SimpleQueue[InputReply]] = {}
        builtins.input = self._input
        getpass.getpass = self._getpass

    def on_reply(self, reply: InputReply) -> None:
        """Pass a reply to the waiting call. Called in the agent's thread."""
        waiting = self._replies.get(reply.request)
        if waiting is not None:
            waiting.put(reply)

    def _input(self, prompt: Any = "", /) -> str:
        return self._ask(str(prompt), password=False)

    def _getpass(self, prompt: str = "Password: ", stream: Any = None) -> str:
        return self._ask(prompt, password=True)

    def _ask(self, prompt: str, *, password: bool) -> str:
        cell = self._running_cell()
        if os.getpid() != self._pid:
            raise EOFError("input() does not work in a process forked from a rank")
        if cell is None or threading.current_thread() is not threading.main_thread():
            raise StdinNotImplementedError(
                "input() works only in the main thread while the notebook waits for the cell"
            )
        sys.stdout.flush()
        sys.stderr.flush()
        request = next(self._numbers)
        self._replies[request] = queue.SimpleQueue()
        try:
            self._send(InputRequest(cell=cell, request=request, prompt=prompt, password=password))
            while True:
                try:
                    reply = self._replies[request].get(timeout=_LOOK_S)
                    break
                except queue.Empty:
                    continue
        finally:
            del self._replies[request]
        if reply.error:
            raise StdinNotImplementedError(reply.error)
        return reply.text
