"""The first steps of every process that a host server starts: a rank, the store, the controller.

Forked and spawned processes use the same `Start`. A forked process has torch already. A spawned one reads the `Start`
from a pipe and imports its own modules.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import random
import signal
import sys

from ddp_notebook.launch import processes
from ddp_notebook.messages.dispatch import Table
from ddp_notebook.messages.encoding import decode
from ddp_notebook.messages.processes import ControllerSpec, RankSpec, Start, StoreSpec
from ddp_notebook.wire import signals


def enter(start: Start, stdout: int, stderr: int, parent: int) -> None:
    """Set up a forked process, so that it is like a new interpreter."""
    os.setsid()  # becomes the leader of a process group and an OS session, which can be ended as a whole
    processes.die_with_parent(parent)
    signals.block_release()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _connect_standard_streams(stdout, stderr)
    os.environ.clear()
    os.environ.update(start.env)
    sys.path[:] = start.sys_path or []
    importlib.invalidate_caches()
    _enter_directory(start.cwd)
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # the parent's seed was drawn at import; a new process draws its own


def main(start: Start) -> None:
    """Run the process that `start.spec` describes."""
    signals.ignore_strangers()  # a rank installs its own SIGTERM handler
    _MAIN.handle(start, start.spec)


def _store(_: Start, spec: StoreSpec) -> None:
    from ddp_notebook.launch import store_process

    store_process.main(spec)


def _controller(_: Start, spec: ControllerSpec) -> None:
    from ddp_notebook.launch import controller

    controller.main(spec)


def _rank(start: Start, spec: RankSpec) -> None:
    from ddp_notebook.rank import imports

    imports.import_without_debugpy()  # a forked process has it already
    from ddp_notebook.rank import process, shortage

    try:
        process.main(spec, start.threads)
    except OSError as error:
        if not (why := shortage.of_error(error)):
            raise
        print(why, file=sys.stderr)
        sys.exit(1)


_MAIN: Table[None] = Table({RankSpec: _rank, StoreSpec: _store, ControllerSpec: _controller})


def spawned(start_fd: int, parent: int) -> None:
    """Entry of a spawned process, whose environment and streams are set already."""
    processes.die_with_parent(parent)
    signals.block_release()
    with os.fdopen(start_fd, "rb") as pipe:
        start = decode([pipe.read()])
    assert isinstance(start, Start)
    sys.path[:] = start.sys_path or []
    _make_line_buffered()
    main(start)


def _enter_directory(path: str) -> None:
    try:
        os.chdir(path)
    except OSError as error:  # the notebook's directory was deleted; a rank does not need it
        print(f"cannot enter {path}: {error}", file=sys.stderr)


def _connect_standard_streams(stdout: int, stderr: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        if source > 2:
            os.close(source)
    _make_line_buffered()


def _make_line_buffered() -> None:
    """Make stdout and stderr line-buffered, in Python and in C, so that a crash loses at most a line."""
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
