"""The thread that speaks for a rank, also while its main thread is stuck in a collective."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from ddp_notebook.records.clocks import boot_id
from ddp_notebook.wire.bulk import BulkServer
from ddp_notebook.wire.endpoint import Endpoint
from ddp_notebook.wire.events import Answer, Hello, Interrupt, Message, Probe, Tell, Told, Vitals
from ddp_notebook.wire.keys import Address


class Agent:
    """Connects to the notebook, says hello, answers probes, and passes the rest on.

    Args:
        address: where the notebook is, and this process's keys.
        process: this process's number on its host.
        on_message: takes everything that the main thread has to do. Called in the agent's thread.
    """

    def __init__(self, address: dict[str, Any], process: int, on_message: Callable[[Message], None]) -> None:
        self._on_message = on_message
        self.running: Callable[[], tuple[int, float] | None] = lambda: None
        self.device: str | None = None  # the rank's; the current device of this thread is always the first
        self.stop_cell: Callable[[int], None] = lambda _: None
        self.on_answer: Callable[[Answer], None] = lambda _: None
        self.flush: Callable[[], None] = lambda: None  # passes on what was recorded
        self._boot = boot_id()
        self.vitals: Callable[[], dict[str, Any]] = dict  # of the network, further fields of `Vitals`
        where = Address(**address)
        self.endpoint = Endpoint.connect(where, self._receive)
        self.bulk = BulkServer(self.endpoint.context, where)
        self.endpoint.serve(self.bulk.socket, self.bulk.handle)
        self.endpoint.start()
        self.send(
            Hello(
                process=process,
                pid=os.getpid(),
                host=socket.gethostname(),
                python=platform.python_version(),
                torch=torch.__version__,
            )
        )

    def send(self, message: Message) -> None:
        """Send a message to the notebook, from any thread."""
        self.endpoint.send(message)

    def _receive(self, _: str, epoch: int, message: Message) -> None:
        self.endpoint.epoch = epoch
        if isinstance(message, Probe):
            self.send(self._vitals(message.request))
        elif isinstance(message, Tell):
            self._tell(message)
        elif isinstance(message, Interrupt):
            self.stop_cell(message.cell)
        elif isinstance(message, Answer):
            self.on_answer(message)
        else:
            self._on_message(message)

    def _tell(self, message: Tell) -> None:
        if message.flush:
            self.flush()
        self.send(Told(request=message.request, sent_ns=message.sent_ns, rank_ns=time.monotonic_ns(), boot=self._boot))

    def _vitals(self, request: int) -> Vitals:
        cell, since = self.running() or (0, time.monotonic())
        return Vitals(
            request=request,
            rss_bytes=psutil.Process().memory_info().rss,
            device_bytes=torch.cuda.memory_reserved(self.device) if torch.cuda.is_initialized() else 0,
            running_cell=cell,
            running_s=time.monotonic() - since,
            **self.vitals(),
        )
