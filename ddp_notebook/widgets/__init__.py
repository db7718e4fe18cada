"""The live monitor: what a recording holds, drawn while it grows.

feature          declares `%ddp_monitor`
monitor          the widget
session_views    the monitors of one session, and its recording after its end
view_placement   where views appear: under a running cell, at %ddp_monitor
ended_session    what a session has recorded, for the magics behind its end
under_cell       when one comes under a running cell
placed_views     what stands at a place: a widget, a picture
picture_renewal  when the picture of %ddp_monitor in a saved notebook is drawn again
frontend_probe   whether views answer, and whether while a cell runs
publisher        the one thread that sends
live_status      what the ranks do at this moment
bundles          the JavaScript that `hatch_build.py` makes

feed/            what travels to the browser, and when
html/            the monitor without JavaScript, redrawn in place
still/           what stays: a text, a picture, a page
simulated/       ranks that do not exist
js/              the monitor in the browser
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_notebook.widgets.monitor import Monitor
    from ddp_notebook.widgets.simulated.simulation import simulate

__all__ = ["Monitor", "simulate"]
_LAZY = {"Monitor": "ddp_notebook.widgets.monitor", "simulate": "ddp_notebook.widgets.simulated.simulation"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
