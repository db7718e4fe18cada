"""Startup messages for the processes that a host server forks or spawns: ranks, the store and the controller.

The notebook creates a `Start` and sends it in a `StartRequest`. The host server adds fields that only it knows, such as
descriptors and folders. A forked process has the `Start` in memory; a spawned process reads it from a pipe.

Start            environment of a process, and its `ProcessSpec`
ProcessSpec      specification of a process, one of these:
RankSpec         a rank
StoreSpec        the store
ControllerSpec   the ipyparallel controller
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddp_notebook.messages.encoding import Message
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Addresses and keys with which a rank connects to its notebook.

    They are secret: sent through a pipe, never on a command line.
    """

    control: str  # "tcp://127.0.0.1:40123"
    bulk: str
    server_key: str  # public key of the notebook, Z85
    public_key: str  # key pair of this process
    secret_key: str
    identity: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec(Message):
    """Base class of the specification of a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec(ProcessSpec):
    """Specification of a rank. The rank number is assigned later, when the group is formed.

    Args:
        process: number of the process on its host.
        address: connection to the notebook.
        mark_token: token of the marks in the text of the rank.
        open_files: number of file descriptors that the rank may need.
        inbox: file descriptor from which the rank reads cells. The host server sets this field and those below.
        directory: directory of the host server.
        stack_file: file into which a signal writes the stacks of the rank.
        pymp_folder: folder for the sockets of `multiprocessing`.
    """

    process: int
    address: Address = field(repr=False)
    mark_token: str
    open_files: int
    inbox: int = -1
    directory: str = ""
    stack_file: str = ""
    pymp_folder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec(ProcessSpec):
    """Specification of the process that runs the session's store and the store for user programs.

    Args:
        host: address on which both stores listen.
        ports: first and last port, exclusive, that the stores may use.
        key: key of the session's store in hexadecimal digits; "" for a Unix socket.
        port: port of the store for user programs. The host server sets this field and those below.
        fd, store_fd: listening sockets of the store for user programs and of the session's store.
    """

    host: str
    ports: tuple[int, int]
    key: str = field(default="", repr=False)
    port: int = 0
    fd: int = -1
    store_fd: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSpec(ProcessSpec):
    """Specification of the ipyparallel controller, for its first start and for restarts.

    Args:
        directory: private directory of the controller (mode 700).
        address: address of this machine at which engines reach it.
        connections: connection files of engines and clients.
        ports: ports of each of ipyparallel's pools.
        curve: key pair, the public key first.
        restores: whether to restore the engines of an earlier controller.
        waits: whether the ports of an earlier controller may still be in use.
    """

    directory: str
    address: str
    connections: dict[str, dict[str, Any]] = field(repr=False)
    ports: dict[str, list[int]]
    curve: tuple[str, str] = field(repr=False)
    restores: bool = False
    waits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Message):
    """Specification of a process with its environment.

    Args:
        env: environment variables. On another machine they are added to those of the host server.
        cwd: working directory.
        sys_path: `sys.path`; None to use that of the host server on another machine.
        threads: number of torch threads.
        spec: specification of the process.
    """

    env: dict[str, str] = field(repr=False)
    cwd: str
    sys_path: list[str] | None
    threads: int
    spec: ProcessSpec
