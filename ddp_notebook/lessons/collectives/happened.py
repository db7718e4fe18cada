"""What happened when one rank called a collective wrongly."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_notebook.lessons.collectives.theory import Values
from ddp_notebook.records.words import group_by_value, list_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """What happened when one rank called a collective wrongly.

    Args:
        kind: of `theory.WRONG`.
        rank: the one that was wrong.
        code: the call on that rank and on the others.
        error: the name of the error; "": none.
        message: of the error.
        by_rank: the last thing that each rank did, in words.
        values: what the ranks have, if there was no error.
        seconds: until the ranks were free again.
    """

    kind: str
    rank: int
    code: str
    error: str
    message: str
    by_rank: dict[int, str]
    values: Values
    seconds: float

    def __repr__(self) -> str:
        outcome = f"{self.error}: {self.message}" if self.error else f"nobody noticed: {_words(self.values)}"
        return f"wrong {self.kind} on rank {self.rank}, after {self.seconds:.1f} s: {outcome}"


def _words(values: Values) -> str:
    by_words = group_by_value({rank: str(one.tolist()) for rank, one in values.items()})
    return "; ".join(f"{list_ranks(ranks)}: {words}" for words, ranks in by_words.items())
