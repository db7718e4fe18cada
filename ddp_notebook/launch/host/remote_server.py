"""A host server on another machine than its notebook: the child of a process that watches it.

That process does not need torch, and has no thread before the server is forked. When it ends, the server ends all
processes below it.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping

from ddp_notebook.launch import environment, processes
from ddp_notebook.launch.host.owner_channel import ServerEnd
from ddp_notebook.registry import modes, private
from ddp_notebook.wire import signals

READ_BYTES = 1 << 18
_READ_AT_START = ("LD_", "DYLD_", "PYTHON", "MALLOC_", "GLIBC_TUNABLES")  # read by Python or the loader at their start


def settle_environment(env: Mapping[str, str], kept: Mapping[str, str]) -> None:
    """Restart this process if a requested variable is one that Python or the loader reads at its start.

    Args:
        env: requested variables.
        kept: variables that pass the process's own arguments to the restarted process.
    """
    at_start = {name: value for name, value in env.items() if name.startswith(_READ_AT_START)}
    if any(os.environ.get(name) != value for name, value in at_start.items()):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **at_start, **kept})


def start_server(env: Mapping[str, str], address: str, stream: ServerEnd, begin: Callable[[], object]) -> int:
    """Fork the host server. Call it before any thread exists.

    Args:
        env: variables on top of this process's environment.
        address: address of this host for other hosts.
        stream: the server's end of the stream.
        begin: called first in the server's process.

    Returns:
        Its process id.
    """
    own_env = {**os.environ, **env}
    parent = processes.identity(os.getpid())
    sys.stdout.flush()
    server_pid = os.fork()
    if server_pid == 0:
        begin()
        _be_server(stream, parent, own_env, address)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the server must end in order
    signals.ignore_strangers()
    return server_pid


def _be_server(stream: ServerEnd, parent: processes.Identity, own_env: Mapping[str, str], address: str) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # the parent reads fd 2; the stream is for the server's frames
    os.environ.update(environment.host_server_env(own_env, processes.TOKEN_VARIABLE, str(parent)))
    from ddp_notebook.launch.host import server  # imported here because its owner does not need it

    directory = modes.new_folder("ddp_notebook-", private.runtime())
    status = 1
    try:
        server.main(
            stream,
            lambda: processes.is_running(parent),
            directory,
            address=address,
            own_env=own_env,
            carrier=parent,
        )
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        sys.stderr.flush()
        os._exit(status)
