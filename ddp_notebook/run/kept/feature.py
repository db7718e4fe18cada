"""Declaration of `%ddp_attach`."""

from __future__ import annotations

import functools
from typing import Any

from ddp_notebook.line_parser import LineParser
from ddp_notebook.run.features import Commands, FeatureMagic, NotebookFeature
from ddp_notebook.run.interrupted import OF_FUNCTIONS


def _names() -> list[str]:
    """Return the names that `%ddp_attach` accepts."""
    from ddp_notebook.registry import lookup

    return [one.name for one in lookup.everything()]


@functools.cache
def attach_line() -> LineParser:
    parser = LineParser("%ddp_attach", "%ddp_attach kept-1 --wait", values=_names)
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help="a kept session or a torchrun job")
    parser.add_argument("--take-over", action="store_true", help="take it from the notebook that runs its cells")
    parser.add_argument("--look", action="store_true", help="monitor, report and status only: run no cells")
    parser.add_argument("--wait", action="store_true", help="follow the running cell to its end")
    return parser


def ddp_attach(commands: Commands, line: str) -> None:
    """Attach to kept ranks, or to a running torchrun job.

    Kept ranks were started with --keep. Without NAME, those of the notebook's folder come before ranks and jobs of
    other folders. A torchrun job has to run its script under `-m ddp_notebook.attach`."""
    given = attach_line().parse_line(line)
    commands().attach(given.name, take_over=given.take_over, look=given.look, wait=given.wait)


def _session() -> type[Any]:
    from ddp_notebook.run.kept.recovered_cells import KeptCells

    return KeptCells


FEATURE = NotebookFeature(
    magics={
        "ddp_attach": FeatureMagic(attach_line, ddp_attach, OF_FUNCTIONS["attach_session"], "session", "ddp_start")
    },
    session=_session,
)
