"""Messages for a training loop that continues after the death of a rank (`ddp_notebook.survive`).

notebook -> rank                                    rank -> notebook
----------------                                    ----------------
Resume  the group is complete: repeat this step     Survives  the rank entered or left such a loop
Save    save the state of the loop and end it       Stalls    the rank waits until all ranks are available
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_notebook.messages.encoding import Message
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401


@dataclass(frozen=True, slots=True, kw_only=True)
class Survives(Message):
    """This rank has started the first step of such a loop, or has left the loop."""

    cell: int
    line: int  # line of the cell's statement with the loop; 0: the rank has left it
    loop: int = 0  # number of the loop within that statement
    shrinks: bool = False  # continue with fewer ranks instead of replacing dead ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls(Message):
    """This rank waits until all ranks are available again."""

    cell: int
    step: int  # last step that all ranks have started, as far as this rank knows; -1 if none
    holds: bool  # True if it holds the copy of the previous rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(Message):
    """Repeat this step on all ranks, whose number may be smaller. A new rank gets this message before its cell."""

    step: int
    source: int  # rank whose parameters and optimizers have the state from before the step
    newcomers: list[int]  # new ranks; each gets its own state from the next rank, which holds a copy
    line: int  # line at which the cell of the new ranks starts
    loop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Save(Message):
    """Save the state of the loop before the next step that all ranks agree on, and end the loop."""

    folder: str
