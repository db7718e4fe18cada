"""Simulated ranks with a real wire: `python -m tests.benchmarks.fake_ranks`, for `tests.benchmarks.many`.

Each rank has its own endpoint, keys and connections. One thread serves all ranks of a process, because a thread each
would compete with the measured process for cores. The first line of stdin contains the addresses. The ranks say hello,
and answer probes as if they waited in an all_reduce of all ranks, and clock probes. Each further line, such as
`{"batches": 50, "period_s": 0.2}`, makes all ranks send that many batches of records.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.processes import Address
from ddp_notebook.messages.ranks import ClockProbe, ClockReply, Hello, Probe, Recorded, Vitals
from ddp_notebook.records.clocks import boot_id
from ddp_notebook.records.operation import Operation
from ddp_notebook.wire.bulk import BulkServer
from ddp_notebook.wire.endpoint import Endpoint, dealer
from tests.benchmarks.intake import events

CELL = 1  # number of the cell in which they wait
EVENTS = 20  # calls with their input and output in a batch
_ACK_S = 0.2
_LOOK_S = 0.1
_BOOT = boot_id()


class FakeRank:
    """One simulated rank.

    Args:
        rank: Number of the rank.
        world_size: Number of all ranks.
        address: Address of the notebook.
        context: ZeroMQ context of this process.
    """

    def __init__(self, rank: int, world_size: int, address: Address, context: zmq.Context[Any]) -> None:
        self._operation = Operation(
            name="all_reduce",
            number=5,
            group="default",
            ranks=tuple(range(world_size)),
            dtype="float32",
            shapes=((1024,),),
            nbytes=4096,
            since_s=12.0,
        )
        counts = {"0": {"collective": 5, "send": 0, "recv": 0, "sent": {}}}
        self._group = {"counts": counts, "made": 1, "is_cut": False, "is_busy": True, "steps": 0}
        self._batch = events(rank, EVENTS)
        self._next_tick_s = 0.0
        self.socket = dealer(context, address)
        self._bulk = BulkServer(context, address)  # connected, but never used
        self._endpoint = Endpoint(context, self.socket, self._on_message, "")
        self._endpoint.expect("")
        self._endpoint.send(Hello(process=rank, pid=os.getpid(), host="fake", python="3", torch="2"))

    def serve(self, *, is_readable: bool) -> None:
        """Do the work of the endpoint's own thread in one iteration."""
        if is_readable:
            self._endpoint._read_all()
        now = time.monotonic()
        if now >= self._next_tick_s:
            self._next_tick_s = now + self._endpoint._tick(now)
        if self._endpoint._outbox:
            self._endpoint._write_all()
            self._next_tick_s = min(self._next_tick_s, now + _ACK_S)

    def record(self) -> None:
        """Send a batch."""
        self._endpoint.send(Recorded(data=self._batch))

    def _on_message(self, _: str, epoch: int, message: Message) -> None:
        self._endpoint.epoch = epoch
        self._next_tick_s = min(self._next_tick_s, time.monotonic() + _ACK_S)
        if isinstance(message, Probe):
            self._endpoint.send(self._vitals(message.request))
        elif isinstance(message, ClockProbe):
            now_ns = time.monotonic_ns()
            self._endpoint.send(
                ClockReply(request=message.request, sent_ns=message.sent_ns, rank_ns=now_ns, boot=_BOOT)
            )

    def _vitals(self, request: int) -> Vitals:
        return Vitals(
            request=request,
            rss_bytes=200_000_000,
            device_bytes=0,
            running_cell=CELL,
            running_s=12.0,
            where="cell line 7, in all_reduce",
            operation=self._operation.to_json(),
            group=self._group,
        )


class Sending:
    """Batches to send, spread over time so that ranks do not send at the same moment."""

    def __init__(self, ranks: Sequence[FakeRank]) -> None:
        self._ranks = ranks
        self._due: Iterator[tuple[float, FakeRank]] = iter(())
        self._next: tuple[float, FakeRank] | None = None

    def begin(self, batches: int, period_s: float) -> None:
        began_s, count = time.monotonic(), len(self._ranks)
        self._due = (
            (began_s + (number + at / count) * period_s, rank)
            for number in range(batches)
            for at, rank in enumerate(self._ranks)
        )
        self._next = next(self._due, None)

    def send_due(self) -> float:
        """Send the batches that are due. Return the seconds until the next one."""
        while self._next is not None and self._next[0] <= time.monotonic():
            self._next[1].record()
            self._next[1].serve(is_readable=False)
            self._next = next(self._due, None)
        return _LOOK_S if self._next is None else max(0.0, self._next[0] - time.monotonic())


def main() -> None:
    given = json.loads(sys.stdin.readline())
    context = zmq.Context()
    ranks = [
        FakeRank(int(rank), given["world_size"], Address(**address), context)
        for rank, address in given["addresses"].items()
    ]
    by_socket = {rank.socket: rank for rank in ranks}
    poller, sending = zmq.Poller(), Sending(ranks)
    for socket in (*by_socket, sys.stdin.fileno()):
        poller.register(socket, zmq.POLLIN)
    looked_s = 0.0
    while True:
        ready = dict(poller.poll(round(min(_LOOK_S, sending.send_due()) * 1000)))
        for socket in ready.keys() & by_socket.keys():
            by_socket[socket].serve(is_readable=True)
        if sys.stdin.fileno() in ready:
            line = sys.stdin.readline()
            if not line:
                break
            sending.begin(**json.loads(line))
        if time.monotonic() >= looked_s + _LOOK_S:
            looked_s = time.monotonic()
            for rank in ranks:
                rank.serve(is_readable=False)
    context.destroy(linger=0)


if __name__ == "__main__":
    main()
