"""What a cell's magic line asks for."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_notebook.errors import UsageError
from ddp_notebook.lines import LineParser

ON_ALL_RANKS = "%%on_all_ranks [--ranks 0,2-3] [--timeout S] [--quiet] [--here]"
ON_RANKS = "%%on_ranks 0,2-3 [--timeout S] [--quiet] [--here]"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOptions:
    """How a cell is to be run.

    Args:
        ranks: the set of ranks as written; None: all.
        timeout_s: seconds after which it is stopped; None: no limit.
        quiet: show nothing of what it prints and displays.
        here: run it in the notebook too, after the ranks.
    """

    ranks: str | None = None
    timeout_s: float | None = None
    quiet: bool = False
    here: bool = False


def parse(line: str, usage: str = ON_ALL_RANKS) -> CellOptions:
    """Read the line of `%%on_all_ranks` or `%%on_ranks`.

    Raises:
        UsageError: says which option is wrong and how the line is to be written.

    Example:
        >>> parse("--ranks -1 --timeout 5")
        CellOptions(ranks='-1', timeout_s=5.0, quiet=False, here=False)
    """
    if not line.strip() and usage == ON_ALL_RANKS:
        return CellOptions()  # an argument parser takes 0.3 ms to make
    parser = LineParser(usage)
    if usage == ON_RANKS:
        if not line.strip():
            parser.error("on which ranks? Write them behind %%on_ranks")
        line = f"--ranks {line}"
        parser.add_argument("--ranks", required=True)
    else:
        parser.add_argument("--ranks")
    parser.add_argument("--timeout")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--here", action="store_true")
    given = parser.parse_line(line)
    timeout = given.timeout
    return CellOptions(
        ranks=given.ranks,
        timeout_s=None
        if timeout is None
        else check_timeout(parser.number(float, "--timeout", timeout, "number of seconds")),
        quiet=given.quiet,
        here=given.here,
    )


def check_timeout(seconds: float) -> float:
    """Seconds that a cell may take.

    Raises:
        UsageError: no such time.
    """
    if not seconds > 0:
        raise UsageError(f"a timeout of {seconds:g} s is no time to wait; give seconds above 0, e.g. 60")
    return seconds
