"""Messages for `%%ddp_twice`, which runs a cell twice from the same state.

notebook -> rank
----------------
TakeSnapshot   copy the variables and the random state, or return why that is not possible
PutBack        restore them, and return the comparison of the observed tensors
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_notebook.messages.encoding import Message
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot(Message):
    """Request `Checked` about the state: "nbytes", "left" (names and reasons), "refused" (names that the cell reads).

    With `copies`, the rank also takes the snapshot, and observes the cells that follow.
    """

    request: int
    code: str
    copies: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PutBack(Message):
    """Request `Checked` after the state was restored, or with the first difference of the two runs.

    Args:
        restores: restore the state of the snapshot.
        ends: drop the snapshot, and stop observing.
    """

    request: int
    restores: bool
    ends: bool
