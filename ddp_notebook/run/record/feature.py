"""Declaration of `%ddp_record`, `%ddp_report`, `%ddp_diff` and `%ddp_trace`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ddp_notebook.line_parser import LineParser
from ddp_notebook.run.features import Commands, FeatureMagic, NotebookFeature
from ddp_notebook.run.interrupted import OF_RECORDING, OF_SESSION


@functools.cache
def record_line() -> LineParser:
    parser = LineParser("%ddp_record", "%ddp_record all")
    parser.add_argument(
        "level",
        metavar="off|meta|values|all",
        nargs="?",
        help="no record; calls and times; some values; all values",
    )
    return parser


@functools.cache
def report_line() -> LineParser:
    parser = LineParser("%ddp_report", "%ddp_report", "%ddp_report --against run.npz")
    parser.add_argument("--baseline", action="store_true", help="first run some steps on rank 0 alone, and compare")
    parser.add_argument("--against", metavar="RUN", help="also compare with a cell or a recording")
    return parser


@functools.cache
def diff_line() -> LineParser:
    parser = LineParser("%ddp_diff", "%ddp_diff", "%ddp_diff 6 8", "%ddp_diff before.npz --html diff.html")
    parser.add_argument("a", metavar="A", nargs="?", help="the run before: 6 for In [6], a recording, or a folder")
    parser.add_argument("b", metavar="B", nargs="?", help="the run after; the last training run by default")
    parser.add_argument("--html", metavar="FILE", help="also write the comparison as an HTML page")
    return parser


@functools.cache
def trace_line() -> LineParser:
    parser = LineParser("%ddp_trace", "%ddp_trace run.json")
    parser.add_argument("file", metavar="FILE", help="where to write the trace")
    return parser


def ddp_record(commands: Commands, line: str) -> None:
    """Set or show how much the ranks record from now on."""
    session = commands().of_session()
    level = line.strip() or session._level
    session.record(level)
    print(
        {
            "off": "ranks record nothing; %ddp_status still shows which rank waits where",
            "meta": "ranks record calls and their times, but no tensor values",
            "values": "ranks record calls, their times and tensor values; if steps are fast, of some steps only",
            "all": "ranks record calls, their times and all tensor values",
        }[level]
    )


def ddp_report(commands: Commands, line: str) -> None:
    """Show where the time of the last training run went.

    The report also says what to try."""
    given = report_line().parse_line(line)
    if given.baseline:
        commands().of_session().baseline()
    of = commands().recorded()
    print(of.report())
    if given.against is not None:
        from ddp_notebook.observe.compare.named import compare_named

        print("", compare_named([given.against], lambda: of.recording), sep="\n")


def ddp_diff(commands: Commands, line: str) -> None:
    """Show what changed between two training runs.

    A and B are numbers of cells (6), saved recordings (run.npz), or folders of DDP_NOTEBOOK_RECORD. Without B, A is
    compared with the last training run, or with the one before it if A is the last one. Without both, the last two are
    compared. The first line names the base."""
    from ddp_notebook.observe.compare.named import compare_named

    given = diff_line().parse_line(line)
    found = compare_named(
        [name for name in (given.a, given.b) if name is not None], lambda: commands().recorded().recording
    )
    print(found)
    if given.html is not None:
        from ddp_notebook.records.names import printable

        print(f"\nwritten to {printable(str(found.save_html(given.html)))}")


def ddp_trace(commands: Commands, line: str) -> None:
    """Write a trace that https://ui.perfetto.dev opens."""
    from ddp_notebook.records.names import printable
    from ddp_notebook.records.units import size
    from ddp_notebook.records.words import list_ranks

    path = trace_line().parse_line(line).file
    profiles, lost = commands().recorded()._write_trace(path)
    also = f", with torch's profile of {len(profiles)} rank{'s' * (len(profiles) > 1)}" if profiles else ""
    also += f", without that of {list_ranks(lost)}, which is lost" if lost else ""
    print(f"{printable(path)}: {size(Path(path).stat().st_size)}{also}. Open it at https://ui.perfetto.dev")


def _session() -> type[Any]:
    from ddp_notebook.run.record.recordings import Recordings

    return Recordings


FEATURE = NotebookFeature(
    magics={
        "ddp_record": FeatureMagic(record_line, ddp_record, OF_SESSION["record"], "recording"),
        "ddp_report": FeatureMagic(report_line, ddp_report, OF_SESSION["report"], "recording"),
        "ddp_diff": FeatureMagic(diff_line, ddp_diff, OF_RECORDING["compare"], "recording"),
        "ddp_trace": FeatureMagic(trace_line, ddp_trace, OF_SESSION["trace"], "recording"),
    },
    session=_session,
)
