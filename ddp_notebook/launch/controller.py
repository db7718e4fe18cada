"""ipyparallel controller of a session, for `ipp.Client` and `%%px`. `%%ddp` cells do not use it.

It is started on demand. It has its own CURVE keys and blocks of ports, fixed in the connection files since the start of
the session. A killed controller is started again with the same keys and ports. Then engines reconnect by themselves,
and ipyparallel restores their registration from its file.

It listens on loopback. For engines on other hosts it also listens at the notebook's address for callbacks, on ports of
`--ports` if given. Its public key grants access, so the key is sent to the ranks over the wire only.
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
_OF_ENGINES = ("control", "mux", "task", "iopub", "hb_ping", "hb_pong", "broadcast")  # broadcast has several ports
_LEAVES = 2  # leaves of the tree of broadcast schedulers
_USED_BY_ENGINES = 9  # number of ports: registration, those in _OF_ENGINES, and a second one for broadcasts
_OF_CLIENTS = ("control", "mux", "task", "iopub", "notification", "broadcast")
_PORTS_S = 10.0


def make_spec(directory: str, at: Listening = LOOPBACK_ONLY) -> ControllerSpec:
    """Return the specification of a controller, for its first start and for later starts.

    Engines can be set up with it before a controller runs.

    Args:
        directory: a directory for the controller only (mode 700).
        at: local address and ports for the engines.

    Raises:
        ClientError: engines cannot reach that address or port range.
    """
    import zmq

    if ":" in at.host:
        raise ClientError(f"ipyparallel's controller needs IPv4, but ranks reach this machine at {at.host}")
    public, secret = zmq.curve_keypair()
    pools = _pools(at)
    engines, clients = pools["engine_ports"], pools["client_ports"]
    everyone = {
        "ssh": "",
        "registration": engines[0],
        "key": "",  # messages need no signature, because connections are encrypted
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
    """Write the connection files of the controller and its clients if they are missing, e.g. after a cleanup of /tmp.

    Returns:
        Whether one was missing.

    Raises:
        StartError: another user has created a folder of that name.
        OSError: the files cannot be written.
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
    """Return the connection settings of an engine, and the addresses that it connects to."""
    connection = spec.connections["engine"]
    ports = [connection[name] for name in ("registration", *_OF_ENGINES)]
    flat = [port for one in ports for port in (one if isinstance(one, list) else [one])]
    return connection, [f"{connection['interface']}:{port}" for port in flat]


def _pools(at: Listening) -> dict[str, range]:
    """Return ports for each ipyparallel pool.

    Raises:
        ClientError: `--ports` leaves none for engines.
    """
    first = find_ports(_BLOCK * len(_POOLS), at.host)
    pools = {pool: range(first + n * _BLOCK, first + (n + 1) * _BLOCK) for n, pool in enumerate(_POOLS)}
    if at.ports == ANY or at.host == LOOPBACK:
        return pools
    others = {*pools["client_ports"], *pools["ports"]}
    # Search from the end, since other listeners take ports from the front; start by process id as in `find_ports`.
    count = _USED_BY_ENGINES
    blocks = [range(stop - count, stop) for stop in range(at.ports.stop, at.ports.start + count - 1, -count)]
    for attempt in range(len(blocks)):
        block = blocks[(os.getpid() + attempt) % len(blocks)]
        if others.isdisjoint(block) and _are_free(block, at.host):
            return {**pools, "engine_ports": block}
    raise ClientError(
        f"ipyparallel's controller needs {count} free ports in a row, but {at.host} has none in {in_words(at.ports)}; "
        "pass a wider range to --ports"
    )


def find_ports(count: int, address: str = LOOPBACK, attempts: int = 200) -> int:
    """Return the first of `count` consecutive ports that are free on loopback and at this address.

    The ports are below the system's ephemeral range: ipyparallel chooses ports first and binds them later, and another
    process could get an ephemeral port in between.

    Raises:
        OSError: no such block is free.
    """
    low, high = 10_000, _first_ephemeral_port() - count
    blocks = (high - low) // count
    for attempt in range(attempts):  # start by process id, so that two notebooks starting together try different blocks
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
    """Wait until the ports are free, at most 10 s.

    The schedulers of a killed controller still hold its sockets, and a process that looks dead holds them until its
    last thread has ended.
    """
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
    """Return the connection file of `side` ("client" or "engine")."""
    return Path(directory) / "profile" / "security" / f"ipcontroller-{side}.json"


def _end_with_a_child(*_: object) -> None:
    """End this controller if one of its schedulers has ended, since it would wait forever."""
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
    """Run the controller."""
    from ipyparallel.controller.app import IPController

    class Controller(IPController):
        def init_signal(self) -> None:
            """Keep SIGINT and SIGTERM ignored, which would end the controller. Its host server kills it."""

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
    config.IPController.reuse_files = True  # the connection files of `make_spec`
    # also in the connection files, but registrations arrive before these are read
    config.IPController.engine_ip = spec.address
    config.IPController.restore_engines = spec.restores
    for pool, ports in spec.ports.items():
        config.IPController[pool] = ports
    config.HeartMonitor.period = 100  # ms: the client sees an engine after two heartbeats
    config.HeartMonitor.max_heartmonitor_misses = 3000  # 5 min: a rank in a long operation is not dead
    signal.signal(signal.SIGCHLD, _end_with_a_child)
    sys.argv = ["ipcontroller"]
    Controller.launch_instance([f"--profile-dir={spec.directory}/profile", "--log-level=30"], config=config)
