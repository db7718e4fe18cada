"""Message for sets of ranks by the dimension names of meshes: `--ranks tp=1`. Its reply is `Checked`.

notebook -> rank
----------------
ListMeshes   coordinates of the rank in the meshes of its variables
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_notebook.messages.encoding import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ListMeshes(Message):
    """Request `Checked` with "meshes": the variable, the names of the dimensions, and the coordinates of the rank.

    A rank answers at any time, also while a cell runs.
    """

    request: int
