"""Declaration of `%ddp_whos`."""

from __future__ import annotations

import functools

from ddp_notebook.line_parser import LineParser
from ddp_notebook.run.features import Commands, FeatureMagic, NotebookFeature
from ddp_notebook.run.interrupted import OF_SESSION


@functools.cache
def whos_line() -> LineParser:
    parser = LineParser("%ddp_whos", "%ddp_whos", "%ddp_whos loss*", "%ddp_whos --exact")
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", default="", help="only these names, as in loss* or x")
    parser.add_argument("--exact", action="store_true", help="compare every byte instead of samples of large tensors")
    return parser


def ddp_whos(commands: Commands, line: str) -> None:
    """List the variables of the ranks, and how they differ.

    The table has type, shape and bytes. While a cell runs, contents are not compared."""
    given = whos_line().parse_line(line)
    print(commands().of_session().whos(given.pattern, exact=given.exact))


FEATURE = NotebookFeature(
    magics={"ddp_whos": FeatureMagic(whos_line, ddp_whos, OF_SESSION["whos"], "variables", "ddp_peek")}
)
