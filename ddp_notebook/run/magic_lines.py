"""The declarations of the magics' lines, apart from those of cells, `%ddp_start` and `%ddp_torchrun`."""

from __future__ import annotations

import functools

from ddp_notebook.line_parser import LineParser
from ddp_notebook.registry import lookup

RANKS = "only these ranks, as in 0,2-3, -1, ::2 or all"


def _names() -> list[str]:
    """Return the names that `%ddp_attach` takes."""
    return [one.name for one in lookup.everything()]


@functools.cache
def attach() -> LineParser:
    parser = LineParser("%ddp_attach", "%ddp_attach kept-1 --wait", values=_names)
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help="a kept session or a torchrun job")
    parser.add_argument("--take-over", action="store_true", help="take it from the notebook that runs its cells")
    parser.add_argument("--look", action="store_true", help="monitor, report and status only: run no cells")
    parser.add_argument("--wait", action="store_true", help="follow the running cell to its end")
    return parser


@functools.cache
def status() -> LineParser:
    return LineParser("%ddp_status", "%ddp_status")


@functools.cache
def restart() -> LineParser:
    return LineParser("%ddp_restart", "%ddp_restart")


@functools.cache
def stop() -> LineParser:
    return LineParser("%ddp_stop", "%ddp_stop")


@functools.cache
def interrupt() -> LineParser:
    parser = LineParser("%ddp_interrupt", "%ddp_interrupt --replace")
    parser.add_argument(
        "--replace", action="store_true", help="replace ranks that do not end the cell, without variables"
    )
    return parser


@functools.cache
def heal() -> LineParser:
    parser = LineParser("%ddp_heal", "%ddp_heal", "%ddp_heal --from 0")
    parser.add_argument(
        "--from", dest="from_rank", metavar="RANK", help="copy variables, models and optimizers of this rank"
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="copy only these variables")
    return parser


@functools.cache
def resize() -> LineParser:
    parser = LineParser("%ddp_resize", "%ddp_resize 6", "%ddp_resize 2 --without 0,2")
    parser.add_argument("world_size", metavar="N", help="number of ranks afterwards")
    parser.add_argument("--build", metavar="NAME", help="function on the ranks that makes the model again")
    parser.add_argument("--without", metavar="0,2", help="ranks that leave; by default the last ones")
    return parser


@functools.cache
def check() -> LineParser:
    parser = LineParser("%ddp_check", "%ddp_check", "%ddp_check model optimizer")
    parser.add_argument("names", metavar="NAME", nargs="*", help="compare only these variables")
    return parser


@functools.cache
def record() -> LineParser:
    parser = LineParser("%ddp_record", "%ddp_record all")
    parser.add_argument(
        "level",
        metavar="off|meta|values|all",
        nargs="?",
        help="no record; calls and times; some values; all values",
    )
    return parser


@functools.cache
def report() -> LineParser:
    parser = LineParser("%ddp_report", "%ddp_report")
    parser.add_argument("--baseline", action="store_true", help="first run some steps on rank 0 alone, and compare")
    return parser


@functools.cache
def monitor() -> LineParser:
    parser = LineParser("%ddp_monitor", "%ddp_monitor", "%ddp_monitor 6")
    parser.add_argument("cell", metavar="CELL", nargs="?", help="show only this cell: 6 is In [6]")
    return parser


@functools.cache
def trace() -> LineParser:
    parser = LineParser("%ddp_trace", "%ddp_trace run.json")
    parser.add_argument("file", metavar="FILE", help="where to write the trace")
    return parser


@functools.cache
def jobs() -> LineParser:
    return LineParser("%ddp_jobs", "%ddp_jobs")


@functools.cache
def wait() -> LineParser:
    parser = LineParser("%ddp_wait", "%ddp_wait", "%ddp_wait 1 2")
    parser.add_argument("numbers", metavar="N", nargs="*", help="numbers of jobs; by default all")
    return parser


@functools.cache
def cancel() -> LineParser:
    parser = LineParser("%ddp_cancel", "%ddp_cancel 1", "%ddp_cancel all")
    parser.add_argument("numbers", metavar="N|all", nargs="+", help="numbers of jobs, or all of them")
    return parser


@functools.cache
def local() -> LineParser:
    return LineParser("%%local", "%%local")


@functools.cache
def auto() -> LineParser:
    parser = LineParser("%ddp_auto", "%ddp_auto on")
    parser.add_argument("state", metavar="on|off", help="on: plain cells run on all ranks; off: in the notebook")
    return parser


@functools.cache
def pull() -> LineParser:
    parser = LineParser("%ddp_pull", "%ddp_pull losses", "%ddp_pull x --ranks 0 --as first")
    parser.add_argument("names", metavar="NAME", nargs="+", help="variables of the ranks")
    parser.add_argument("--ranks", metavar="0,2-3", help=RANKS)
    parser.add_argument("--as", dest="new", metavar="NEW", help="name of the variable in the notebook")
    parser.add_argument("--force", action="store_true", help="also more than 1 GB")
    parser.add_argument(
        "--safe", action="store_true", help="without pickle: numbers, text, tensors, arrays, containers"
    )
    return parser


@functools.cache
def peek() -> LineParser:
    parser = LineParser("%ddp_peek", "%ddp_peek history[-5:]", "%ddp_peek --ranks 0 model.weight.norm()")
    parser.add_argument("--ranks", metavar="0,2-3", help=RANKS)
    parser.add_argument("expression", metavar="EXPRESSION", nargs="+", help="Python; it must not call a collective")
    return parser


@functools.cache
def push() -> LineParser:
    parser = LineParser("%ddp_push", "%ddp_push config", "%ddp_push images --ranks 0")
    parser.add_argument("names", metavar="NAME", nargs="+", help="variables of the notebook")
    parser.add_argument("--ranks", metavar="0,2-3", help=RANKS)
    parser.add_argument("--force", action="store_true", help="also more than 1 GB")
    return parser


@functools.cache
def help_() -> LineParser:
    parser = LineParser("%ddp_help", "%ddp_help", "%ddp_help ddp_start")
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help="a magic, as in ddp_start or start")
    return parser
