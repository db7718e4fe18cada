"""Messages for `%ddp_whos`. Their reply is `Checked`.

notebook -> rank
----------------
ListVariables   name, type, shape and bytes of each variable, now, while a cell may run
ReadVariables   the same, and digests of the contents, between two cells
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_notebook.messages.encoding import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ListVariables(Message):
    """Request `Checked` with "rows", a dict of each variable, and "memory" of the rank, see `rank.whos.rows`.

    Args:
        pattern: shell pattern of the names, such as "loss*"; "": all variables that hold data.
    """

    request: int
    pattern: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadVariables(Message):
    """Request the reply to `ListVariables`, with "digest" and "sampled" in each row.

    Args:
        pattern: see `ListVariables`.
        exact: read every byte. Otherwise large tensors are sampled.
    """

    request: int
    pattern: str = ""
    exact: bool = False
