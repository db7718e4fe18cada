"""Widgets on a rank: their messages leave over our wire, and the browser's come in by the inbox."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jupyter_client.session import json_packer, json_unpacker

from ddp_notebook.messages.ranks import Comm
from ddp_notebook.stdlib import base64

_WIDGETS = "jupyter.widget"  # the target of every widget's comm
COMM_TYPES = {"comm_open", "comm_msg", "comm_close"}


class RankComms:
    """The comms that our cells have opened; those of `%%px` are ipyparallel's.

    Args:
        manager: the kernel's comm manager, which knows the rank's end of each comm.
        send: sends a message to the notebook, from any thread; gets its size in bytes and its key, see
            `outgoing.Outgoing.send`.
    """

    def __init__(self, manager: Any, send: Callable[[Comm, int, Hashable], None]) -> None:
        self._manager = manager
        self._send = send
        self._opened_in: dict[str, int] = {}  # the cell in which each was opened
        self._widgets: set[str] = set()  # ids of the comms that belong to widgets
        self._capturing: set[str] = set()  # Output widgets that stand around the code which runs

    @property
    def is_capturing(self) -> bool:
        """Whether an Output widget takes what is shown now. Its `msg_id` says so."""
        return bool(self._capturing)

    def on_message(
        self,
        msg_type: str,
        content: dict[str, Any],
        metadata: dict[str, Any],
        buffers: Sequence[Any],
        cell: int | None,
        asked_by: dict[str, Any],
    ) -> bool:
        """Send a comm's message to the notebook if the comm is ours. Returns whether it is.

        Args:
            cell: the cell that the message belongs to, if it is one of ours. It decides for the opening only: later
                messages, from threads or callbacks, belong to whatever ran last.
            asked_by: header of the browser's message that this one answers, if it does.
        """
        comm_id = content["comm_id"]
        if msg_type == "comm_open" and cell is not None:
            self._opened_in[comm_id] = cell
            if content.get("target_name") == _WIDGETS:
                self._widgets.add(comm_id)
        if comm_id not in self._opened_in:
            return False
        state = (content.get("data") or {}).get("state") or {}
        if state.get("msg_id"):
            self._capturing.add(comm_id)
        elif "msg_id" in state or msg_type == "comm_close":
            self._capturing.discard(comm_id)
        if msg_type == "comm_close":
            self._opened_in.pop(comm_id, None)
        packed = json_packer(content)  # the packer that Jupyter uses for NumPy numbers
        message = Comm(
            msg_type=msg_type,
            content=json_unpacker(packed),
            metadata=metadata,
            buffers=[base64.b64encode(buffer).decode() for buffer in buffers],
            asked_by=asked_by,
        )
        key = comm_id if comm_id in self._widgets and _is_replaceable(message) else None
        if msg_type == "comm_close":
            self._widgets.discard(comm_id)
        self._send(message, len(packed) + sum(map(len, message.buffers)), key)
        return True

    def cell_of(self, message: Comm) -> int:
        """The cell that opened the comm of a message; 0: none did."""
        return self._opened_in.get(message.content["comm_id"], 0)

    def deliver(self, message: Comm, parent: dict[str, Any]) -> None:
        """Hand the browser's message to the rank's end, as the kernel would. Runs the widget's callbacks."""
        if message.content["comm_id"] not in self._opened_in:
            return  # closed meanwhile
        if message.msg_type == "comm_close":
            self._opened_in.pop(message.content["comm_id"], None)
        handle = {"comm_msg": self._manager.comm_msg, "comm_close": self._manager.comm_close}[message.msg_type]
        handle(
            None,
            [],
            {
                "header": {**parent["header"], "msg_type": message.msg_type},
                "parent_header": {},
                "metadata": message.metadata,
                "content": message.content,
                "buffers": [memoryview(base64.b64decode(buffer)) for buffer in message.buffers],
            },
        )


def ends_capture(content: dict[str, Any]) -> bool:
    """Return whether a message ends the capture of output by an Output widget."""
    return ((content.get("data") or {}).get("state") or {}).get("msg_id") == ""


def _is_replaceable(message: Comm) -> bool:
    """Return whether a message only sets values of a widget, so that a later one may replace it.

    Messages with buffers, answers to the browser, and the start and end of a capture by an Output widget are kept.
    """
    data = message.content.get("data") or {}
    return (
        message.msg_type == "comm_msg"
        and data.get("method") == "update"
        and data.keys() <= {"method", "state", "buffer_paths"}
        and not data.get("buffer_paths")
        and "msg_id" not in data["state"]
        and not (message.buffers or message.metadata or message.asked_by)
    )
