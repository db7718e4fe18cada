"""Phases of a rank in which its main thread runs code of this package, and no code of the user.

The rank runs each phase inside the function of that name in `rank.cell.internal_phases`. So the phase can also be read
from the stack of a rank that does not answer.
"""

from __future__ import annotations

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import re

CLEAN_UP = "cleaning up after the cell"
PHASES = {  # function in `rank.cell.internal_phases` -> activity, as text that follows "rank 3: "
    "start_cell": "preparing the cell",
    "clean_up": CLEAN_UP,
    "send_output": "sending its output",
    "answer_request": "answering a request of the notebook",
}
WORDS = frozenset(PHASES.values())
_IN_PHASE = re.compile(rf'rank/cell/internal_phases\.py", line \d+ in ({"|".join(PHASES)})\b')


def phase_in(stack: str) -> str:
    """Return the phase that a `faulthandler` stack of one thread shows, innermost first; "" if none.

    Example:
        >>> phase_in('  File "/ddp_notebook/rank/cell/internal_phases.py", line 30 in clean_up')
        'cleaning up after the cell'
    """
    found = _IN_PHASE.search(stack)
    return PHASES[found[1]] if found else ""
