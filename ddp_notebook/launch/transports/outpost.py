"""The remote end of `callback`: the program of a task of Slurm, MPI or an ipyparallel launcher.

    python -m ddp_notebook.launch.transports.outpost [--file INVITATION]

It forks a host server and carries its stream over a separate encrypted wire, with a key from the invitation. A link
that is broken for a while loses no data. If it is silent for the lease, the host server and all its processes end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType
from urllib.parse import urlsplit

from ddp_notebook.launch import processes
from ddp_notebook.launch.host import remote_server
from ddp_notebook.launch.host.owner_channel import ServerEnd
from ddp_notebook.launch.transports.base import OWN_NUMBER
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.first_messages import Invitation, from_line, to_line
from ddp_notebook.messages.outposts import Arrived, ServerStopped, Stream, Warned
from ddp_notebook.messages.processes import Address
from ddp_notebook.wire.endpoint import Endpoint

VARIABLE = "DDP_NOTEBOOK_INVITATION"  # the content of the file, for launchers that pass on variables
_REACH_S = 3.0  # time limit for the notebook to accept a connection
_LOOK_S = 0.2
_END_S = 12.0  # time for the server to end all its processes
_MOST_WAITING = 64  # messages; above this number the ranks block on output
_SAME_S = 2.0  # Slurm sends SIGTERM to a job's steps and again to the whole job: both are one warning
_GOODBYE_S = 2.0  # time limit for the last message to arrive
# Variables in which launchers pass a task its number and the number of tasks. Under Slurm, processes of mpirun also
# have the variables of the step that started the daemons of mpirun.
_TASK_OF = (
    OWN_NUMBER,
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PALS_RANKID", "PALS_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


def find_invitation(path: str | None) -> Invitation:
    """Return the invitation of this process.

    Raises:
        SystemExit: there is none; the message names the places that were searched.
    """
    text = os.environ.get(VARIABLE, "")
    if path is not None:
        try:
            with open(path) as file:
                text = file.read()
        except OSError as error:
            if not text:
                raise SystemExit(
                    f"{socket.gethostname()}: the notebook's invitation cannot be read: {error}; "
                    "its folder has to be shared with this machine"
                ) from error
    try:
        return from_line(text, Invitation)
    except ValueError as error:
        raise SystemExit(
            f"{socket.gethostname()}: no invitation of a notebook ({VARIABLE} or --file): {error}"
        ) from error


def task_of(env: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of a task and the number of tasks from its launcher; (-1, 0) if they are not set.

    Example:
        >>> task_of({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"})
        (3, 8)
    """
    for number, of in _TASK_OF:
        if env.get(number, "").isdigit() and env.get(of, "").isdigit():
            return int(env[number]), int(env[of])
    return -1, 0


