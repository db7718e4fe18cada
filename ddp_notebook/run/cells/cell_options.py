"""Options on the magic line of a cell."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from ddp_notebook.errors import UsageError
from ddp_notebook.line_parser import LineParser

if TYPE_CHECKING:
    from ddp_notebook.messages.record_options import RecordOptions

_OPTION = re.compile(r"\s*(--[a-z][a-z-]*)(?:=(\S+))?(?=\s|$)")  # at the head of a line
_VALUE = re.compile(r"""\s+("[^"]*"|'[^']*'|\S+)""")
FULL_BYTES = 1 << 20  # largest tensor that `--tensors full` keeps completely


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOptions:
    """Options for running a cell.

    Args:
        ranks: set of ranks as written; None: all.
        timeout_s: seconds after which the cell is stopped; None: no limit.
        quiet: do not show output and displays.
        fold: merge lines of several ranks that are equal or differ only in a few numbers; None: as the session does.
        here: run the cell in the notebook too, after the ranks.
        background: do not wait for the cell.
        record: recording options; None: the default recording.
    """

    ranks: str | None = None
    timeout_s: float | None = None
    quiet: bool = False
    fold: bool | None = None
    here: bool = False
    background: bool = False
    record: RecordOptions | None = None


@functools.cache
def on_all_ranks() -> LineParser:
    """Return the declaration of the line of `%%on_all_ranks`."""
    parser = LineParser(
        "%%on_all_ranks",
        "%%on_all_ranks --ranks 0 --timeout 60",
        "%%on_all_ranks --background",
        "%on_all_ranks x.sum()",
    )
    parser.add_argument("--ranks", metavar="0,2-3", help="only these ranks, as in 0,2-3, -1, ::2, tp=1 or all")
    _add_options(parser)
    return parser


@functools.cache
def on_ranks() -> LineParser:
    """Return the declaration of the line of `%%on_ranks`."""
    parser = LineParser("%%on_ranks", "%%on_ranks 0,2-3", "%%on_ranks -1 --quiet")
    # Required options are written without their names, see `parse`.
    parser.add_argument(
        "--ranks", metavar="0,2-3", required=True, help="these ranks, as in 0,2-3, -1, ::2, tp=1 or all"
    )
    _add_options(parser)
    return parser


def _add_options(parser: LineParser) -> None:
    parser.add_argument("--timeout", metavar="S", help="stop the cell after S seconds")
    parser.add_argument("--quiet", action="store_true", help="show nothing that the cell prints or displays")
    parser.add_argument(
        "--fold",
        choices=("on", "off"),
        metavar="on|off",
        help="on: merge lines if at most 4 numbers differ",
    )
    parser.add_argument("--here", action="store_true", help="then run the cell in the notebook too")
    parser.add_argument("--background", action="store_true", help="return at once; not together with --here")
    recorded = parser.add_argument_group("recording")
    recorded.add_argument(
        "--tensors",
        choices=("preview", "full"),
        metavar="preview|full",
        help="full: keep tensors of collectives, up to 1 MB each",
    )
    recorded.add_argument("--watch", metavar="NAME,...", help="record these variables after each optimizer step")
    recorded.add_argument("--gradient", metavar="NAME", help="keep this parameter's gradient, local and averaged")
    recorded.add_argument("--profile", action="store_true", help="run torch.profiler; %%ddp_trace includes its traces")


def parse(line: str, declared: Callable[[], LineParser] = on_all_ranks) -> CellOptions:
    """Parse the line of `%%on_all_ranks` or `%%on_ranks`.

    Raises:
        UsageError: an option is invalid; the message shows the syntax.

    Example:
        >>> parse("--ranks -1 --timeout 5").ranks
        '-1'
    """
    if not line.strip() and declared is on_all_ranks:
        return CellOptions()
    parser = declared()
    if declared is on_ranks:
        if not line.strip():
            parser.error("%%on_ranks needs ranks: %%on_ranks 0,2-3")
        words = [word.strip(",") for word in takewhile(lambda word: word[0] in "0123456789,", line.split())]
        if len(words) > 1:
            parser.error(f"the ranks are one word, without spaces: %%on_ranks {','.join(filter(None, words))}")
        line = f"--ranks {line}"
    given = parser.parse_line(line)
    if given.here and given.background:
        parser.error("--here runs the cell in the notebook after the ranks, and --background does not wait for them")
    timeout = given.timeout
    return CellOptions(
        ranks=given.ranks,
        timeout_s=None
        if timeout is None
        else check_timeout(parser.number(float, "--timeout", timeout, "number of seconds")),
        quiet=given.quiet,
        fold=None if given.fold is None else given.fold == "on",
        here=given.here,
        background=given.background,
        record=what_to_record(given.tensors, given.watch, given.gradient, given.profile),
    )


def parse_line(line: str) -> tuple[CellOptions, str]:
    """Split the line of `%on_all_ranks` into its options, which come first, and the code.

    Raises:
        UsageError: an option is invalid; the message shows the syntax.

    Example:
        >>> options, code = parse_line("--ranks 1 --quiet x = 1")
        >>> options.ranks, options.quiet, code
        ('1', True, 'x = 1')
        >>> parse_line("--x")[1]  # twice negated
        '--x'
    """
    if not line.lstrip().startswith("--"):
        return CellOptions(), line
    parser = on_all_ranks()
    end = 0
    while (found := _OPTION.match(line, end)) and (option := parser.option(found[1])) is not None:
        end = found.end()
        if option.nargs is None and found[2] is None and (value := _VALUE.match(line, end)):
            end = value.end()
    options, code = line[:end], line[end:]
    if found is not None and not _is_python(code):
        parser.error(f"{found[1]} is not an option of %on_all_ranks")
    if not code.strip():
        parser.error("the options of %on_all_ranks are followed by code: %on_all_ranks --quiet x = 1")
    return parse(options), code.lstrip()


def _is_python(code: str) -> bool:
    """Return whether code that begins like an option is an expression, such as `--x`."""
    try:
        ast.parse(code.strip())
    except SyntaxError:
        return False
    return True


def what_to_record(
    tensors: str | None = None, watch: str | None = None, gradient: str | None = None, profile: bool = False
) -> RecordOptions:
    """Return the recording options of a cell, in addition to the default recording.

    Args:
        tensors: "full": keep complete tensors of up to 1 MB.
        watch: names of variables to record after each optimizer step, separated by commas.
        gradient: name of a DDP parameter whose gradient is kept, local and averaged.
        profile: run the torch profiler.

    Raises:
        UsageError: a watched name is not a valid variable name.

    Example:
        >>> what_to_record(watch="loss,acc").watch
        ('loss', 'acc')
    """
    names = tuple(name.strip() for name in watch.split(",")) if watch else ()
    for name in names:
        if not name.isidentifier():
            raise UsageError(f"--watch takes names of variables, as in --watch loss,acc, got {name!r}")
    full_bytes = FULL_BYTES if tensors == "full" else 0
    from ddp_notebook.messages.record_options import RecordOptions

    return RecordOptions(full_bytes=full_bytes, watch=names, gradient=gradient or "", profile=profile)


def check_timeout(seconds: float) -> float:
    """Check a time limit in seconds, and return it.

    Raises:
        UsageError: it is not a positive number.
    """
    if not isinstance(seconds, int | float):
        raise UsageError(f"timeout must be a number of seconds, e.g. timeout=60, got {seconds!r}")
    if not seconds > 0:
        raise UsageError(f"timeout must be a positive number of seconds, e.g. 60, got {seconds:g}")
    return seconds
