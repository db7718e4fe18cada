"""Declarations of the magics' lines, except those of cells, `%ddp_start` and `%ddp_torchrun`."""

from __future__ import annotations

import functools

from ddp_notebook.line_parser import LineParser

RANKS = "only these ranks, as in 0,2-3, -1, ::2, tp=1 or all"


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
def check() -> LineParser:
    parser = LineParser("%ddp_check", "%ddp_check", "%ddp_check model optimizer")
    parser.add_argument("names", metavar="NAME", nargs="*", help="compare only these variables")
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
