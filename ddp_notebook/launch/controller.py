"""ipyparallel's controller of a session: what `ipp.Client` and `%%px` talk to. Our cells do not pass through it.

It is started when somebody asks for it. It has its own CURVE keys and its own blocks of ports, which the files that
engines and clients connect by hold from the session's start on. A controller that was killed is started again with the
same ones: the engines reconnect by themselves, and ipyparallel restores their registration from its file.

It listens on loopback, and for engines of hosts that called the notebook at the address at which they did, on ports of
`--ports` if there are such. Whoever knows its public key is let in: so that key travels to the ranks by the wire only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain, product
from pathlib import Path
from typing import Any

from traitlets.config import Config

from ddp_notebook.errors import ClientError
from ddp_notebook.launch.transports.base import LOOPBACK
from ddp_notebook.launch.transports.ports import ANY, LOOPBACK_ONLY, Listening, in_words
from ddp_notebook.messages.processes import ControllerSpec
from ddp_notebook.registry import modes, private

_BLOCK = 20  # ports per pool: ipyparallel needs 8, 6 and 3
_POOLS = ("engine_ports", "client_ports", "ports")
_OF_ENGINES = ("control", "mux", "task", "iopub", "hb_ping", "hb_pong", "broadcast")  # the last has several
_LEAVES = 2  # of ipyparallel's tree of broadcast schedulers
_USED_BY_ENGINES = 9  # ports: registration, those, and the second one for broadcasts
_OF_CLIENTS = ("control", "mux", "task", "iopub", "notification", "broadcast")
_PORTS_S = 10.0


def make_spec(directory: str, at: Listening = LOOPBACK_ONLY) -> ControllerSpec:
    """The specification of a controller, for its first start and for later ones. Engines connect by what it holds, and
    are ready before there is a controller.

    Args:
        directory: of its own (mode 700).
        at: where on this machine, for the engines.

    Raises:
        ClientError: engines cannot reach it there.
    """
    import zmq

    if ":" in at.host:
        raise ClientError(f"ranks reach this machine by IPv6, at {at.host}, and ipyparallel's controller needs IPv4")
    public, secret = zmq.curve_keypair()
    pools = _pools(at)
    engines, clients = pools["engine_ports"], pools["client_ports"]
    everyone = {
        "ssh": "",
        "registration": engines[0],
        "key": "",  # nothing is signed where all is encrypted
        "curve_serverkey": public.decode(),
        "location": LOOPBACK,
        "pack": "json",
        "unpack": "json",
        "signature_scheme": "hmac-sha256",
    }
    sides: dict[str, dict[str, Any]] = {
        "engine": dict(zip(_OF_ENGINES, engines[1:], strict=False)),
        "client": dict(zip(_OF_CLIENTS, clients, strict=False)),
    }
    sides["engine"]["broadcast"] = list(engines[_USED_BY_ENGINES - _LEAVES : _USED_BY_ENGINES])
    sides["client"]["task_scheme"] = "leastload"
    sides["engine"]["interface"], sides["client"]["interface"] = f"tcp://{at.host}", f"tcp://{LOOPBACK}"
    return ControllerSpec(
        directory=directory,
        address=at.host,
        connections={side: {**everyone, **of_side} for side, of_side in sides.items()},
        ports={pool: list(ports) for pool, ports in pools.items()},
        curve=(public.decode(), secret.decode()),
    )


def write_files(spec: ControllerSpec) -> bool:
    """Write the files that the controller and its clients connect by, unless they exist: a cleaner may remove them.

    Returns:
        Whether one was missing.

    Raises:
        StartError: another user has taken the place of the folder.
        OSError: they cannot be written.
    """
    was_missing = False
    for side, connection in spec.connections.items():
        file = connection_file(spec.directory, side)
        private.restore(str(file.parent))
        with contextlib.suppress(FileExistsError):
            with open(file, "x", opener=modes.opener) as opened:
                json.dump(connection, opened)
            was_missing = True
    return was_missing


def for_engines(spec: ControllerSpec) -> tuple[dict[str, Any], list[str]]:
    """What an engine connects by, and the addresses that it connects to."""
    connection = spec.connections["engine"]
    ports = [connection[name] for name in ("registration", *_OF_ENGINES)]
    flat = [port for one in ports for port in (one if isinstance(one, list) else [one])]
    return connection, [f"{connection['interface']}:{port}" for port in flat]


def _pools(at: Listening) -> dict[str, range]:
    """Ports for each of ipyparallel's pools.

    Raises:
        ClientError: `--ports` leaves none for engines.
    """
    first = find_ports(_BLOCK * len(_POOLS), at.host)
    pools = {pool: range(first + n * _BLOCK, first + (n + 1) * _BLOCK) for n, pool in enumerate(_POOLS)}
    if at.ports == ANY or at.host == LOOPBACK:
        return pools
    others = {*pools["client_ports"], *pools["ports"]}
    # From the end on, since what else listens takes them from the front; by process id as in `find_ports`.
    count = _USED_BY_ENGINES
    blocks = [range(stop - count, stop) for stop in range(at.ports.stop, at.ports.start + count - 1, -count)]
    for attempt in range(len(blocks)):
        block = blocks[(os.getpid() + attempt) % len(blocks)]
        if others.isdisjoint(block) and _are_free(block, at.host):
            return {**pools, "engine_ports": block}
    raise ClientError(
        f"engines reach ipyparallel's controller by {count} ports in a row, and of ports {in_words(at.ports)} "
        f"no such are free at {at.host}; give more of them to --ports"
    )


def find_ports(count: int, address: str = LOOPBACK, attempts: int = 200) -> int:
    """The first of `count` ports in a row that are free on loopback and at this address, below those that the system
    hands out by itself.

    ipyparallel chooses ports first and binds them later. In the system's own range another process could get one of
    them in between.
    """
    low, high = 10_000, _first_ephemeral_port() - count
    blocks = (high - low) // count
    for attempt in range(attempts):  # by process id: two notebooks that start together look at different blocks
        first = low + count * ((os.getpid() + attempt * attempt) % blocks)
        if _are_free(range(first, first + count), address):
            return first
    raise OSError(f"found no {count} free ports in a row between {low} and {high}")


def _are_free(ports: Sequence[int], address: str) -> bool:
    with ExitStack() as stack:
        try:
            for at, port in product({LOOPBACK, address}, ports):
                listener = stack.enter_context(socket.socket())
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((at, port))
        except OSError:
            return False
    return True


def _wait_for_ports(ports: Sequence[int], address: str) -> None:
    """Wait until nobody has them, or too long. The schedulers of a controller that was killed have its sockets too, and
    one that looks dead has them until the last of its threads has ended."""
    until = time.monotonic() + _PORTS_S
    while not _are_free(ports, address) and time.monotonic() < until:
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


def main(spec: ControllerSpec) -> None:
    """Be the controller."""
    from ipyparallel.controller.app import IPController

    class Controller(IPController):
        def init_signal(self) -> None:
            """Leave SIGINT and SIGTERM ignored, which would end it: the host server ends it without them."""

    if spec.waits:
        _wait_for_ports(list(chain(*spec.ports.values())), spec.address)
    os.umask(0o077)
    public, secret = spec.curve
    config = Config()
    config.IPController.enable_curve = True
    config.IPController.curve_publickey = public.encode()
    config.IPController.curve_secretkey = secret.encode()
    config.IPController.db_class = "nodb"
    config.IPController.broadcast_scheduler_depth = _LEAVES.bit_length() - 1
    config.IPController.reuse_files = True  # those of `make_spec`
    config.IPController.engine_ip = spec.address  # the files have it too, but registrations come before they are read
    config.IPController.restore_engines = spec.restores
    for pool, ports in spec.ports.items():
        config.IPController[pool] = ports
    config.HeartMonitor.period = 100  # ms: an engine is known to the client after two beats
    config.HeartMonitor.max_heartmonitor_misses = 3000  # 5 min: a rank in a long operation is not dead
    signal.signal(signal.SIGCHLD, _end_with_a_child)
    sys.argv = ["ipcontroller"]
    Controller.launch_instance([f"--profile-dir={spec.directory}/profile", "--log-level=30"], config=config)
