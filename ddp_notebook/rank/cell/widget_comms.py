"""Widgets on a rank: sends their messages to the notebook, and delivers messages of the browser."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jupyter_client.session import json_packer, json_unpacker

from ddp_notebook.messages.ranks import Comm
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import base64

_WIDGETS = "jupyter.widget"  # target name of all widget comms
COMM_TYPES = {"comm_open", "comm_msg", "comm_close"}


class RankComms:
    """Comms that our cells have opened. Comms of `%%px` belong to ipyparallel.

    Args:
        manager: comm manager of the kernel, with the rank's end of each comm.
        send: sends a message to the notebook. Its further arguments are size and key, see `outgoing.Outgoing.send`.
            Thread-safe.
    """

    def __init__(self, manager: Any, send: Callable[[Comm, int, Hashable], None]) -> None:
        self._manager = manager
        self._send = send
        self._opened_in: dict[str, int] = {}  # comm id -> cell that opened it
        self._widgets: set[str] = set()  # comm ids of widgets
        self._capturing: set[str] = set()  # Output widgets that capture the output of running code

    @property
    def is_capturing(self) -> bool:
        """Return whether an Output widget captures the current output. Its `msg_id` is set then."""
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
        """Send a comm message to the notebook if the comm is ours. Return whether it is.

        Args:
            msg_type: "comm_open", "comm_msg" or "comm_close".
            content: content of the message.
            metadata: metadata of the message.
            buffers: binary buffers of the message.
            cell: our cell to which the message belongs, or None. It is only used for the opening: later messages, from
                threads or callbacks, belong to the most recent cell.
            asked_by: header of the browser message that this message answers; empty if none.
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
        packed = json_packer(content)  # packer that Jupyter uses for NumPy numbers
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
        """Return the cell that opened the comm of a message; 0 if none did."""
        return self._opened_in.get(message.content["comm_id"], 0)

    def deliver(self, message: Comm, parent: dict[str, Any]) -> None:
        """Deliver a browser message to the rank's end of the comm, like the kernel. Runs the widget's callbacks."""
        if message.content["comm_id"] not in self._opened_in:
            return  # closed in the meantime
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
