"""Samples that DataLoaders gave in two training runs. They are compared by the indices of the sampler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.compare.names import renumbered
from ddp_notebook.observe.compare.sides import Side
from ddp_notebook.observe.nan.gradient_inputs import samples_in_words
from ddp_notebook.records.schema import Rows
from ddp_notebook.records.words import list_ranks

_FIELDS = ["count", "first", "last", "stride"]
_MOST_BATCHES = 1 << 22  # limit of batches for one rank and loader, so that a key has 64 bits
_MOST_LOADERS = 1 << 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Comparison of the loaded samples. The k-th batch of a rank and loader is compared with the k-th one."""

    compared: int  # number of batches that both runs have
    step: int | None  # step of the first batch with other samples in A; None: none differs
    loader: str
    ranks: tuple[int, ...]  # ranks whose batches differ in that step
    before: str  # samples of the first of these ranks in A, as words
    after: str

    @property
    def is_found(self) -> bool:
        return self.step is not None

    @property
    def sentence(self) -> str:
        """Return the comparison as one sentence, without its full stop."""
        if self.step is not None:
            return (
                f"The samples of {self.loader} differ from step {self.step:,} on, on {list_ranks(self.ranks)}: "
                f"{self.before} in A and {self.after} in B on rank {self.ranks[0]}"
            )
        if self.compared:
            return f"All loaded samples are equal by their indices: {self.compared:,} batches"
        return (
            "No input was compared: no batch of a DataLoader has recorded indices in both runs. To compare batches, "
            "record a number of them, such as log(batch=x.sum())"
        )


def samples(a: Side, b: Side) -> Samples:
    """Compare the indices of the batches of two runs."""
    first, second = (side.rows.rows("indices") for side in (a, b))
    codes: dict[str, int] = {}
    keys, others = _keys(a, first, codes), _keys(b, second, codes)
    _, at, to = np.intersect1d(keys, others, return_indices=True)
    rows, same = first[at], second[to]
    differs = np.zeros(len(at), bool)
    for name in _FIELDS:
        differs |= rows[name] != same[name]
    if not differs.any():
        return Samples(compared=len(at), step=None, loader="", ranks=(), before="", after="")
    step = int(rows["step"][differs].min())
    here = np.flatnonzero(differs & (rows["step"] == step))
    here = here[np.lexsort((rows["time_ns"][here], rows["rank"][here]))]
    loader = next(name for name, code in codes.items() if code == keys[at[here[0]]] >> 36)
    return Samples(
        compared=len(at),
        step=step,
        loader=loader,
        ranks=tuple(int(rank) for rank in np.unique(rows["rank"][here])),
        before=samples_in_words(*rows[_FIELDS][here[0]].tolist()),
        after=samples_in_words(*same[_FIELDS][here[0]].tolist()),
    )


def _keys(side: Side, rows: Rows, codes: dict[str, int]) -> npt.NDArray[np.int64]:
    """Return a key of each batch, equal in both runs: loader, rank, and number of the batch."""
    names = renumbered(side.rows.text(number) for number in np.unique(rows["name"]).tolist())
    code = np.zeros(len(rows), np.int64)
    for number in np.unique(rows["name"]).tolist():
        name = names[side.rows.text(number)]
        code[rows["name"] == number] = min(codes.setdefault(name, len(codes)), _MOST_LOADERS)
    group = code << 36 | rows["rank"].astype(np.int64) << 22
    order = np.lexsort((rows["time_ns"], group))
    ordered = group[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if len(rows) else np.zeros(0, np.int64)
    counts = np.diff(np.append(begins, len(rows)))
    keys = np.empty(len(rows), np.int64)
    keys[order] = ordered + np.minimum(np.arange(len(rows)) - np.repeat(begins, counts), _MOST_BATCHES - 1)
    return keys
