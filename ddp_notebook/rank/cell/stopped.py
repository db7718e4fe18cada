"""A look, once a second while a cell runs, at child processes that are stopped (SIGSTOP) while their rank waits for
them. The look reads `/proc`, which takes 0.04 ms, and 0.06 ms for each child process."""

from __future__ import annotations

from collections.abc import Callable

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import ChildStopped
from ddp_notebook.rank.cell.children import Children, descendants, is_stopped
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import time

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

    def look(self) -> float:
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
