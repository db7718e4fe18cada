"""Start processes from the host server: by a fork of itself, or in a new interpreter."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from ddp_notebook.launch.host import child
from ddp_notebook.launch.host.pipes import ChildPipes
from ddp_notebook.messages.processes import RankSpec, Start, StoreSpec


@dataclass(slots=True)
class Child:
    """A process that this server started."""

    process: int
    pid: int
    pipes: ChildPipes
    spawned: subprocess.Popen[bytes] | None = None


def _with_pipes(start: Start) -> tuple[ChildPipes, Start]:
    """Return the pipes of a new process, and its `Start` with the descriptor of its inbox."""
    if not isinstance(spec := start.spec, RankSpec):
        return ChildPipes(inbox=False), start
    pipes = ChildPipes(inbox=True, mark_token=spec.mark_token)
    return pipes, replace(start, spec=replace(spec, inbox=pipes.inbox_of_child or -1))


def fork(process: int, start: Start, close_inherited: Callable[[], None]) -> Child:
    """Fork a process, which has all modules that the server has imported.

    Args:
        process: its number.
        start: its specification and its environment.
        close_inherited: called in the child: closes the descriptors of the server.
    """
    pipes, start = _with_pipes(start)
    server = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        pid = os.fork()
    except OSError:
        pipes.close_near()
        pipes.close_far()
        raise
    if pid == 0:
        status = 1
        try:
            pipes.close_near()
            close_inherited()
            child.enter(start, pipes.stdout, pipes.stderr, server)
            child.main(start)
            status = 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)
    pipes.close_far()
    return Child(process, pid, pipes)


def spawn(process: int, start: Start) -> Child:
    """Start a process in a new interpreter, which imports its own modules."""
    pipes, start = _with_pipes(start)
    start_r, start_w = os.pipe()
    spec = start.spec
    inherited = [start_r, *([spec.fd, spec.store_fd] if isinstance(spec, StoreSpec) else ())]
    inherited += [spec.inbox] if isinstance(spec, RankSpec) else []
    code = f"import sys; sys.path[:] = {sys.path!r}; from ddp_notebook.launch.host.child import spawned; "
    code += f"spawned({start_r}, {os.getpid()})"
    spawned = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=pipes.stdout,
        stderr=pipes.stderr,
        env=start.env,
        cwd=start.cwd,
        pass_fds=inherited,
        start_new_session=True,
    )
    os.close(start_r)
    # A process that has already ended, for example in a sitecustomize, is reported as ended, with its last words.
    with contextlib.suppress(BrokenPipeError), os.fdopen(start_w, "wb") as pipe:
        pipe.write(start.encode()[0])
    pipes.close_far()
    return Child(process, spawned.pid, pipes, spawned)
