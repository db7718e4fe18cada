"""Messages that abort the operation in which a torchrun script waits, at the user's request.

notebook -> rank                             rank -> notebook
----------------                             ----------------
Cut  raise an error where this call waits    WasCut  the aborted operation
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_notebook.messages.encoding import Message
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(Message):
    """Abort this operation if the rank still waits in it. The rank may be in another operation when this arrives."""

    request: int
    name: str = ""  # name of the operation; "" for the forming of a group
    group: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WasCut(Message):
    """Reply to `Cut`: the rank no longer waits in the operation."""

    request: int
    what: str  # description of the aborted operation; "" if the rank had already continued
