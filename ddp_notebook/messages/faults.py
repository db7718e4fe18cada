"""A message that makes something go wrong on a rank. Its answer is `Pushed`.

notebook -> rank
----------------
Fault  let this happen
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_notebook.messages.encoding import Message

KINDS = ("kill", "hang", "slow", "raise")
OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(Message):
    """Let this rank fail in the cell that runs, or in the next one."""

    request: int
    kind: str  # one of `KINDS`; `OFF`: forget those that were asked for
    after_s: float = 0.0  # into the cell
    by_s: float = 0.0  # "slow": what each step takes longer
