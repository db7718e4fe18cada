"""The first steps of every process that a host server starts: a rank, the store, the controller.

The same specification is used when the process is forked (it has torch already) and when it is spawned (it reads
the specification from a pipe and imports for itself).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import random
import signal
import sys
from typing import Any

from ddp_notebook.launch import processes
from ddp_notebook.wire import signals

Spec = dict[str, Any]


def enter(spec: Spec, stdout: int, stderr: int, parent: int) -> None:
    """After a fork: become a process of its own, as if freshly started with this specification."""
    os.setsid()  # leads a process group and an OS session, which can be ended whole
    processes.die_with_parent(parent)
    signals.block_release()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _connect_standard_streams(stdout, stderr)
    os.environ.clear()
    os.environ.update(spec["env"])
    sys.path[:] = spec["sys_path"]
    importlib.invalidate_caches()
    _enter_directory(spec["cwd"])
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # the parent's was drawn at import; a fresh process draws its own


def main(spec: Spec) -> None:
    """Be what the specification says."""
    signals.ignore_strangers()  # a rank takes SIGTERM in its own way
    if spec["kind"] == "store":
        from ddp_notebook.launch.store import main as run
    elif spec["kind"] == "controller":
        from ddp_notebook.launch.controller import main as run
    else:
        from ddp_notebook.rank.process import main as run
    run(spec)


def spawned(spec_fd: int, parent: int) -> None:
    """Entry of a process that was spawned instead of forked: environment and streams are set already."""
    processes.die_with_parent(parent)
    signals.block_release()
    with os.fdopen(spec_fd) as pipe:
        spec = json.load(pipe)
    sys.path[:] = spec["sys_path"]
    _make_line_buffered()
    main(spec)


def _enter_directory(path: str) -> None:
    try:
        os.chdir(path)
    except OSError as error:  # the notebook's directory was deleted: a rank can live without it
        print(f"cannot enter {path}: {error}", file=sys.stderr)


def _connect_standard_streams(stdout: int, stderr: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        if source > 2:
            os.close(source)
    _make_line_buffered()


def _make_line_buffered() -> None:
    """Text goes to the pipes line by line, from Python and from C: a crash loses at most a line."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(fd, "w", closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw, 1 << 16), encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for name in ("stdin", "__stdin__"):
        setattr(sys, name, open(0, closefd=False))  # noqa: SIM115 - lives as long as the process
    with contextlib.suppress(OSError, ValueError, AttributeError):
        import ctypes

        libc = ctypes.CDLL(None)
        stdout_p = ctypes.c_void_p.in_dll(libc, "__stdoutp" if sys.platform == "darwin" else "stdout")
        libc.setvbuf(stdout_p, None, 1, 0)  # _IOLBF
