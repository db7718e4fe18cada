"""One line for each session and job that a notebook can attach to. A kept session reports its own state."""

from __future__ import annotations

import time

from ddp_notebook.errors import UsageError
from ddp_notebook.launch import processes
from ddp_notebook.messages.first_messages import GetKeeperState, KeeperState, StopKeeper
from ddp_notebook.records.units import duration
from ddp_notebook.registry import unix_sockets
from ddp_notebook.registry.entries import Entry
from ddp_notebook.registry.lookup import SESSION, AttachTarget

_STOP_S = 40.0


def why_halted(entry: Entry) -> str:
    """Explain why the keeper does not run, with the remedy; "" if it runs."""
    keeper = f"the keeper of {entry.name} (process {entry.pid})"
    if processes.is_stopped_anywhere(entry.pid):
        return f"{keeper} is stopped: kill -CONT {entry.pid} resumes it, and nothing is lost"
    held = processes.held(entry.pid)
    return f"{keeper} does not answer: {held}" if held else ""


def ask(entry: Entry, kind: type[GetKeeperState | StopKeeper]) -> KeeperState:
    """Send a request to the keeper, and return the reply.

    Args:
        entry: of the session.
        kind: of the request. After `StopKeeper`, the session has ended when this returns.

    Raises:
        UsageError: it does not answer.
    """
    if why := why_halted(entry):
        raise UsageError(why)
    try:
        with unix_sockets.connect(entry.door, _STOP_S) as stream:
            unix_sockets.send_line(stream, kind(secret=entry.about["secret"]))
            return unix_sockets.hear(stream, KeeperState)
    except (OSError, KeyError) as error:
        raise UsageError(f"{entry.name} (process {entry.pid}) does not answer: {error or 'it is too slow'}") from error


def in_a_line(found: AttachTarget) -> str:
    """Describe a session or job, its age, and the notebooks attached to it."""
    if found.kind != SESSION:
        return str(found)
    entry = found.entries[0]
    age, directory = duration(time.time() - entry.began_s), str(entry.about.get("directory", "?"))
    try:
        state = ask(entry, GetKeeperState)
    except UsageError as error:
        return str(error)
    if not state.is_running:
        return f"{entry.name}: starts, {directory}"
    parts = [f"{state.ranks} rank{'s' * (state.ranks != 1)} on {state.hosts} for {age}", directory]
    parts += [f"cell [{number}] runs for {duration(for_s)}" for number, for_s in state.running]
    if waiting := state.waiting:
        parts.append(f"{waiting} more wait{'s' * (waiting == 1)}")
    if state.unshown:
        parts.append(f"{state.unshown} ended unattended")
    parts.append(f"{state.driver} drives it" if state.driver else f"alone for {duration(state.alone_s)}")
    return f"{entry.name}: {', '.join(parts)}"
