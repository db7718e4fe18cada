"""Declaration of `%ddp_jobs`, `%ddp_wait` and `%ddp_cancel`."""

from __future__ import annotations

import functools
from typing import Any

from ddp_notebook.line_parser import LineParser, refuse_arguments
from ddp_notebook.run.features import Commands, FeatureMagic, NotebookFeature
from ddp_notebook.run.interrupted import OF_JOBS


@functools.cache
def jobs_line() -> LineParser:
    return LineParser("%ddp_jobs", "%ddp_jobs")


@functools.cache
def wait_line() -> LineParser:
    parser = LineParser("%ddp_wait", "%ddp_wait", "%ddp_wait 1 2")
    parser.add_argument("numbers", metavar="N", nargs="*", help="numbers of jobs; by default all")
    return parser


@functools.cache
def cancel_line() -> LineParser:
    parser = LineParser("%ddp_cancel", "%ddp_cancel 1", "%ddp_cancel all")
    parser.add_argument("numbers", metavar="N|all", nargs="+", help="numbers of jobs, or all of them")
    return parser


def ddp_jobs(commands: Commands, line: str) -> None:
    """List the background cells that run, wait or have ended."""
    refuse_arguments("%ddp_jobs", line)
    print(commands().of_session().jobs)


def ddp_wait(commands: Commands, line: str) -> None:
    """Wait for background cells; a failed one raises its error."""
    jobs = commands().of_session().jobs
    if not jobs.wait(*_numbers(wait_line(), line), report=print):
        print("no job is left to wait for")


def ddp_cancel(commands: Commands, line: str) -> None:
    """End cells in the background; the ranks keep their variables."""
    parser = cancel_line()
    jobs = commands().of_session().jobs
    if not line.strip():
        parser.error("pass the number of a job; %ddp_jobs lists them")
    numbers = [] if line.strip() == "all" else _numbers(parser, line)
    print("\n".join(jobs.cancel(*numbers)) or "no job is left to cancel")


def _numbers(parser: LineParser, line: str) -> list[int]:
    return [parser.number(int, "N", text, "job number") for text in parser.parse_line(line).numbers]


def _session() -> type[Any]:
    from ddp_notebook.run.jobs.jobs import SessionJobs

    return SessionJobs


FEATURE = NotebookFeature(
    magics={
        "ddp_jobs": FeatureMagic(jobs_line, ddp_jobs, OF_JOBS["__repr__"], "cells", "on_ranks"),
        "ddp_wait": FeatureMagic(wait_line, ddp_wait, OF_JOBS["wait"], "cells", "ddp_jobs"),
        "ddp_cancel": FeatureMagic(cancel_line, ddp_cancel, OF_JOBS["cancel"], "cells", "ddp_wait"),
    },
    session=_session,
)
