"""Declaration of `%ddp_monitor`."""

from __future__ import annotations

import functools
from typing import Any

from ddp_notebook.line_parser import LineParser
from ddp_notebook.run.features import Commands, FeatureMagic, NotebookFeature
from ddp_notebook.run.interrupted import OF_SESSION


@functools.cache
def monitor_line() -> LineParser:
    parser = LineParser("%ddp_monitor", "%ddp_monitor", "%ddp_monitor 6")
    parser.add_argument("cell", metavar="CELL", nargs="?", help="show only this cell: 6 is In [6]")
    return parser


def ddp_monitor(commands: Commands, line: str) -> None:
    """Show a live view of the ranks, or of one cell."""
    parser = monitor_line()
    cell = parser.parse_line(line).cell
    recorded = commands().recorded()
    if cell is None:
        recorded.monitor()
    else:
        from ddp_notebook.widgets.view_placement import find_cell

        number = parser.number(int, "CELL", cell, "cell number")
        recorded.monitor(find_cell(recorded.recording, number))


def _session() -> type[Any]:
    from ddp_notebook.widgets.session_views import SessionViews

    return SessionViews


FEATURE = NotebookFeature(
    magics={"ddp_monitor": FeatureMagic(monitor_line, ddp_monitor, OF_SESSION["monitor"], "recording", "ddp_report")},
    session=_session,
)
