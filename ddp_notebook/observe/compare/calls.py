"""Changes of collectives between two training runs: number, bytes and time, by the line that calls them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.compare.names import group_title
from ddp_notebook.observe.compare.sides import Side, block_of, variation
from ddp_notebook.observe.tables.distinct import distinct
from ddp_notebook.observe.tables.matching import match_collectives
from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.records.meaning import meaning
from ddp_notebook.records.schema import ORIGINS, Rows
from ddp_notebook.records.units import at_most_three_figures, ms, size

_LEAST_SHARE = 0.05  # smallest relative change of calls or bytes that counts
_SLOWER = 0.2  # relative change of a transfer
_LEAST_NS = 100_000.0
_TRANSFER_STEPS = 100  # transfers of at least this number of steps are enough for medians
_FEWEST = 8  # transfers of one size, for a comparison
_COLUMNS = ("op", "origin", "group", "site")
Key = tuple[str, str, str, str]  # operation, origin, group, line
Transfers = dict[tuple[str, str, int], tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallChange:
    """Collectives of one line: calls and bytes of a rank in a step, or the time of a transfer of one size."""

    op: str
    group: str
    site: str  # "cell line 7"; "" if the code of a library calls it
    kind: str  # "calls", "bytes" or "transfer"
    before: float  # number, bytes or nanoseconds
    after: float
    nbytes: int = 0  # size of a transfer
    other_site: str = ""  # line in the second run, if it is another one

    def __str__(self) -> str:
        where = f" at {self.site}" if self.site else ""
        where += f" ({self.other_site} in B)" if self.other_site else ""
        whose = "" if self.group == "default" else f" of group {self.group}"
        name = f"{self.op}{whose}{where}"
        if self.kind == "transfer":
            return f"{name}: {size(self.nbytes)} takes {ms(self.after)} instead of {ms(self.before)}"
        unit = (lambda value: size(value)) if self.kind == "bytes" else at_most_three_figures
        word = "" if self.kind == "bytes" else f" call{'s' * (self.after != 1)}"
        return f"{name}: {unit(self.after)}{word} instead of {unit(self.before)} of a rank in a step"


@dataclass(slots=True)
class _Line:
    """Calls of one line in the steps of a run, per rank and step."""

    calls: float
    nbytes: float
    calls_vary: float
    nbytes_vary: float


def calls(a: Side, b: Side) -> tuple[CallChange, ...]:
    """Return the changes of collectives in the steps of two runs: those of calls and bytes, then slower transfers."""
    found: list[CallChange] = []
    if a.is_thin or b.is_thin:
        return ()
    in_a, in_b = _in_steps(a), _in_steps(b)
    first, second = _lines(a, *in_a), _lines(b, *in_b)
    least = 1 / len(np.unique(a.kept.number)) + 1 / len(
        np.unique(b.kept.number)
    )  # a single additional call in a run does not count
    nothing = _Line(0.0, 0.0, 0.0, 0.0)
    for one, other in _pairs(list(first), list(second)):
        before, after = first.get(one, nothing) if one else nothing, second.get(other, nothing) if other else nothing
        op, origin, group, site = one or other or ("", "", "", "")
        words = meaning(origin, op)
        moved = other[3] if one and other and one[3] != other[3] else ""
        name = f"{op} ({words})" if words else op
        noise = least + before.calls_vary + after.calls_vary
        if _differs(before.calls, after.calls, noise):
            found.append(
                CallChange(
                    op=name,
                    group=group,
                    site=site,
                    kind="calls",
                    before=before.calls,
                    after=after.calls,
                    other_site=moved,
                )
            )
        noise = before.nbytes_vary + after.nbytes_vary + least * max(before.nbytes, after.nbytes)
        if _differs(before.nbytes, after.nbytes, noise):
            found.append(
                CallChange(
                    op=name,
                    group=group,
                    site=site,
                    kind="bytes",
                    before=before.nbytes,
                    after=after.nbytes,
                    other_site=moved,
                )
            )
    return (*found, *_transfers(_transfers_of(a, *in_a), _transfers_of(b, *in_b)))


def _differs(before: float, after: float, noise: float) -> bool:
    return abs(after - before) > max(noise, _LEAST_SHARE * max(before, after))


def _pairs(first: list[Key], second: list[Key]) -> list[tuple[Key | None, Key | None]]:
    """Pair the lines of two runs: equal ones, then those of the same operation in their order, since code may move."""
    both: list[tuple[Key | None, Key | None]] = [(key, key) for key in first if key in second]
    left = [[key for key in keys if key not in others] for keys, others in ((first, second), (second, first))]
    waiting = defaultdict(list)
    for key in left[1]:
        waiting[key[:3]].append(key)
    for key in left[0]:
        same = waiting[key[:3]]
        both.append((key, same.pop(0) if same else None))
    return [*both, *((None, key) for keys in waiting.values() for key in keys)]


def _in_steps(side: Side) -> tuple[Rows, npt.NDArray[np.int64]]:
    """Return the calls of the steps in the mean of the run, and the position of the step of each."""
    rows, numbers = side.rows.rows("call"), np.unique(side.kept.number)
    step = rows["step"].astype(np.int64)
    at = np.minimum(np.searchsorted(numbers, step), len(numbers) - 1)
    inside = (numbers[at] == step) & np.isin(rows["rank"], side.kept.ranks)
    return select(rows, inside), at[inside]


def _lines(side: Side, rows: Rows, step: npt.NDArray[np.int64]) -> dict[Key, _Line]:
    if not len(rows):
        return {}
    numbers = np.unique(side.kept.number)
    block, count = block_of(numbers)
    first, of = distinct(*(rows[column] for column in _COLUMNS))
    ranks = np.bincount(of[distinct(of, rows["rank"])[0]])
    steps = np.bincount(block, minlength=count)
    at = of * count + block[step]
    sizes = np.maximum(rows["nbytes_in"], rows["nbytes_out"])
    found = {}
    by_block = [
        np.bincount(at, weights, len(first) * count).reshape(-1, count) / ranks[:, None] for weights in (None, sizes)
    ]
    varies = [variation(sums / steps) for sums in by_block]
    order = np.argsort(first, kind="stable")
    for number in order.tolist():
        row = rows[first[number]]
        key = (
            side.rows.text(int(row["op"])),
            ORIGINS[int(row["origin"])],
            group_title(side.rows, int(row["group"])),
            side.rows.text(int(row["site"])),
        )
        found[key] = _Line(
            *(float(sums[number].sum() / len(numbers)) for sums in by_block),
            *(float(varied[number]) for varied in varies),
        )
    return found


def _transfers(first: Transfers, second: Transfers) -> list[CallChange]:
    """Return the collectives that transfer the same number of bytes in another time, from the last arrival on."""
    found = []
    for key in first.keys() & second.keys():
        (before, before_varies), (after, after_varies) = first[key], second[key]
        least = max(_SLOWER * min(before, after), _LEAST_NS)
        if abs(after - before) > least + before_varies + after_varies:
            op, group, nbytes = key
            found.append(
                CallChange(op=op, group=group, site="", kind="transfer", before=before, after=after, nbytes=nbytes)
            )
    return sorted(found, key=lambda one: -abs(one.after - one.before))


def _transfers_of(side: Side, rows: Rows, step: npt.NDArray[np.int64]) -> Transfers:
    """Return the median transfer time and its variation, by operation, group and size."""
    count = len(np.unique(side.kept.number))
    rows = select(rows, step % max(1, count // _TRANSFER_STEPS) == 0)
    matched = match_collectives(side.rows, rows)
    if not len(matched):
        return {}
    last = rows[matched.index[matched.last]]
    sizes = np.maximum(rows["nbytes_in"], rows["nbytes_out"])[matched.index]
    nbytes = np.maximum.reduceat(sizes, matched.first[:-1])
    lasted = matched.ended_ns - matched.all_arrived_ns
    found = {}
    packed = (last["op"].astype(np.int64) << 20 | last["group"]) * (int(nbytes.max()) + 1) + nbytes
    for key in np.unique(packed).tolist():
        own = np.flatnonzero(packed == key)
        if len(own) < _FEWEST:
            continue
        row = last[own[0]]
        block, count = block_of(own)
        medians = np.array([float(np.median(lasted[own[block == number]])) for number in range(count)])
        name = side.rows.text(int(row["op"])), group_title(side.rows, int(row["group"])), int(nbytes[own[0]])
        found[name] = float(np.median(lasted[own])), float(variation(medians))
    return found
