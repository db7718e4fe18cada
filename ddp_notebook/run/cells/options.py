"""What a cell's magic line asks for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from ddp_notebook.errors import UsageError
from ddp_notebook.run.lines import LineParser
from ddp_notebook.wire.record_options import RecordOptions

_RECORD = "[--tensors full] [--watch NAME,...] [--gradient NAME] [--profile]"
_OPTIONS = f"[--timeout S] [--quiet] [--here | --background] {_RECORD}"
ON_ALL_RANKS = f"%%on_all_ranks [--ranks 0,2-3] {_OPTIONS}"
ON_RANKS = f"%%on_ranks 0,2-3 {_OPTIONS}"
FULL_BYTES = 1 << 20  # of a tensor that `--tensors full` keeps whole


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOptions:
    """How a cell is to be run.

    Args:
        ranks: the set of ranks as written; None: all.
        timeout_s: seconds after which it is stopped; None: no limit.
        quiet: show nothing of what it prints and displays.
        here: run it in the notebook too, after the ranks.
        background: do not wait for it.
        record: what to record of it; None: what is always recorded.
    """

    ranks: str | None = None
    timeout_s: float | None = None
    quiet: bool = False
    here: bool = False
    background: bool = False
    record: RecordOptions | None = None


def parse(line: str, usage: str = ON_ALL_RANKS) -> CellOptions:
    """Read the line of `%%on_all_ranks` or `%%on_ranks`.

    Raises:
        UsageError: says which option is wrong and how the line is to be written.

    Example:
        >>> parse("--ranks -1 --timeout 5").ranks
        '-1'
    """
    if not line.strip() and usage == ON_ALL_RANKS:
        return CellOptions()  # an argument parser takes 0.3 ms to make
    parser = LineParser(usage)
    if usage == ON_RANKS:
        if not line.strip():
            parser.error("on which ranks? Write them behind %%on_ranks")
        words = [word.strip(",") for word in takewhile(lambda word: word[0] in "0123456789,", line.split())]
        if len(words) > 1:
            parser.error(f"the ranks are one word, without spaces: %%on_ranks {','.join(filter(None, words))}")
        line = f"--ranks {line}"
        parser.add_argument("--ranks", required=True)
    else:
        parser.add_argument("--ranks")
    parser.add_argument("--timeout")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--here", action="store_true")
    parser.add_argument("--background", action="store_true")
    parser.add_argument("--tensors", choices=("preview", "full"))
    parser.add_argument("--watch")
    parser.add_argument("--gradient")
    parser.add_argument("--profile", action="store_true")
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
        here=given.here,
        background=given.background,
        record=what_to_record(given.tensors, given.watch, given.gradient, given.profile),
    )


def what_to_record(
    tensors: str | None = None, watch: str | None = None, gradient: str | None = None, profile: bool = False
) -> RecordOptions:
    """What a cell is to record beside what is always recorded.

    Args:
        tensors: "full": keep whole tensors of up to 1 MB.
        watch: names of variables to read after each optimizer step, with commas.
        gradient: name of a parameter in DDP whose gradient to keep, local and averaged.
        profile: run torch's profiler.

    Raises:
        UsageError: what is to be watched is no name.

    Example:
        >>> what_to_record(watch="loss,acc").watch
        ('loss', 'acc')
    """
    names = tuple(name.strip() for name in watch.split(",")) if watch else ()
    for name in names:
        if not name.isidentifier():
            raise UsageError(f"--watch takes names of variables, and {name!r} is none: --watch loss,acc")
    full_bytes = FULL_BYTES if tensors == "full" else 0
    return RecordOptions(full_bytes=full_bytes, watch=names, gradient=gradient or "", profile=profile)


def check_timeout(seconds: float) -> float:
    """Seconds that a cell may take.

    Raises:
        UsageError: no such time.
    """
    if not isinstance(seconds, int | float):
        raise UsageError(f"timeout is {seconds!r}, which is no number of seconds; give e.g. timeout=60")
    if not seconds > 0:
        raise UsageError(f"a timeout of {seconds:g} s is no time to wait; give seconds above 0, e.g. 60")
    return seconds
