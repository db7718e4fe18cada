"""Whether the ranks of a cell train together at all."""

from __future__ import annotations

import numpy as np

from ddp_notebook.observe.tables.parts import Bounded
from ddp_notebook.observe.tables.ring import select
from ddp_notebook.records.schema import SPANS, Rows

_OPTIMIZER = SPANS.index("optimizer")


def apart(recording: Bounded, cell: int) -> list[int]:
    """Ranks of a cell whose main thread took at least two optimizer steps, with no collective, send or receive from the
    first one on.

    Empty where it is a single rank, or where the rows that would tell are lost.

    Example:
        >>> from tests.observe.synthetic import simulate
        >>> apart(simulate(world_size=2), 1)
        []
        >>> apart(simulate(world_size=2, is_ddp=False, has_calls=False), 1)
        [0, 1]
    """
    spans, calls = recording.rows("span"), recording.rows("call")
    spans = select(spans, (spans["cell"] == cell) & (spans["kind"] == _OPTIMIZER) & (spans["thread"] == 0))
    found = [
        rank
        for rank in np.unique(spans["rank"]).tolist()
        if rank not in recording.dropped
        and _sends_nothing(
            select(calls, calls["rank"] == rank), cell, int(spans["start_ns"][spans["rank"] == rank].min())
        )
        and _steps_again(select(spans, spans["rank"] == rank))
    ]
    return found if len(found) > 1 else []


def _steps_again(spans: Rows) -> bool:
    return bool((np.unique(spans["name"], return_counts=True)[1] > 1).any())


def _sends_nothing(calls: Rows, cell: int, since_ns: int) -> bool:
    """Whether a rank is known to have made no call from then on in a cell whose first optimizer step began then."""
    if (calls["issue_ns"][calls["cell"] == cell] > since_ns).any():
        return False
    calls = select(calls, calls["call"] > 0)  # else the bucket of a comm hook, which has no number
    # The oldest rows go first: if the oldest that is kept is later, those of this cell may be gone.
    return not len(calls) or bool(calls["call"].min() == 1 or calls["issue_ns"].min() < since_ns)
