"""Messages about what a script of torchrun's waits in, which is cut because somebody asks for it.

notebook -> rank                        rank -> notebook
----------------                        ----------------
Cut  raise where you wait in this       WasCut  what was cut
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_notebook.messages.encoding import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(Message):
    """Cut this operation if the rank still waits in it: what is under way when this arrives may be another one."""

    request: int
    name: str = ""  # of the operation; "": the forming of a group
    group: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WasCut(Message):
    """It was, and the rank does not wait there any more."""

    request: int
    what: str  # in words; "": the rank had gone on by itself
