"""Calls of a recording as a sequence: arrays for computation, objects for inspection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.tables import frames
from ddp_notebook.observe.tables.meanings import name_of, preview_of
from ddp_notebook.observe.tables.store import keys_of
from ddp_notebook.observe.views import Collective, Preview
from ddp_notebook.records.schema import CALL, ORIGINS, REDUCE_OPS, STATES, Rows
from ddp_notebook.records.words import name_ranks

if TYPE_CHECKING:
    from ddp_notebook.observe.tables.recorded import RecordedTables

_AT_ONCE = 4096  # rows that are converted to objects at a time
_OPS_SHOWN = 4


class Collectives(Sequence[Collective]):
    """Snapshot of the collectives, sends and receives that a query has selected.

    Items are created on access. `rows` has the same data as a structured array, with times of the notebook's clock.

    Args:
        recording: the recording with these rows.
        rows: (n,) of `records.CALL`.
    """

    def __init__(self, recording: RecordedTables, rows: Rows) -> None:
        self.rows = rows
        self._recording = recording
        self._values: tuple[npt.NDArray[Any], npt.NDArray[np.intp], int] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: int) -> Collective: ...

    @overload
    def __getitem__(self, at: slice) -> Collectives: ...

    def __getitem__(self, at: int | slice) -> Collective | Collectives:
        if isinstance(at, slice):
            return Collectives(self._recording, self.rows[at])
        if not -len(self.rows) <= at < len(self.rows):
            raise IndexError(f"call {at} does not exist; the number of calls is {len(self.rows)}")
        return self._view(self.rows[at].item())

    def __iter__(self) -> Iterator[Collective]:
        for at in range(0, len(self.rows), _AT_ONCE):
            yield from map(self._view, self.rows[at : at + _AT_ONCE].tolist())

    def __repr__(self) -> str:
        if not len(self.rows):
            return "<Collectives: none>"
        numbers, counts = np.unique(self.rows["op"], return_counts=True)
        counted = Counter({self._recording.text(int(op)): int(n) for op, n in zip(numbers, counts, strict=True)})
        parts = [f"{count} {op}" for op, count in counted.most_common(_OPS_SHOWN)]
        if more := sum(counted.values()) - sum(count for _, count in counted.most_common(_OPS_SHOWN)):
            parts.append(f"{more} others")
        ranks = name_ranks(np.unique(self.rows["rank"]).tolist())
        left_out = int(np.count_nonzero(self.rows["left_out"]))
        note = f"; values of {left_out} left out" if left_out else ""
        return f"<Collectives: {len(self.rows)} calls of {ranks}: {', '.join(parts)}{note}>"

    def to_pandas(self) -> Any:
        """Return a DataFrame with a row for each call.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        return frames.to_pandas(self._recording, "call", self.rows)

    def _view(self, row: tuple[Any, ...]) -> Collective:
        of = dict(zip(CALL.names or (), row, strict=True))
        recording = self._recording
        group = recording.group_of(of["group"])
        return Collective(
            rank=of["rank"],
            call=of["call"],
            op=recording.text(of["op"]),
            api=recording.text(of["api"]),
            group=group["title"],
            group_name=group["name"],
            ranks=tuple(group["ranks"]),
            number=of["number"],
            reduce_op=name_of(REDUCE_OPS, of["reduce_op"]),
            peer=_or_none(of["peer"]),
            tag=of["tag"],
            dtype=recording.text(of["dtype"]),
            shapes=recording._shapes_of(of["shapes"]),
            nbytes_in=of["nbytes_in"],
            nbytes_out=of["nbytes_out"],
            origin=name_of(ORIGINS, of["origin"]),
            site=recording.text(of["site"]),
            module=recording.text(of["module"]),
            bucket=_or_none(of["bucket"]),
            cell=of["cell"],
            step=of["step"],
            issue_ns=of["issue_ns"],
            start_ns=of["start_ns"] if of["start_ns"] >= 0 else of["issue_ns"],
            end_ns=_or_none(of["end_ns"]),
            blocked_ns=of["blocked_ns"],
            state=name_of(STATES, of["state"]),
            is_async=of["is_async"],
            left_out=of["left_out"],
            input=self._preview(of["rank"], of["call"], 0),
            output=self._preview(of["rank"], of["call"], 1),
        )

    def _preview(self, rank: int, call: int, side: int) -> Preview | None:
        if self._values is None:  # sorted once for all items of this sequence: 60 ms for half a million
            keys, end, _ = self._recording.store.value_keys.since(0)
            order = np.argsort(keys, kind="stable")
            self._values = keys[order], order, end - len(keys)
        sorted_keys, rows, first = self._values
        key = keys_of(rank, call, side)
        at = int(np.searchsorted(sorted_keys, key, side="right")) - 1
        if at < 0 or sorted_keys[at] != key:
            return None
        row = self._recording.store.rings["value"].row(first + int(rows[at]))
        return None if row is None else preview_of(row, self._recording.text)


def _or_none(number: int) -> int | None:
    return number if number >= 0 else None
