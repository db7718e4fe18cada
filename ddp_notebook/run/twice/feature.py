"""Declaration of `%%ddp_twice`."""

from __future__ import annotations

import functools

from ddp_notebook.line_parser import LineParser, refuse_arguments
from ddp_notebook.run.features import Commands, FeatureMagic, NotebookFeature

_INTERRUPTED = "interrupted: the ranks have the variables from before the cell, unless both runs were over"


@functools.cache
def twice_line() -> LineParser:
    return LineParser("%%ddp_twice", "%%ddp_twice")


def ddp_twice(commands: Commands, line: str, cell: str) -> None:
    """Run the cell twice from the same state, and compare.

    The cell runs on all ranks, and the result says if it is deterministic. Variables, gradients and random state are
    restored before the second run, but no files. Afterwards the ranks have the state that one run leaves."""
    refuse_arguments("%%ddp_twice", line)
    from ddp_notebook.run.twice.twice import run_twice

    session = commands().of_session()
    print(run_twice(session._parts, session._run_in_slot, cell))


FEATURE = NotebookFeature(
    magics={"ddp_twice": FeatureMagic(twice_line, ddp_twice, _INTERRUPTED, "cells", "on_ranks", is_cell=True)}
)
