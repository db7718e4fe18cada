"""The process that holds the rendezvous store, so that every rank may die, rank 0 included."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any


def main(spec: dict[str, Any]) -> None:
    """Serve a TCPStore on the listening socket that the host server has bound.

    `TCPStore` by itself listens on every interface; a socket handed over in `master_listen_fd` stays where it is.
    Source: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.TCPStore
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

    os.environ["RES_OPTIONS"] = "attempts:0"  # it would ask for the name of each client: see `rank.group.stores`
    store = TCPStore(
        spec["host"],
        spec["port"],
        world_size=None,
        is_master=True,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=spec["fd"],
    )
    while store is not None:  # for ever: the store lives as long as its process
        signal.pause()
