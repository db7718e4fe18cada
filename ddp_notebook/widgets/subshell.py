"""Whether the browser is heard while a cell runs.

Kernels with subshells (ipykernel 7) read the browser's messages to a widget in a thread of their own. ipykernel 7.4
routes them to the thread that the widget last sent from: for ours the main thread, where they wait for the cell. The
comm decides that in one method; ours lets a message go where the browser has sent it.
"""

from __future__ import annotations

from typing import Any

from ddp_notebook.run.kernel import kernel

_ROUTE = "_reply_subshell_for"  # of `ipykernel.comm.comm.BaseComm`, private; no other version has it


def hear_at_once(comm: Any) -> bool:
    """Let what the browser says to this comm through while a cell runs. Returns whether that can be.

    Args:
        comm: of a widget.
    """
    if hasattr(comm, _ROUTE):
        setattr(comm, _ROUTE, _where_it_was_sent)
    return has_subshells()


def has_subshells() -> bool:
    """Whether this process is a kernel that can run a message beside a cell."""
    features = getattr(kernel(), "kernel_info", {}).get("supported_features", ())
    return "kernel subshells" in features


def _where_it_was_sent(_: Any, sent_to: str | None) -> str | None:
    return sent_to
