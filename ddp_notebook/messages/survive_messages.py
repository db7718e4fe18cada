"""Messages about a cell that goes on when a rank dies in it (`ddp_notebook.survive`).

notebook -> rank                                    rank -> notebook
----------------                                    ----------------
Resume  the group is whole again: redo this step    Survives  I am in such a loop, or not any more
Save    write all to a folder, and end the loop     Stalls    I cannot go on without others, and wait for them
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_notebook.messages.encoding import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Survives(Message):
    """This rank has begun a first step in such a loop, or has left it."""

    cell: int
    line: int  # of the cell's statement that the loop is in; 0: it has left it
    loop: int = 0  # number of the loop among those of that statement
    shrinks: bool = False  # it goes on with fewer ranks, and none is replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls(Message):
    """This rank waits until all are there again."""

    cell: int
    step: int  # the last one that all ranks have begun, as far as it knows; -1: none
    holds: bool  # the copy of the rank before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(Message):
    """All redo this step, of which there may be fewer. To a rank that is new it comes before its cell."""

    step: int
    source: int  # a rank that has parameters and optimizers as they were before the step
    newcomers: list[int]  # each gets what was its own from the rank that follows it
    line: int  # where their cell begins
    loop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Save(Message):
    """Before the next step that all ranks agree on, write the loop's state, and end it."""

    folder: str
