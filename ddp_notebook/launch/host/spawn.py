"""How the host server starts a process: by a fork of itself, or afresh."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ddp_notebook.launch.host import child
from ddp_notebook.launch.host.pipes import ChildPipes


@dataclass(slots=True)
class Child:
    """A process that this server started."""

    process: int
    pid: int
    pipes: ChildPipes
    spawned: subprocess.Popen[bytes] | None = None


def fork(process: int, spec: child.Spec, close_inherited: Callable[[], None]) -> Child:
    """Fork a process, which has all that the server has imported.

    Args:
        process: its number.
        spec: what it is to be.
        close_inherited: called in the child: closes what is the server's alone.
    """
    pipes = ChildPipes(inbox=spec["kind"] == "rank", mark_token=spec.get("mark_token", ""))
    spec["inbox"] = pipes.inbox_of_child
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
            child.enter(spec, pipes.stdout, pipes.stderr, server)
            child.main(spec)
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


def spawn(process: int, spec: child.Spec) -> Child:
    """Start a process afresh, which imports for itself."""
    pipes = ChildPipes(inbox=spec["kind"] == "rank", mark_token=spec.get("mark_token", ""))
    spec["inbox"] = pipes.inbox_of_child
    spec_r, spec_w = os.pipe()
    code = f"import sys; sys.path[:] = {sys.path!r}; from ddp_notebook.launch.host.child import spawned; "
    code += f"spawned({spec_r}, {os.getpid()})"
    spawned = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=pipes.stdout,
        stderr=pipes.stderr,
        env=spec["env"],
        cwd=spec["cwd"],
        pass_fds=[fd for fd in (spec_r, spec["inbox"], spec.get("fd"), spec.get("store_fd")) if fd is not None],
        start_new_session=True,
    )
    os.close(spec_r)
    # One that has ended already, by a sitecustomize for instance, is reported as such, with its last words.
    with contextlib.suppress(BrokenPipeError), os.fdopen(spec_w, "w") as pipe:
        json.dump(spec, pipe)
    pipes.close_far()
    return Child(process, spawned.pid, pipes, spawned)
