"""A host whose outpost connects to the notebook: tasks of Slurm, MPI, or a launcher of ipyparallel.

The stream consists of messages of the wire: encrypted, and admitted by a key that only the invitation contains. A link
that is broken for a while loses no data. The remote end is `outpost`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from ddp_notebook.errors import StartError, StartTimeoutError
from ddp_notebook.launch.processes import Identity
from ddp_notebook.launch.transports import folders
from ddp_notebook.launch.transports.base import BEAT_S, Transport
from ddp_notebook.launch.transports.ports import Listening
from ddp_notebook.messages.dispatch import Table
from ddp_notebook.messages.encoding import VERSION, Message
from ddp_notebook.messages.first_messages import Invitation
from ddp_notebook.messages.outposts import Arrived, ServerStopped, Stream, Warned
from ddp_notebook.wire.endpoint import SILENT_S, Endpoint
from ddp_notebook.wire.keys import Keyring

_log = logging.getLogger(__name__)
_LOOK_S = 0.1
_BEATS = 5  # heartbeats per lease, at least
_END_S = 15.0  # time for an outpost to end all its processes
_IDENTITY = "outpost"
_QUIET_S = 3.0  # pause without another connection after which the start continues, if the number of outposts is unknown


class OutpostConnection(Transport):
    """A host server whose outpost has connected. Created by `OutpostListener`.

    Args:
        name: of the host in its session.
        arrived: the first message of the outpost.
        peer: its name on the wire.
        incoming: data of its host server.
        wire: to all outposts.
        lease_s: seconds without a message after which each side declares the other lost.
        why: returns the launcher's report on its tasks, in words; "" if there is none.
        stopped: names of outposts whose host server is stopped.
    """

    is_here = False

    def __init__(
        self,
        name: str,
        arrived: Arrived,
        peer: str,
        incoming: queue.SimpleQueue[bytes],
        wire: Endpoint,
        lease_s: float,
        why: Callable[[], str],
        stopped: Collection[str] = (),
    ) -> None:
        self.name = name
        self.machine = _machine(arrived)
        self.directory = folders.make("ddp_notebook-")
        self._incoming = incoming
        self._arrived = arrived
        self._peer = peer
        self._wire = wire
        self.lease_s = lease_s
        self.beat_s = min(BEAT_S, lease_s / _BEATS)
        self._why = why
        self._stopped = stopped
        self._has_ended = threading.Event()

    def send(self, data: bytes) -> None:
        if self._has_ended.is_set():
            raise OSError("the stream has ended")
        self._wire.send(Stream(data=bytes(data)), self._peer)

    def receive(self) -> bytes:
        data = self._incoming.get()
        if not data:
            self._has_ended.set()
        return data

    @property
    def has_unread(self) -> bool:
        return not self._incoming.empty()

    @property
    def silent_s(self) -> float:
        return self._wire.silent_s(self._peer)

    def close(self) -> None:
        return

    @property
    def pid(self) -> int:
        return self._arrived.pid

    @property
    def is_stopped(self) -> bool:
        return self._peer in self._stopped

    @property
    def task(self) -> int:
        """Its number among the tasks that were started together; -1 if it is not known."""
        return self._arrived.task

    def how_it_ended(self, given_up: str = "") -> str:
        how = given_up or f"the host server on {self.name} ended"
        try:
            why = self._why()
        except Exception:  # raised by a launcher outside this package; the end is reported without a cause
            _log.exception("the reason for the end of the host server on %s is unknown", self.name)
            why = ""
        return f"{how}: {why}" if why else how

    def end(self, *, at_once: bool = False) -> None:
        """Send the outpost a request to end, also if it reconnects later, and wait until its processes have ended."""
        if not self._has_ended.is_set():
            self._wire.send(Stream(data=b""), self._peer)
            if at_once and self.silent_s > SILENT_S:
                self._incoming.put(b"")
            self._has_ended.wait(_END_S)

    def sweep(self, leaders: Sequence[Identity]) -> None:
        """Remove local files. The host's processes cannot be reached; they end with their server or its lease."""
        folders.remove(self.directory)

    def files(self, directory: str, pattern: str) -> list[Path]:
        return []


