"""Declaration of `%ddp_fault`."""

from __future__ import annotations

import functools

from ddp_notebook.line_parser import LineParser
from ddp_notebook.run.features import Commands, FeatureMagic, NotebookFeature
from ddp_notebook.run.interrupted import OF_RANKS


@functools.cache
def fault_line() -> LineParser:
    parser = LineParser("%ddp_fault", "%ddp_fault kill --ranks 1 --after 2", "%ddp_fault slow --ranks 0 --by 0.05")
    parser.add_argument("kind", metavar="kill|hang|slow|raise|off", help="the fault to inject; off ends it")
    parser.add_argument("--ranks", metavar="0,2-3", help="the ranks that fail; all by default with off")
    parser.add_argument("--after", metavar="S", help="seconds after the start of the running or next cell")
    parser.add_argument("--by", metavar="S", default="0.1", help="with slow: seconds added to each step (0.1)")
    return parser


def ddp_fault(commands: Commands, line: str) -> None:
    """Make ranks fail on purpose, to see how the code reacts."""
    parser = fault_line()
    given = parser.parse_line(line)
    after_s = None if given.after is None else parser.number(float, "--after", given.after, "number of seconds")
    by_s = parser.number(float, "--by", given.by, "number of seconds")
    print(commands().of_session().ranks.fault(given.kind, given.ranks, after_s=after_s, by_s=by_s))


FEATURE = NotebookFeature(
    magics={"ddp_fault": FeatureMagic(fault_line, ddp_fault, OF_RANKS["fault"], "session", "ddp_resize")}
)
