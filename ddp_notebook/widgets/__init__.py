"""The live monitor: what a recording holds, drawn while it grows.

tables     the tables that travel to the browser, and how they are packed
rows       rows of a recording as rows of these tables
cutting    which steps are whole on all ranks, and what their time went into
budget     what is left out where there is too much
feed       follows a recording: what is new, all that is there, answers
present    what the ranks do at this moment
publisher  the one thread that sends
monitor    the widget
live       where views come and go: under a running cell, at %ddp_monitor
summary    the text and the picture that stay
page       a recording as one page, without a kernel
simulation ranks that are not there
simulated  what they do
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_notebook.widgets.monitor import Monitor
    from ddp_notebook.widgets.simulation import simulate

__all__ = ["Monitor", "simulate"]
_LAZY = {"Monitor": "ddp_notebook.widgets.monitor", "simulate": "ddp_notebook.widgets.simulation"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
