"""Startup messages for the processes that a host server forks or spawns: ranks, the store and the controller.

The notebook makes a `Start` and sends it in a `StartRequest`. The host server adds fields that only it knows, such as
descriptors and folders. A forked process has the `Start` in memory; a spawned process reads it from a pipe.

Start            the surroundings of a process, and its `ProcessSpec`
ProcessSpec      the specification of a process, one of these:
RankSpec         a rank
StoreSpec        the store
ControllerSpec   ipyparallel's controller
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddp_notebook.messages.encoding import Message
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """All that a rank needs to reach its notebook. Secret: it travels through a pipe, never on a command line."""

    control: str  # "tcp://127.0.0.1:40123"
    bulk: str
    server_key: str  # the notebook's public key, Z85
    public_key: str  # this process's own pair
    secret_key: str
    identity: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec(Message):
    """The specification of a process. Base of the three below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec(ProcessSpec):
    """A rank, which gets its number with its place in the group.

    Args:
        process: its number on its host.
        mark_token: of the marks in its text.
        open_files: number of file descriptors that it may need.
        inbox: the descriptor that cells come from. The host server sets this field and those below.
        directory: of the host server.
        stack_file: file for its stacks, which a signal requests.
        pymp_folder: for the sockets of `multiprocessing`.
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
    """The session's store, and the one for the user's programs.

    Args:
        host: the address that it listens at.
        ports: the first one that may be used, and the first one after these.
        key: of the session's store, in hexadecimal digits; "": it listens at a Unix socket.
        port: of the store for the user's programs. The host server sets this field and those below.
        fd, store_fd: the listening sockets of that store and of the session's.
    """

    host: str
    ports: tuple[int, int]
    key: str = field(default="", repr=False)
    port: int = 0
    fd: int = -1
    store_fd: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSpec(ProcessSpec):
    """The controller of ipyparallel, for its first start and for later ones.

    Args:
        directory: of its own (mode 700).
        address: of this machine, where engines reach it.
        connections: what its engines and its clients connect by.
        ports: of each of ipyparallel's pools.
        curve: its pair of keys, the public one first.
        restores: whether an earlier controller knew engines, which it restores.
        waits: whether the ports of an earlier controller may not be free yet.
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
    """A process and its surroundings.

    Args:
        env: its environment variables. On another machine they are added to those of the host server.
        cwd: its working directory.
        sys_path: its `sys.path`; None: that of the host server, which is on another machine.
        threads: of torch.
    """

    env: dict[str, str] = field(repr=False)
    cwd: str
    sys_path: list[str] | None
    threads: int
    spec: ProcessSpec
