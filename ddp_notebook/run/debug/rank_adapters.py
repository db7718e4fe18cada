"""debugpy on each rank: requests and their responses. All methods run in one event loop, except those of messages."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

from ddp_notebook.launch.cluster import Cluster
from ddp_notebook.messages.debug_messages import AdapterMessage, AdapterReady, AdapterRequest, UseAdapter

_LOOK_S = 0.5  # interval of checks for whether the rank is alive
_MOST_S = 2.0  # time for a response: the kernel handles no other request of the front end in the meantime
_CODE_S = 60.0  # the same for requests that run code of the user, such as `__repr__`
_RUN_CODE = ("evaluate", "setVariable", "setExpression", "variables")


class RankAdapters:
    """debugpy on the ranks of a session.

    Args:
        cluster: the ranks.
        loop: event loop of the caller.
        on_event: called with the rank and each event of the protocol, in the event loop.
    """

    def __init__(
        self, cluster: Cluster, loop: asyncio.AbstractEventLoop, on_event: Callable[[int, dict[str, Any]], None]
    ) -> None:
        self._cluster = cluster
        self._loop = loop
        self._on_event = on_event
        self._numbers = itertools.count(1)
        self._starts: dict[int, asyncio.Future[str]] = {}
        # responses by rank and number of the request
        self._open: dict[tuple[int, int], asyncio.Future[dict[str, Any]]] = {}

    async def start(self, rank: int) -> str:
        """Start debugpy on a rank when its cell has ended. Return why it cannot start; "" if it runs."""
        self._starts[rank] = future = self._loop.create_future()
        process = self._cluster.process(rank)
        self._cluster.send(rank, UseAdapter(on=True))
        while not await self._is_done(future):
            if rank not in self._cluster.alive or self._cluster.process(rank) is not process:
                return "it has ended"
        return future.result()

    def stop(self, rank: int) -> None:
        """Let debugpy on a rank follow no more cells."""
        self._cluster.send(rank, UseAdapter(on=False))

    async def ask(
        self, rank: int, command: str, arguments: Any = None, cell_file: str = "", most_s: float = _MOST_S
    ) -> dict[str, Any]:
        """Send a request, and return its response.

        Args:
            arguments: see the protocol.
            cell_file: file of a cell in the arguments.
            most_s: longest time for the response in seconds. Requests that run code of the user have a longer one.
        """
        number = next(self._numbers)
        request = {"type": "request", "seq": number, "command": command, "arguments": arguments or {}}
        self._open[rank, number] = future = self._loop.create_future()
        self._cluster.send(rank, AdapterRequest(data=json.dumps(request).encode(), cell_file=cell_file))
        limit_s = _CODE_S if command in _RUN_CODE else most_s
        until = self._loop.time() + limit_s
        try:
            while not await self._is_done(future):
                if rank not in self._cluster.alive:
                    return _no_answer(command, f"rank {rank} has ended")
                if self._loop.time() > until:
                    return _no_answer(command, f"rank {rank} did not answer within {limit_s:g} s")
            return future.result()
        finally:
            del self._open[rank, number]

    async def _is_done(self, future: asyncio.Future[Any]) -> bool:
        done, _ = await asyncio.wait([future], timeout=_LOOK_S)
        return bool(done)

    # ---- messages, in the thread that receives them

    def on_ready(self, rank: int, message: AdapterReady) -> None:
        """Handle the start of debugpy."""
        self._loop.call_soon_threadsafe(self._set_ready, rank, message.error)

    def on_message(self, rank: int, message: AdapterMessage) -> None:
        """Handle a response or an event."""
        self._loop.call_soon_threadsafe(self._handle, rank, message.data)

    def _set_ready(self, rank: int, error: str) -> None:
        if (future := self._starts.pop(rank, None)) is not None and not future.done():
            future.set_result(error)

    def _handle(self, rank: int, data: bytes) -> None:
        message = json.loads(data)
        if message["type"] == "event":
            self._on_event(rank, message)
        elif (future := self._open.get((rank, message.get("request_seq", 0)))) is not None and not future.done():
            future.set_result(message)


def _no_answer(command: str, why: str) -> dict[str, Any]:
    return {"type": "response", "command": command, "success": False, "message": why, "body": {}}
