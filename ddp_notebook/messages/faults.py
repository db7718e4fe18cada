"""Fault injection: a message that makes a rank fail. Its reply is `Pushed`.

notebook -> rank
----------------
Fault  inject this fault
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_notebook.messages.encoding import Message
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

KINDS = ("kill", "hang", "slow", "raise")
OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(Message):
    """Inject a fault into the running cell of this rank, or into the next cell."""

    request: int
    kind: str  # one of `KINDS`, or `OFF` to cancel pending faults
    after_s: float = 0.0  # seconds after the start of the cell
    by_s: float = 0.0  # "slow": seconds by which each step is delayed
