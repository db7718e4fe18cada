"""Declaration of `%ddp_debug`."""

from __future__ import annotations

import functools
from typing import Any

from ddp_notebook.line_parser import LineParser
from ddp_notebook.run.features import Commands, FeatureMagic, NotebookFeature

_INTERRUPTED = "interrupted: the debugger is closed; %ddp_debug opens the failure again until the next cell runs"


@functools.cache
def debug_line() -> LineParser:
    parser = LineParser("%ddp_debug", "%ddp_debug", "%ddp_debug 2")
    parser.add_argument("ranks", metavar="RANK", nargs="?", help="2 or 0,2-3; by default all ranks that have failed")
    return parser


def ddp_debug(commands: Commands, line: str) -> None:
    """Open a debugger in the last failed cell.

    It opens in the innermost line of your code, on each rank that has failed. Variables can be inspected until the next
    cell runs on the rank. After an error of missing memory, sizes of variables are shown instead."""
    from ddp_notebook.run.debug.failures import debug_failure

    ranks = debug_line().parse_line(line).ranks
    session = commands().of_session()
    debug_failure(session._parts, session.run, ranks)


def _session() -> type[Any]:
    from ddp_notebook.run.debug.debugging import Debugging

    return Debugging


FEATURE = NotebookFeature(
    magics={"ddp_debug": FeatureMagic(debug_line, ddp_debug, _INTERRUPTED, "cells")}, session=_session
)
