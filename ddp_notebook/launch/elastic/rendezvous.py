"""The rendezvous of the agents of `%ddp_torchrun`: a store that other users of the machine cannot reach.

torch's `c10d` rendezvous is a `TCPStore` on all interfaces, without a password, and agents unpickle its state: every
process that reaches its port can execute code in an agent. This store listens on a Unix socket and checks the user of
each connection (see `wire.store`). Its server is the parent of the agents, so the rendezvous outlives each agent.

Source: https://docs.pytorch.org/docs/stable/elastic/rendezvous.html (registry)
"""

from __future__ import annotations

import socket
import threading
from typing import Any

from ddp_notebook.launch.store_process import Server
from ddp_notebook.wire.store import StoreAddress

BACKEND = "ddp_notebook"  # value of --rdzv-backend


def serve(listener: socket.socket) -> None:
    """Serve the store in a thread, for as long as this process lives."""
    threading.Thread(target=Server(listener, b"").serve, name="ddp-rendezvous", daemon=True).start()


def register() -> None:
    """Register the rendezvous backend for torchrun in this process."""
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousParameters,
        rendezvous_handler_registry,
    )
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    from ddp_notebook.rank.group.stores import SessionStore

    class Backend(C10dRendezvousBackend):
        @property
        def name(self) -> str:
            return BACKEND

    def create(params: RendezvousParameters) -> RendezvousHandler:
        store: Any = SessionStore(StoreAddress(params.endpoint))
        return create_handler(store, Backend(store, params.run_id), params)

    rendezvous_handler_registry.register(BACKEND, create)