class OutpostListener:
    """Accepts connections of outposts.

    Args:
        at: local address and ports for the outposts.
        lease_s: see `OutpostConnection`.
        env: variables on top of the tasks' environment.
        why: see `OutpostConnection`.
        saves: outposts report a signal that warns of the end of their job.

    Attributes:
        invitation: data that each outpost needs.
        on_warned: called with the name of such a signal, and the host that received it.
    """

    def __init__(
        self,
        at: Listening,
        lease_s: float,
        env: Mapping[str, str],
        why: Callable[[], str] = lambda: "",
        *,
        saves: bool = False,
    ) -> None:
        self.on_warned: Callable[[str, str], object] = lambda _, __: None
        keyring = Keyring()
        self._wire = Endpoint.listen(keyring, self._on_message, bind=at.bind, expects_all=True)
        keys = keyring.invite(_IDENTITY, control=self._wire.url, bulk="")
        self.invitation = Invitation(
            wire=VERSION,
            control=keys.control,
            server_key=keys.server_key,
            public_key=keys.public_key,
            secret_key=keys.secret_key,
            lease_s=lease_s,
            env=dict(env),
            saves=saves,
        )
        self._lease_s = lease_s
        self._why = why
        self._arrived: dict[str, Arrived] = {}  # key: peer
        self._incoming: dict[str, queue.SimpleQueue[bytes]] = {}
        self._stopped: set[str] = set()  # peers whose host server is stopped
        self._table: Table[None] = Table(
            {
                Arrived: self._on_arrived,
                Stream: self._on_stream,
                Warned: self._on_warned,
                ServerStopped: self._on_server_stopped,
            }
        )
        self._taken: set[str] = set()
        self._changed = threading.Condition()
        self._called_s = 0.0  # monotonic time of the last connection
        self._is_over = False  # outposts that connect from now on get a request to end
        self._wire.start()

    def wait(
        self,
        expected: Callable[[int], int],
        trouble: Callable[[], str],
        remaining_s: Callable[[], float],
        check: Callable[[], None],
    ) -> list[OutpostConnection]:
        """Wait until all outposts have connected. Outposts that connect later get a request to end.

        Args:
            expected: returns the number of outposts, from the number of tasks that connected outposts report; 0: not
                known.
                Then the wait ends after some seconds without another connection.
            trouble: returns a sentence if no more outposts will connect, else "".
            remaining_s: returns the remaining seconds.
            check: called often; an exception from it ends the wait.

        Returns:
            The connections in the order of their tasks.

        Raises:
            StartError: outposts are missing and will not connect.
            StartTimeoutError: they took too long.
        """
        while True:
            check()
            with self._changed:
                here = list(self._arrived.items())
            wanted = expected(max((one.tasks for _, one in here), default=0))
            with self._changed:
                is_quiet = bool(wanted) or time.monotonic() - self._called_s > _QUIET_S
                if here and len(here) == len(self._arrived) >= wanted and is_quiet:
                    self._is_over = True
                    return self._named(here)
            if why := trouble():  # not under the lock: a queue may take long to answer, and the wire would wait too
                raise StartError(f"{_count(len(here), wanted)} connected to the notebook: {why}")
            if remaining_s() <= 0:
                raise StartTimeoutError(
                    f"the start took too long: {_count(len(here), wanted)} connected to the notebook at "
                    f"{self.invitation.control}; increase --timeout, or check that tasks can reach that address"
                )
            with self._changed:
                if len(self._arrived) == len(here):
                    self._changed.wait(_LOOK_S)

    @property
    def have_begun(self) -> bool:
        """True if an outpost has connected, so that the job no longer waits in a queue."""
        return bool(self._arrived)

    def say_goodbye(self) -> None:
        """Send all outposts, and those that connect from now on, a request to end. Does not wait for them."""
        self._is_over = True
        for peer in list(self._arrived):
            self._wire.send(Stream(data=b""), peer)

    def dismiss(self) -> None:
        """End outposts that have connected and are in no session, and those that connect from now on, after a failed
        start.

        Returns after their end.
        """
        with self._changed:
            self._is_over = True
            waiting = [peer for peer in self._arrived if peer not in self._taken]
        for peer in waiting:
            self._wire.send(Stream(data=b""), peer)
        until = time.monotonic() + _END_S
        for peer in waiting:
            while self._read(peer, until - time.monotonic()):
                pass

    def close(self) -> None:
        """Close the wire."""
        self._wire.close()

    def _read(self, peer: str, timeout_s: float) -> bytes:
        try:
            return self._incoming[peer].get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return b""

    def _named(self, here: Sequence[tuple[str, Arrived]]) -> list[OutpostConnection]:
        """Number the outposts, with those of one machine next to each other, and name them by host."""
        by_task = sorted(here, key=lambda pair: pair[1].task)
        machines = list(dict.fromkeys(_machine(one) for _, one in by_task))
        connections: list[OutpostConnection] = []
        seen: dict[str, int] = {}
        for peer, one in sorted(by_task, key=lambda pair: machines.index(_machine(pair[1]))):
            number = seen[one.host] = seen.get(one.host, -1) + 1
            name = f"{one.host}:{number}" if number else one.host
            self._taken.add(peer)
            connections.append(
                OutpostConnection(
                    name, one, peer, self._incoming[peer], self._wire, self._lease_s, self._why, self._stopped
                )
            )
        return connections

    def _on_message(self, peer: str, _: int, message: Message) -> None:
        if type(message) in self._table:
            self._table.handle(peer, message)

    def _on_arrived(self, peer: str, arrived: Arrived) -> None:
        with self._changed:
            if self._is_over:
                self._wire.send(Stream(data=b""), peer)
                return
            self._incoming[peer] = queue.SimpleQueue()
            self._arrived[peer] = arrived
            self._called_s = time.monotonic()
            self._changed.notify_all()

    def _on_stream(self, peer: str, stream: Stream) -> None:
        if peer in self._incoming:
            self._incoming[peer].put(stream.data)

    def _on_server_stopped(self, peer: str, message: ServerStopped) -> None:
        (self._stopped.add if message.is_stopped else self._stopped.discard)(peer)

    def _on_warned(self, peer: str, warned: Warned) -> None:
        if peer in self._arrived:
            self.on_warned(warned.signal, self._arrived[peer].host)


def _machine(arrived: Arrived) -> str:
    return f"{arrived.host} {arrived.address}"


def _count(number: int, of: int) -> str:
    return f"{number or 'none'} of {of} tasks" if of else "no task"
