"""Declaration of `%ddp_memory`."""

from __future__ import annotations

import functools
from typing import Any

from ddp_notebook.line_parser import LineParser
from ddp_notebook.run.features import Commands, FeatureMagic, NotebookFeature
from ddp_notebook.run.interrupted import OF_SESSION


@functools.cache
def memory_line() -> LineParser:
    parser = LineParser(
        "%ddp_memory", "%ddp_memory", "%ddp_memory step()", "%ddp_memory --why", "%ddp_memory --why run.npz"
    )
    parser.add_argument("code", metavar="CODE", nargs="?", help="run this on all ranks and measure its peak")
    parser.add_argument("--why", action="store_true", help="explain the last out-of-memory errors, also of a recording")
    return parser


def ddp_memory(commands: Commands, line: str) -> None:
    """Show what takes the memory of each rank.

    These are parameters, gradients, optimizer state, activations and the rest. After an out-of-memory error, --why
    shows what took the memory. --why run.npz does so for a saved recording."""
    first, _, path = line.strip().partition(" ")
    if first == "--why" and path.strip():
        from ddp_notebook.run.sharding.out_of_memory import why_of_file

        print(why_of_file(path.strip().strip("'\"")))
        return
    session = commands().of_session()
    if first == "--why":
        from ddp_notebook.run.sharding.out_of_memory import asked

        print(asked(session))
    else:
        print(session.memory(line.strip()))


def _session() -> type[Any]:
    from ddp_notebook.run.sharding.growing_memory import GrowingMemory

    return GrowingMemory


FEATURE = NotebookFeature(
    magics={"ddp_memory": FeatureMagic(memory_line, ddp_memory, OF_SESSION["memory"], "session")},
    session=_session,
)
