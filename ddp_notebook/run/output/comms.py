"""Widgets of ranks in the notebook: each comm of a rank has a proxy in the notebook's kernel."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddp_notebook.messages.ranks import Comm
from ddp_notebook.run.notebook_kernel import kernel
from ddp_notebook.run.output.message_rate import FRONT_END


class WidgetState:
    """State of a widget, as its rank and its user have last set it. A page can get it without the rank.

    Example:
        >>> state = WidgetState()
        >>> state.take({"state": {"value": 1, "max": 9}}, [])
        >>> state.take({"method": "update", "state": {}, "buffer_paths": [["value"]]}, [b"png"])
        >>> state.told()
        ({'method': 'update', 'state': {'value': 1, 'max': 9}, 'buffer_paths': [['value']]}, [b'png'])
    """

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._buffers: dict[tuple[Any, ...], Any] = {}  # binary values by path; the state does not contain them

    def __repr__(self) -> str:
        return f"<WidgetState: {len(self._state)} values, {len(self._buffers)} buffers>"

    @property
    def is_known(self) -> bool:
        """Return whether the comm belongs to a widget: other comms have no state."""
        return bool(self._state)

    def take(self, data: Mapping[str, Any], buffers: Sequence[Any]) -> None:
        """Update the state with an opening or a message of either side."""
        if data.get("method", "update") not in ("update", "echo_update") or "state" not in data:
            return
        paths = [tuple(path) for path in data.get("buffer_paths", ())]
        changed = data["state"].keys() | {path[0] for path in paths}
        self._buffers = {path: buffer for path, buffer in self._buffers.items() if path[0] not in changed}
        self._state.update(data["state"])
        self._buffers.update(zip(paths, buffers, strict=False))

    def told(self) -> tuple[dict[str, Any], list[Any]]:
        """Return the reply to a state request of a page: its data and its buffers."""
        paths = [list(path) for path in self._buffers]
        return {"method": "update", "state": self._state, "buffer_paths": paths}, list(self._buffers.values())


_CONTROL = "jupyter.widget.control"
_BYTES_EACH = 60_000  # buffer bytes that count as one message: 50 MB per second


class Comms:
    """Passes messages between widgets and the browser. Without a kernel, as in a terminal, it does nothing.

    The pump's thread sends a rank's messages to the front end, so that a widget's model exists before the main thread
    displays its view. A reply has the request as its parent message; other messages have the running cell.

    A reloaded page requests the state of each comm, and shows no widget before all have replied. This class replies,
    because a rank may be busy for hours or dead.

    Args:
        send: sends a message to a rank, in order with the cells; may be called in any thread.
        took: called with each published message.
    """

    def __init__(self, send: Callable[[int, Comm], None], took: Callable[[int, Comm], None]) -> None:
        self._send = send
        self._took = took
        self._stand_ins: dict[str, Any] = {}  # proxies by comm id, which is the same on both sides
        self._rank_of: dict[str, int] = {}  # rank by comm id
        self._states: dict[str, WidgetState] = {}  # state by comm id
        self._lock = threading.Lock()
        self._kernel = kernel()
        self._has_ended = False

    def on_message(self, rank: int, message: Comm) -> None:
        """Handle a message from the rank's side of a comm. May sleep."""
        try:
            self._pass_on(rank, message)
            if message.msg_type != "comm_open" and self._kernel is not None:
                FRONT_END.add(1 + sum(map(len, message.buffers)) / _BYTES_EACH)
                time.sleep(FRONT_END.wait_s("comms"))  # back-pressure makes the ranks wait
        finally:
            self._took(rank, message)

    def _pass_on(self, rank: int, message: Comm) -> None:
        comm_id = message.content["comm_id"]
        with self._lock:
            if self._kernel is None or self._has_ended:
                return
            buffers = [base64.b64decode(buffer) for buffer in message.buffers]
            if message.msg_type == "comm_open":
                self._rank_of[comm_id] = rank
                self._stand_ins[comm_id] = self._make(message.content)
                self._states[comm_id] = WidgetState()
            elif comm_id not in self._stand_ins:  # the browser has closed it
                return
            if message.msg_type == "comm_close":
                self._forget(comm_id).close(message.content.get("data"), message.metadata)
            else:
                self._states[comm_id].take(message.content.get("data") or {}, buffers)
                parent = message.asked_by or self._kernel.get_parent()
                self._publish(comm_id, message.msg_type, message.content, message.metadata, buffers, parent)

    def on_renumbered(self, stayed: Mapping[int, int]) -> None:
        """Handle a change of the number of ranks. Widgets of removed ranks stay on the page unchanged.

        Args:
            stayed: former number of each remaining rank, by its new number.
        """
        now = {before: rank for rank, before in stayed.items()}
        with self._lock:
            self._rank_of = {comm_id: now[rank] for comm_id, rank in self._rank_of.items() if rank in now}

    def close(self) -> None:
        """Detach the widgets when the ranks end. They stay on the page, even if it is reloaded, for example finished
        bars.
        """
        with self._lock:
            self._has_ended = True
            self._rank_of.clear()
            self._send = lambda rank, message: None  # the kernel keeps the proxies, which keep this object

    def _forget(self, comm_id: str) -> Any:
        self._rank_of.pop(comm_id, None)
        self._states.pop(comm_id, None)
        return self._stand_ins.pop(comm_id, None)

    def _publish(
        self,
        comm_id: str,
        msg_type: str,
        content: Mapping[str, Any],
        metadata: Mapping[str, Any],
        buffers: Sequence[Any],
        parent: Mapping[str, Any],
    ) -> None:
        self._kernel.session.send(
            self._kernel.iopub_socket,
            msg_type,
            content,
            metadata=metadata,
            parent=parent,
            ident=self._stand_ins[comm_id].topic,
            buffers=buffers,
        )

    def _make(self, content: dict[str, Any]) -> Any:
        stand_in = _comm_maker()(
            comm_id=content["comm_id"],
            target_name=content.get("target_name", ""),
            target_module=content.get("target_module"),
            primary=False,  # do not open it yet, because the browser may reply immediately
        )
        stand_in.on_msg(self._to_rank)
        stand_in.on_close(self._to_rank)
        manager = self._kernel.comm_manager
        manager.register_comm(stand_in)
        manager.register_target(_CONTROL, _refuse)
        return stand_in

    def _to_rank(self, message: dict[str, Any]) -> None:
        """Handle a message of the browser. The kernel calls this in the thread that reads comms."""
        header, content = message["header"], message["content"]
        comm_id, data = content["comm_id"], content.get("data") or {}
        with self._lock:
            rank, state = self._rank_of.get(comm_id), self._states.get(comm_id)
            if header["msg_type"] == "comm_close":
                self._forget(comm_id)
            elif state is not None and data.get("method") == "request_state" and state.is_known:
                told, buffers = state.told()
                self._publish(comm_id, "comm_msg", {"comm_id": comm_id, "data": told}, {}, buffers, header)
                return
            elif state is not None:
                state.take(data, message.get("buffers") or ())
        if rank is None:  # the rank was removed
            return
        self._send(
            rank,
            Comm(
                msg_type=header["msg_type"],
                content=content,
                metadata=message.get("metadata") or {},
                buffers=[base64.b64encode(buffer).decode() for buffer in message.get("buffers") or ()],
                asked_by={**header, "date": str(header.get("date", ""))},
            ),
        )


def _comm_maker() -> Callable[..., Any]:
    """Return the function that creates a comm of this kernel.

    Before version 6.18, as on Colab and Kaggle, ipykernel had its own comms. Those of the package `comm` do not reach
    the front end then.
    """
    from ipykernel._version import version_info

    if version_info < (6, 18):
        from ipykernel.comm import Comm

        return Comm
    from comm import create_comm

    return create_comm


def _refuse(comm: Any, _: dict[str, Any]) -> None:
    """Refuse the request of a reloaded page for the state of all widgets.

    ipywidgets would reply with the widgets of the kernel only. After the refusal the page requests the state of each
    comm.
    """
    comm.close()
