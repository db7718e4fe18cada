"""Declaration of `%ddp_memory`."""

from __future__ import annotations

import functools

from ddp_notebook.line_parser import LineParser
from ddp_notebook.run.features import Commands, FeatureMagic, NotebookFeature
from ddp_notebook.run.interrupted import OF_SESSION


@functools.cache
def memory_line() -> LineParser:
    parser = LineParser("%ddp_memory", "%ddp_memory", "%ddp_memory step()", "%ddp_memory --why")
    parser.add_argument("code", metavar="CODE", nargs="?", help="run this on all ranks and measure its peak")
    parser.add_argument("--why", action="store_true", help="explain the last out-of-memory errors")
    return parser


def ddp_memory(commands: Commands, line: str) -> None:
    """Show what takes the memory of each rank.

    These are parameters, gradients, optimizer state, activations and the rest. After an out-of-memory error, --why
    shows what took the memory."""
    session = commands().of_session()
    if line.strip() == "--why":
        from ddp_notebook.run.sharding.out_of_memory import QUESTION, why

        print(why(session._ask(QUESTION, "out_of_memory"), session.recording))
    else:
        print(session.memory(line.strip()))


FEATURE = NotebookFeature(magics={"ddp_memory": FeatureMagic(memory_line, ddp_memory, OF_SESSION["memory"], "session")})
