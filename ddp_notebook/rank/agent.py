"""Thread that communicates with the notebook, even while the rank's main thread is stuck in a collective."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import psutil
import torch

from ddp_notebook.messages import encoding
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.processes import Address
from ddp_notebook.messages.ranks import ClockProbe, ClockReply, Hello, Probe, Vitals
from ddp_notebook.rank import reserve
from ddp_notebook.records.clocks import boot_id
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import os, socket, time
from ddp_notebook.wire.bulk import BulkServer
from ddp_notebook.wire.endpoint import Endpoint


class RankAgent:
    """Connection of a rank to the notebook. It sends `Hello`, answers probes and passes other messages on.

    The agent's thread calls the given functions, from `start` on.

    Args:
        address: the notebook's address, and this process's keys.
        process: this process's number on its host.
        on_message: handles each message that the agent does not answer itself.
        vitals: returns the fields of `Vitals` that do not describe the process. Its argument is `with_shortages`.
        on_asked: called when a notebook requests the time. With `flush`, it must send recorded data first.
    """

    def __init__(
        self,
        address: Address,
        process: int,
        *,
        on_message: Callable[[Message], None],
        vitals: Callable[..., dict[str, Any]],
        on_asked: Callable[..., None],
    ) -> None:
        self._process = process
        self._on_message = on_message
        self._of_rank = vitals
        self._on_asked = on_asked
        self._boot = boot_id()
        encoding.prepare()
        self.endpoint = Endpoint.connect(address, self._receive)
        self.endpoint.use = reserve.use
        self.bulk = BulkServer(self.endpoint.context, address)
        self.endpoint.serve(self.bulk.socket, self.bulk.handle)

    def start(self) -> None:
        """Start the thread and send `Hello`."""
        self.endpoint.start()
        self.send(
            Hello(
                process=self._process,
                pid=os.getpid(),
                host=socket.gethostname(),
                python=platform.python_version(),
                torch=torch.__version__,
            )
        )

    def send(self, message: Message) -> None:
        """Send a message to the notebook, from any thread."""
        reserve.use(lambda: self.endpoint.send(message))

    def _receive(self, _: str, epoch: int, message: Message) -> None:
        self.endpoint.epoch = epoch
        if isinstance(message, Probe):
            self.send(self._vitals(message))
        elif isinstance(message, ClockProbe):
            self._tell_clock(message)
        else:
            self._on_message(message)

    def _tell_clock(self, probe: ClockProbe) -> None:
        self._on_asked(flush=probe.flush)
        rank_ns = time.monotonic_ns()
        self.send(ClockReply(request=probe.request, sent_ns=probe.sent_ns, rank_ns=rank_ns, boot=self._boot))

    def _vitals(self, probe: Probe) -> Vitals:
        of_rank = reserve.use(lambda: self._of_rank(with_shortages=probe.with_shortages))
        return Vitals(request=probe.request, rss_bytes=_resident_bytes(), **of_rank)


def _resident_bytes() -> int | None:
    """Return the resident memory of this process in bytes; None if it cannot be read, for example without a
    descriptor."""
    try:
        return int(reserve.use(lambda: psutil.Process(os.getpid()).memory_info().rss))
    except Exception:  # errors of the system and of psutil
        return None
