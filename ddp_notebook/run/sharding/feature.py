"""Declaration of `%ddp_memory`."""

from __future__ import annotations

import functools

from ddp_notebook.line_parser import LineParser
from ddp_notebook.run.features import Commands, FeatureMagic, NotebookFeature
from ddp_notebook.run.interrupted import OF_SESSION


@functools.cache
def memory_line() -> LineParser:
    parser = LineParser("%ddp_memory", "%ddp_memory", "%ddp_memory step()")
    parser.add_argument("code", metavar="CODE", nargs="?", help="run this on all ranks and measure its peak")
    return parser


def ddp_memory(commands: Commands, line: str) -> None:
    """Show what takes the memory of each rank.

    These are parameters, gradients, optimizer state, activations and the rest."""
    print(commands().of_session().memory(line.strip()))


FEATURE = NotebookFeature(magics={"ddp_memory": FeatureMagic(memory_line, ddp_memory, OF_SESSION["memory"], "session")})
