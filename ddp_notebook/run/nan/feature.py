"""Declaration of `%ddp_nan`."""

from __future__ import annotations

import functools
from typing import Any

from ddp_notebook.line_parser import LineParser
from ddp_notebook.run.features import Commands, FeatureMagic, NotebookFeature
from ddp_notebook.run.interrupted import OF_RECORDING


@functools.cache
def nan_line() -> LineParser:
    parser = LineParser("%ddp_nan", "%ddp_nan", "%ddp_nan --catch")
    parser.add_argument("cell", metavar="CELL", nargs="?", help="7 for In [7]; the last training cell by default")
    parser.add_argument(
        "--catch", action="store_true", help="stop the next cells before a step with NaN or infinite gradients"
    )
    parser.add_argument("--no-catch", action="store_true", help="check the next cells no longer")
    return parser


def ddp_nan(commands: Commands, line: str) -> None:
    """Show where NaN began: rank, step and gradients."""
    from ddp_notebook.errors import UsageError

    parser = nan_line()
    given = parser.parse_line(line)
    if given.catch + given.no_catch + (given.cell is not None) > 1:
        raise UsageError(
            f"CELL, --catch and --no-catch exclude each other: give one of them\nusage: {parser.usage_line}"
        )
    if given.catch or given.no_catch:
        commands().of_session().catch_nan(given.catch)
        print(
            "the next cells stop on all ranks before an optimizer step whose gradients are NaN or infinite; "
            "%ddp_nan --no-catch ends this"
            if given.catch
            else "the next cells are not checked for NaN"
        )
        return
    recording = commands().recorded().recording
    cell = None
    if given.cell is not None:
        from ddp_notebook.observe.nan.first_nan import cell_of_prompt

        cell = cell_of_prompt(recording, parser.number(int, "CELL", given.cell, "number of a cell"))
    print(recording.first_nan(cell))


def _session() -> type[Any]:
    from ddp_notebook.run.nan.caught_nan import CaughtNan

    return CaughtNan


FEATURE = NotebookFeature(
    magics={"ddp_nan": FeatureMagic(nan_line, ddp_nan, OF_RECORDING["first_nan"], "recording", "ddp_forecast")},
    session=_session,
)
