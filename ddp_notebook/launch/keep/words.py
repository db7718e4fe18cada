"""A kept session in a line, as it says itself how it is."""

from __future__ import annotations

import time
from typing import Any

from ddp_notebook.errors import UsageError
from ddp_notebook.launch.keep import channel
from ddp_notebook.launch.keep.registry import SESSION, Entry

_STOP_S = 40.0


def ask(entry: Entry, want: str) -> dict[str, Any]:
    """Ask its keeper something that any version can answer.

    Args:
        want: "state", or "stop": to end it, which is done when this returns.

    Raises:
        UsageError: it does not answer.
    """
    stream = channel.connect(entry.socket)
    try:
        channel.say(stream, want=want, key=entry.key)
        return channel.hear(stream, _STOP_S)
    except (OSError, ValueError) as error:
        raise UsageError(f"{entry.name} (process {entry.pid}) does not answer: {error or 'it is too slow'}") from error
    finally:
        stream.close()


def in_a_line(entry: Entry) -> str:
    """What it is, for how long, and who is there."""
    age = duration(time.time() - entry.began_s)
    if entry.kind != SESSION:
        return f"{entry.name}: {entry.kind} for {age}, {entry.about}"
    try:
        state = ask(entry, "state")
    except UsageError as error:
        return str(error)
    if state.get("state") != "running":
        return f"{entry.name}: starts, {entry.about}"
    parts = [f"{state['ranks']} ranks on {state['hosts']} for {age}", entry.about]
    parts += [f"cell [{number}] runs for {duration(for_s)}" for number, for_s in state["running"]]
    if state["unshown"]:
        parts.append(f"{state['unshown']} ended unattended")
    parts.append(f"{state['driver']} drives it" if state["driver"] else f"alone for {duration(state['alone_s'])}")
    return f"{entry.name}: {', '.join(parts)}"


def duration(seconds: float) -> str:
    """In the unit that fits.

    Example:
        >>> duration(42), duration(600), duration(7200)
        ('42 s', '10 min', '2.0 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
