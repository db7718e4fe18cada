"""Memory by category, on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from ddp_notebook.records.units import size
from ddp_notebook.records.words import group_by_value, list_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of one rank in bytes: the maximum of each category. The maxima may occur at different times, so the peak
    may be less than their sum.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    activations: int
    temporary: int  # gradients of activations, DDP buckets, parameters that FSDP has gathered
    peak: int  # maximum of the total


_COLUMNS = tuple(field.name for field in fields(RankMemory))
_OF_CODE = ("activations", "temporary")  # measured while code runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a piece of training on each rank. Its `repr` is the table that `%ddp_memory` shows.

    Example:
        >>> session.memory()[0].parameters
        16
    """

    code: str  # the measured code; "": memory in use at that moment
    by_rank: Mapping[int, RankMemory]
    before: Memory | None = None  # the previous measurement

    def __getitem__(self, rank: int) -> RankMemory:
        return self.by_rank[rank]

    def __repr__(self) -> str:
        is_now = not self.code and (self.before is None or not self.before.code)
        shown = [name for name in _COLUMNS if name != "buffers" or any(getattr(one, name) for one in self._all)]
        shown = [name for name in shown if not (is_now and name in _OF_CODE)]
        words = {name: name.replace("_", " ") for name in shown} | ({"peak": "total"} if is_now else {})
        head = ["", *[words[name] for name in shown]]
        rows = [[list_ranks(ranks), *cells] for cells, ranks in self._rows(shown)]
        if self.before is not None:
            rows += [["before, " + list_ranks(ranks), *cells] for cells, ranks in self.before._rows(shown)]
        widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
        lines = [
            "  ".join([first.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]) for first, *cells in [head, *rows]
        ]
        return "\n".join(line.rstrip() for line in lines)

    @property
    def _all(self) -> list[RankMemory]:
        return [*self.by_rank.values(), *(self.before.by_rank.values() if self.before else ())]

    def _rows(self, shown: list[str]) -> list[tuple[tuple[str, ...], list[int]]]:
        unknown = () if self.code else (*_OF_CODE, *(() if "peak" in shown and _OF_CODE[0] not in shown else ("peak",)))
        cells = {
            rank: tuple("" if name in unknown else size(getattr(one, name)) for name in shown)
            for rank, one in self.by_rank.items()
        }
        return list(group_by_value(cells).items())
