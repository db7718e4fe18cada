"""Declaration of `%ddp_resize`."""

from __future__ import annotations

import functools
from typing import Any

from ddp_notebook.line_parser import LineParser
from ddp_notebook.run.features import Commands, FeatureMagic, NotebookFeature
from ddp_notebook.run.interrupted import OF_RANKS


@functools.cache
def resize_line() -> LineParser:
    parser = LineParser("%ddp_resize", "%ddp_resize 6", "%ddp_resize 2 --without 0,2")
    parser.add_argument("world_size", metavar="N", help="number of ranks afterwards")
    parser.add_argument("--build", metavar="NAME", help="function on the ranks that makes the model again")
    parser.add_argument("--without", metavar="0,2", help="ranks that leave; by default the last ones")
    return parser


def ddp_resize(commands: Commands, line: str) -> None:
    """Change the number of ranks; those that stay keep variables."""
    parser = resize_line()
    given = parser.parse_line(line)
    world_size = parser.number(int, "N", given.world_size, "number of ranks")
    ranks = commands().of_session().ranks
    print("\n".join(ranks.resize(world_size, build=given.build, without=given.without)))


def _session() -> type[Any]:
    from ddp_notebook.run.resize.resizing import Resizing

    return Resizing


FEATURE = NotebookFeature(
    magics={"ddp_resize": FeatureMagic(resize_line, ddp_resize, OF_RANKS["resize"], "session", "ddp_heal")},
    session=_session,
)
