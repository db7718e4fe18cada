"""The live monitor: draws a recording while it grows.

feature          declares `%ddp_monitor`
monitor          the widget
session_views    the monitors of one session, and its recording after the session has ended
view_placement   places views: under a running cell, at %ddp_monitor
ended_session    the recording of an ended session, for the magics
under_cell       decides when a view appears under a running cell
placed_views     the views that can be placed: a widget, a picture
picture_renewal  decides when the picture of %ddp_monitor in a saved notebook is drawn again
frontend_probe   measures if views answer, and if they can do so while a cell runs
publisher        the only thread that sends to views
live_status      the current state of the ranks
bundles          the JavaScript that `hatch_build.py` builds

feed/            selects the data for the browser, and the time to send it
html/            the monitor without JavaScript, redrawn in place
still/           the static forms of a view: a text, a picture, a page
simulated/       recordings of simulated ranks
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
