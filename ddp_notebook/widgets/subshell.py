"""What a browser says while a cell runs is let through.

Kernels with subshells (ipykernel 7) read the browser's messages to a widget in a thread of their own, where the front
end sends them there. ipykernel 7.4 routes them to the thread that the widget last sent from: for ours the main thread,
where they wait for the cell. The comm decides that in one method; ours lets a message go where the browser has sent it.
"""

from __future__ import annotations

from typing import Any

_ROUTE = "_reply_subshell_for"  # of `ipykernel.comm.comm.BaseComm`, private; no other version has it


def hear_at_once(comm: Any) -> None:
    """Let what the browser says to this comm through while a cell runs, where it can be.

    Args:
        comm: of a widget.
    """
    if hasattr(comm, _ROUTE):
        setattr(comm, _ROUTE, _where_it_was_sent)


def _where_it_was_sent(_: Any, sent_to: str | None) -> str | None:
    return sent_to
