"""Widgets of the ranks in the notebook: each comm of a rank has a stand-in in the notebook's kernel."""

from __future__ import annotations

import base64
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from ddp_notebook.events import Comm


class Comms:
    """Passes on what widgets and the browser say to each other. Without a kernel, as in a terminal, it does nothing.

    What a rank says goes to the front end at once, in the I/O thread: so a widget's model is there before its view,
    which is displayed by the main thread.

    Args:
        send: hands a message to a rank, in order with the cells; from any thread.
    """

    def __init__(self, send: Callable[[int, Comm], None]) -> None:
        self._send = send
        self._stand_ins: dict[str, Any] = {}  # by comm id, which is the same on both sides
        self._lock = threading.Lock()
        self._is_open = _has_kernel()

    def on_message(self, rank: int, message: Comm) -> None:
        """A rank's end of a comm says something."""
        comm_id = message.content["comm_id"]
        what = {
            "data": message.content.get("data"),
            "metadata": message.metadata,
            "buffers": [base64.b64decode(buffer) for buffer in message.buffers],
        }
        with self._lock:
            if not self._is_open:
                return
            if message.msg_type == "comm_open":
                self._stand_ins[comm_id] = self._make(rank, message.content)
            stand_in = self._stand_ins.get(comm_id)
            if stand_in is None:  # the browser has closed it
                return
            if message.msg_type == "comm_open":
                stand_in.open(**what)
            elif message.msg_type == "comm_msg":
                stand_in.send(**what)
            else:
                del self._stand_ins[comm_id]
                stand_in.close(**what)

    def close(self) -> None:
        """The ranks end: tell the front end that nothing moves its widgets any more."""
        with self._lock:
            self._is_open = False
            for stand_in in self._stand_ins.values():
                stand_in.close()
            self._stand_ins.clear()

    def _make(self, rank: int, content: dict[str, Any]) -> Any:
        from comm import create_comm

        stand_in = create_comm(
            comm_id=content["comm_id"],
            target_name=content.get("target_name", ""),
            target_module=content.get("target_module"),
            primary=False,  # so that it is not opened yet: the browser may answer at once
        )
        stand_in.on_msg(functools.partial(self._to_rank, rank))
        stand_in.on_close(functools.partial(self._to_rank, rank))
        return stand_in

    def _to_rank(self, rank: int, message: dict[str, Any]) -> None:
        """The browser says something. Called by the kernel, in whatever thread it reads comms."""
        kind = message["header"]["msg_type"]
        if kind == "comm_close":
            with self._lock:
                self._stand_ins.pop(message["content"]["comm_id"], None)
        buffers = [base64.b64encode(buffer).decode() for buffer in message.get("buffers") or ()]
        self._send(
            rank,
            Comm(msg_type=kind, content=message["content"], metadata=message.get("metadata") or {}, buffers=buffers),
        )


def _has_kernel() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None
