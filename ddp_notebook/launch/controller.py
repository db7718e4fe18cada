"""ipyparallel's controller of a session: what `ipp.Client` and `%%px` talk to. Our cells do not pass through it.

It has its own CURVE keys and its own blocks of ports. A controller that was killed is started again with the same
ones: the engines reconnect by themselves, and ipyparallel restores their registration from its file.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from traitlets.config import Config

_BLOCK = 20  # ports per pool: ipyparallel needs 8, 7 and 3
_POOLS = ("engine_ports", "client_ports", "ports")
_PORTS_S = 10.0


def make_spec(directory: str) -> dict[str, Any]:
    """The specification of a controller in `directory` (mode 700), for its first start and for later ones."""
    import zmq

    public, secret = zmq.curve_keypair()
    return {
        "directory": directory,
        "first_port": find_ports(_BLOCK * len(_POOLS)),
        "curve": [public.decode(), secret.decode()],
        "restore": False,
    }


def find_ports(count: int, attempts: int = 200) -> int:
    """The first of `count` free ports in a row, below those that the system hands out by itself.

    ipyparallel chooses ports first and binds them later. In the system's own range another process could get one of
    them in between.
    """
    low, high = 10_000, _first_ephemeral_port() - count
    blocks = (high - low) // count
    for attempt in range(attempts):  # by process id: two notebooks that start together look at different blocks
        first = low + count * ((os.getpid() + attempt * attempt) % blocks)
        if _are_free(first, count):
            return first
    raise OSError(f"found no {count} free ports in a row between {low} and {high}")


def _are_free(first: int, count: int) -> bool:
    with ExitStack() as stack:
        try:
            for port in range(first, first + count):
                listener = stack.enter_context(socket.socket())
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _wait_for_ports(first: int, count: int) -> None:
    """Wait until nobody has them, or too long. The schedulers of a controller that was killed have its sockets too, and
    one that looks dead has them until the last of its threads has ended."""
    until = time.monotonic() + _PORTS_S
    while not _are_free(first, count) and time.monotonic() < until:
        time.sleep(0.02)


def _first_ephemeral_port() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 32_000
    return first if first > 12_000 else 32_000


def connection_file(directory: str, side: str) -> Path:
    """The file that `side` ("client" or "engine") connects by."""
    return Path(directory) / "profile" / "security" / f"ipcontroller-{side}.json"


def is_up(directory: str) -> bool:
    """Whether the controller has written its connection files, whole."""
    try:
        for side in ("client", "engine"):
            json.loads(connection_file(directory, side).read_text())
    except (OSError, ValueError):
        return False
    return True


def _end_with_a_child(*_: object) -> None:
    """A controller that has lost one of its schedulers waits for ever and says nothing. It ends, and so can be started
    again."""
    from ipyparallel.controller.app import IPController

    if not IPController.initialized():
        return
    app = IPController.instance()
    started = [
        getattr(child, "launcher", child) for child in [*app.children, getattr(app, "heartmonitor_process", None)]
    ]
    if any(getattr(process, "exitcode", None) is not None for process in started):
        os._exit(1)


def main(spec: dict[str, Any]) -> None:
    """Be the controller."""
    from ipyparallel.controller.app import IPController

    class Controller(IPController):
        def init_signal(self) -> None:
            """Leave SIGINT and SIGTERM ignored, which would end it: the host server ends it without them."""

    if spec["restore"]:
        _wait_for_ports(spec["first_port"], _BLOCK * len(_POOLS))
    os.umask(0o077)  # ipyparallel writes its connection files first and restricts them then
    public, secret = spec["curve"]
    blocks = range(spec["first_port"], spec["first_port"] + _BLOCK * len(_POOLS), _BLOCK)
    config = Config()
    config.IPController.enable_curve = True
    config.IPController.curve_publickey = public.encode()
    config.IPController.curve_secretkey = secret.encode()
    config.IPController.db_class = "nodb"
    config.IPController.reuse_files = True
    config.IPController.restore_engines = spec["restore"]
    for pool, first in zip(_POOLS, blocks, strict=True):
        config.IPController[pool] = list(range(first, first + _BLOCK))
    config.HeartMonitor.period = 100  # ms: an engine is known to the client after two beats
    config.HeartMonitor.max_heartmonitor_misses = 3000  # 5 min: a rank in a long operation is not dead
    signal.signal(signal.SIGCHLD, _end_with_a_child)
    sys.argv = ["ipcontroller"]
    Controller.launch_instance([f"--profile-dir={spec['directory']}/profile", "--log-level=30"], config=config)
