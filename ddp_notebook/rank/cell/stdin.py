"""`input()` and `getpass()` of a cell, and commands for a debugger, forwarded to the notebook."""

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

NO_CELL = "a debugger stops a thread only while a cell runs: wait for the thread in the cell"
_LOOK_S = 0.2  # an interrupt just before the wait is noticed after this time


class Stdin:
    """Replaces `input` and `getpass.getpass` on a rank. `%%px` temporarily replaces them with its own functions.

    Args:
        send: sends a message to the notebook.
        send_in_order: sends a request that the notebook handles after all earlier text.
        running_cell: returns the number of the running cell; None if none runs.
    """

    def __init__(
        self,
        send: Callable[[Message], None],
        send_in_order: Callable[[InputRequest], None],
        running_cell: Callable[[], int | None],
    ) -> None:
        self._send = send
        self._send_in_order = send_in_order
        self._running_cell = running_cell
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._of_threads: set[int] = set()  # open requests of other threads than the main thread
        self._at_end = "continue"  # the answer to such a request if its cell has ended
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
        request = InputRequest(cell=cell, request=next(self._numbers), prompt=prompt, password=password)
        reply = self._reply_to(request, self._send)
        if reply.error:
            raise StdinNotImplementedError(reply.error)
        return reply.text

    def command(self, stopped_at: str, meshes: list[list[Any]]) -> InputReply:
        """Return the user's next command for a debugger in this thread. See `InputRequest`.

        The reply has an error if no cell runs.
        """
        if (cell := self._running_cell()) is None:
            return InputReply(request=0, error=NO_CELL)
        number = next(self._numbers)
        request = InputRequest(
            cell=cell, request=number, prompt="", password=False, stopped_at=stopped_at, meshes=meshes
        )
        if threading.current_thread() is not threading.main_thread():
            self._of_threads.add(number)
        try:
            return self._reply_to(request, self._send_in_order)
        finally:
            self._of_threads.discard(number)

    def answer_threads(self, text: str) -> None:
        """Answer the debuggers of other threads than the main thread, because no user will. Thread-safe."""
        self._at_end = text
        for number in list(self._of_threads):
            self.on_reply(InputReply(request=number, text=text))

    def _reply_to(self, request: InputRequest, send: Callable[[InputRequest], None]) -> InputReply:
        number = request.request
        self._replies[number] = queue.SimpleQueue()
        try:
            send(request)
            while True:
                try:
                    return self._replies[number].get(timeout=_LOOK_S)
                except queue.Empty:
                    if number in self._of_threads and self._running_cell() != request.cell:
                        return InputReply(request=number, text=self._at_end)  # the request came too late
        finally:
            del self._replies[number]
