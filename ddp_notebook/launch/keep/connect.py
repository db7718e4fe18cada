"""Start a keeper from a notebook, or attach to one."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ddp_notebook.errors import DDPNotebookError, StartError, UsageError
from ddp_notebook.launch import environment
from ddp_notebook.launch.keep.channel import Channel
from ddp_notebook.launch.keep.descriptions import why_halted
from ddp_notebook.launch.keep.exception_data import error_of
from ddp_notebook.launch.keep.keeper_client import KeeperClient
from ddp_notebook.launch.options import StartOptions
from ddp_notebook.messages.first_messages import Admitted, AttachSession, Refused
from ddp_notebook.messages.framing import Numbered, pack_message
from ddp_notebook.messages.keeper import KeeperSpec, SessionEnded, StartStage, Welcome
from ddp_notebook.registry import lookup, unix_sockets
from ddp_notebook.registry.entries import Entry
from ddp_notebook.version import __version__
from ddp_notebook.wire import signals

_ROOT = str(Path(__file__).parents[3])  # import path of the package
_NAME_S = 30.0  # time limit for the keeper's process to send its name
_LOOK_S = 0.2
_FIRST_WORD_S = 5.0
Report = Callable[[str], None]
Check = Callable[[], None]


def start(options: StartOptions, check: Check, report: Report) -> KeeperClient:
    """Start a keeper with its ranks, and attach to it.

    Args:
        options: of the start.
        check: called often during the wait; an exception from it ends the start and all its processes.
        report: called with a line for each completed stage.

    Raises:
        StartError: the ranks did not start.
        any error of a start without a keeper.
    """
    return _attach(_find(_launch(options)), False, False, check, report)


def attach(
    name: str = "", *, take_over: bool = False, looks: bool = False, check: Check = lambda: None
) -> KeeperClient:
    """Attach to a kept session.

    Args:
        name: of the session; "" for the only one.
        take_over: drive the session even if another notebook drives it.
        looks: attach read-only, even if no notebook drives it.
        check: called often during the wait; an exception from it ends the wait.

    Raises:
        UsageError: the session does not exist, or it cannot be attached to; the message names a remedy.
    """
    return _attach(_find(name), take_over, looks, check, lambda _: None)


def _find(name: str) -> Entry:
    [entry] = lookup.find(name, lookup.SESSION).entries
    if entry.version != __version__:
        raise UsageError(
            f"{entry.name} runs ddp_notebook {entry.version}, and this kernel {__version__}: attach from a kernel of "
            f"that version, or end it with: python -m ddp_notebook stop {entry.name}"
        )
    if entry.environment != sys.prefix:
        raise UsageError(
            f"{entry.name} runs in the environment {entry.environment}, and this kernel in {sys.prefix}: choose a "
            f"kernel of that one, or end it with: python -m ddp_notebook stop {entry.name}"
        )
    return entry


def _attach(entry: Entry, take_over: bool, looks: bool, check: Check, report: Report) -> KeeperClient:
    _check_runs(entry)
    try:
        stream = unix_sockets.connect(entry.door, _FIRST_WORD_S)
    except OSError as error:
        raise UsageError(f"{entry.name} does not answer ({error}); it may have ended") from error
    try:
        unix_sockets.send_line(
            stream,
            AttachSession(
                secret=entry.about["secret"],
                version=__version__,
                environment=sys.prefix,
                about=f"the notebook of process {os.getpid()}",
                take_over=take_over,
                looks=looks,
            ),
        )
        reply = unix_sockets.hear(stream, Admitted, Refused)
        if isinstance(reply, Refused):
            raise UsageError(f"cannot attach to {entry.name}: {reply.why}")
        return _wait(Channel(stream), stream, entry, check, report)
    except OSError as error:
        stream.close()
        raise UsageError(f"{entry.name} does not answer ({error}); it may have ended") from error
    except BaseException:
        stream.close()
        raise


def _check_runs(entry: Entry) -> None:
    """Raise UsageError if the keeper's process is stopped, or held by a debugger."""
    if why := why_halted(entry):
        raise UsageError(why)


def _wait(talk: Channel, stream: socket.socket, entry: Entry, check: Check, report: Report) -> KeeperClient:
    """Wait until the session has started."""
    while True:
        check()
        if not select.select([stream], [], [], _LOOK_S)[0]:
            _check_runs(entry)
            continue
        came = talk.receive()
        if came is None:
            raise StartError(f"the keeper of {entry.name} has ended" + _last_words(entry))
        message = came.message if isinstance(came, Numbered) else None
        if isinstance(message, StartStage):
            report(message.line)
        elif isinstance(message, Welcome):
            return KeeperClient(talk, message, entry.pid)
        elif isinstance(message, SessionEnded):
            failure = message.failure
            if failure is None:
                raise StartError(f"the session has ended: {message.why}")
            if isinstance(error := error_of(failure), DDPNotebookError) and type(error).__name__ == failure.kind:
                raise error
            raise StartError(f"the session has ended: {failure.kind}: {failure.words}")


def _last_words(entry: Entry) -> str:
    with contextlib.suppress(OSError):
        if words := (Path(entry.folder) / "keeper.log").read_text(errors="replace").strip()[-2000:]:
            return f"; its last words:\n{words}"
    return ""


def _launch(options: StartOptions) -> str:
    """Start a keeper's process. Returns the name of its session.

    It is forked twice, so that it is not a descendant of the kernel: VS Code sends signals to all descendants.
    """
    code = f"import sys; sys.path.append({_ROOT!r}); from ddp_notebook.launch.keep.keeper.process import main; main()"
    spec = KeeperSpec(
        options=options.to_json(),
        cwd=environment.working_directory(),
        sys_path=[entry for entry in sys.path if isinstance(entry, str)],
    )
    with signals.held_back():
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **options.env},
            start_new_session=True,
        )
    try:
        said, _ = process.communicate(pack_message(spec), timeout=_NAME_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise StartError(f"the keeper's process did not start within {_NAME_S:g} s") from None
    name = said.decode(errors="replace")
    if process.returncode or not name or "\n" in name:
        raise StartError(f"the keeper's process could not start: {name.strip() or 'it printed nothing'}")
    return name