def route_to(url: str) -> str:
    """Return the local address of the route to the notebook, at which other hosts reach this machine.

    Raises:
        SystemExit: the notebook accepts no connection from this machine.
    """
    host, port = urlsplit(url).hostname, urlsplit(url).port
    try:
        with socket.create_connection((host, port), timeout=_REACH_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise SystemExit(
            f"{socket.gethostname()} cannot reach the notebook at {host}:{port}: {error}; is there a firewall, or is "
            "that not the network that both are in?"
        ) from error


def main() -> None:
    """Run an outpost until the notebook ends it, or has sent nothing for the lease."""
    parser = argparse.ArgumentParser(prog="python -m ddp_notebook.launch.transports.outpost")
    parser.add_argument("--file", help="the notebook's invitation")
    given, _ = parser.parse_known_args()  # launchers add their own arguments
    invitation = find_invitation(given.file)
    remote_server.settle_environment(invitation.env, {VARIABLE: to_line(invitation).decode()})
    task, tasks = task_of(os.environ)
    for name in (VARIABLE, *OWN_NUMBER):
        os.environ.pop(name, None)
    address = route_to(invitation.control)
    server, far_end = socket.socketpair()
    stream = ServerEnd.of(far_end)
    if invitation.saves:  # Slurm sends it to all processes of a task
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    server_pid = remote_server.start_server(invitation.env, address, stream, server.close)
    stream.close()
    arrived = Arrived(host=socket.gethostname(), address=address, pid=server_pid, task=task, tasks=tasks)
    ended = threading.Event()
    warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
    _hear_signals(ended, warnings if invitation.saves else None)
    wire = _carry(server, invitation, arrived, ended, warnings)
    _end(server, server_pid)
    wire.send(Stream(data=b""))  # reports that all processes have ended
    until = time.monotonic() + _GOODBYE_S
    while wire.waiting() and time.monotonic() < until:
        time.sleep(0.005)
    sys.stdout.flush()
    os._exit(0)


def _hear_signals(ended: threading.Event, warnings: queue.SimpleQueue[str] | None) -> None:
    """Install handlers that end the outpost at SIGTERM, before the launcher kills it.

    Args:
        ended: set at the end.
        warnings: gets the name of a first SIGTERM or SIGUSR1, after which the ranks save their state; None: no
            warnings.
    """
    warned_s: dict[int, float] = {}

    def end(*_: object) -> None:
        ended.set()

    def warn(number: int, _: FrameType | None) -> None:
        assert warnings is not None
        if number not in warned_s:
            warned_s[number] = time.monotonic()
            warnings.put(signal.Signals(number).name)
        elif number == signal.SIGTERM and time.monotonic() - warned_s[number] > _SAME_S:
            end()

    if warnings is None:
        signal.signal(signal.SIGTERM, end)
    else:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, warn)


def _carry(
    server: socket.socket,
    invitation: Invitation,
    arrived: Arrived,
    ended: threading.Event,
    warnings: queue.SimpleQueue[str],
) -> Endpoint:
    """Carry bytes in both directions, and send the notebook warnings and reports of a stopped server.

    Returns when one end closes, `ended` is set, or the notebook has sent nothing for the lease.

    Returns:
        The wire.
    """
    incoming: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def on_message(_: str, __: int, message: Message) -> None:
        if isinstance(message, Stream):
            incoming.put(message.data)

    def to_server() -> None:
        heard = 0
        with contextlib.suppress(OSError):
            while data := incoming.get():
                heard += len(data)
                server.sendall(data)
        if not heard and not ended.is_set():
            print(f"{arrived.host}: the start has ended without this task", file=sys.stderr, flush=True)
        ended.set()

    def to_notebook() -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(remote_server.READ_BYTES):
                wire.send(Stream(data=data))
                while wire.waiting() > _MOST_WAITING and not ended.is_set():
                    time.sleep(0.002)
        ended.set()

    identity = f"{arrived.host}-{os.getpid()}-{secrets.token_hex(4)}"
    wire = Endpoint.connect(
        Address(
            control=invitation.control,
            bulk="",
            server_key=invitation.server_key,
            public_key=invitation.public_key,
            secret_key=invitation.secret_key,
            identity=identity,
        ),
        on_message,
    )
    wire.start()
    wire.send(arrived)
    for work in (to_server, to_notebook):
        threading.Thread(target=work, daemon=True).start()
    was_stopped = False
    while not ended.wait(_LOOK_S) and wire.silent_s() < invitation.lease_s:
        if processes.is_stopped(arrived.pid) != was_stopped:
            was_stopped = not was_stopped
            wire.send(ServerStopped(is_stopped=was_stopped))
        while not warnings.empty():
            wire.send(Warned(signal=warnings.get()))
    ended.set()
    return wire


def _end(stream: socket.socket, server_pid: int) -> None:
    """End the server and all processes below it."""
    os.kill(server_pid, signal.SIGCONT)  # a stopped server would not notice the end of the stream
    stream.shutdown(socket.SHUT_RDWR)  # a thread may still read
    until = time.monotonic() + _END_S
    while os.waitpid(server_pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
        time.sleep(0.02)


if __name__ == "__main__":
    main()
