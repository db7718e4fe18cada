"""Recorded gradients of one cell before they were averaged: which were looked at, and which were not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.records.schema import ORIGINS, REDUCE_OPS, SIDES, SPANS
from ddp_notebook.records.words import list_ranks

_INPUT = SIDES.index("input")
_OPTIMIZER, _BACKWARD = SPANS.index("optimizer"), SPANS.index("backward")
_SUMS = [REDUCE_OPS.index(name) for name in ("SUM", "AVG", "PREMUL_SUM")]
_FSDP, _USER = ORIGINS.index("fsdp"), ORIGINS.index("user")
_MOST_NAMES = 4
_MOST_BATCHES = 2
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # an odd number, for hashes
Column = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadGradient:
    """Gradients that one rank passed to an average although some were NaN or infinite."""

    rank: int
    step: int
    bucket: int | None  # bucket of a DDP model; None for FSDP and for calls of the user
    model: str  # variable or class of the DDP model, or the module of FSDP; "" if it is unknown
    parameters: tuple[str, ...]  # parameters of the bucket; () if unknown
    operation: str  # "all_reduce"
    site: str  # "cell line 7"
    nans: int
    infs: int
    looked_at: int  # number of elements that were read
    numel: int

    @property
    def kind(self) -> str:
        return kind_of(self.nans, self.infs)

    @property
    def place(self) -> str:
        """Name of the gradients: bucket with parameters, module, or line."""
        if self.bucket is not None:
            return name_of_bucket(self.model, self.bucket, self.parameters)
        if self.model:
            return f"{self.operation} of {self.model}"
        return f"{self.operation} at {self.site}" if self.site else self.operation


def kind_of(nans: int, infs: int) -> str:
    """Return a word for values that are not finite.

    Example:
        >>> kind_of(3, 0), kind_of(0, 2), kind_of(1, 1)
        ('NaN', 'infinite values', 'NaN and infinite values')
    """
    return " and ".join(["NaN"] * (nans > 0) + ["infinite values"] * (infs > 0))


class GradientInputs:
    """Gradients of one cell before they were averaged, and the steps in which they were recorded.

    Without DDP and FSDP these are the tensors that the user passes to sums.

    Args:
        recording: the recorded tables.
        calls: `calls_of(recording)`.
        cell: number of the cell.
    """

    def __init__(self, recording: RecordedTables, calls: Mapping[str, Column], cell: int) -> None:
        self._recording = recording
        is_of_cell = calls["cell"] == cell
        calls = {name: column[is_of_cell] for name, column in calls.items()}
        self._calls = calls = _chosen(calls, _gradients(recording, calls))
        self._find_values()
        self.is_bad = (self._calls["bad"] > 0) & ~self._are_discarded()
        self.discarded_steps = np.unique(calls["step"][(calls["bad"] > 0) & ~self.is_bad])
        self.looked_at_steps = np.unique(calls["step"][calls["is_read"]])
        self.bad_steps = np.unique(calls["step"][self.is_bad])
        self.clean_steps = np.setdiff1d(self.looked_at_steps, self.bad_steps)

    def _find_values(self) -> None:
        """Add the columns of the recorded values to those of the calls."""
        calls = self._calls
        names = ("rank", "call", "side", "nans", "infs", "looked_at", "numel")
        values = _chosen(found := self._recording.store.rings["value"].columns(names), found["side"] == _INPUT)
        keys, wanted = _keys(values), _keys(calls)
        order = np.argsort(keys, kind="stable")
        at = np.searchsorted(keys, wanted, side="right", sorter=order) - 1
        row = order[np.maximum(at, 0)] if len(order) else np.zeros(len(wanted), np.int64)
        is_there = (at >= 0) & (keys[row] == wanted) if len(order) else np.zeros(len(wanted), bool)
        for name in ("nans", "infs", "looked_at", "numel"):
            calls[name] = np.where(is_there, values[name][row], 0) if len(order) else np.zeros(len(wanted), np.int64)
        calls["bad"] = calls["nans"] + calls["infs"]
        calls["is_read"] = is_there & (calls["looked_at"] > 0)

    def _are_discarded(self) -> npt.NDArray[np.bool_]:
        """Return a mask of bad gradients that a later backward of the same step has replaced by finite ones.

        A program that skips a step does so, for example `GradScaler`.
        """
        calls = self._calls | {"place": _places(self._calls)}
        discarded = np.zeros(len(calls["rank"]), bool)
        read = np.flatnonzero(calls["is_read"] & np.isin(calls["step"], np.unique(calls["step"][calls["bad"] > 0])))
        if len(read):
            same = np.zeros(len(read), np.uint64)
            for name in ("rank", "step", "module", "bucket", "shapes", "place"):
                same = same * _FACTOR + calls[name][read].astype(np.uint64)
            order = np.lexsort((calls["call"][read], same))
            read, same = read[order], same[order]
            ends = np.append(np.flatnonzero(same[1:] != same[:-1]), len(same) - 1)  # last row of each gradient
            last = ends[np.searchsorted(ends, np.arange(len(same)))]
            discarded[read] = (calls["bad"][read] > 0) & (calls["bad"][read[last]] == 0)
        return discarded

    # ---- what was seen

    @property
    def ranks(self) -> list[int]:
        """Ranks that have passed gradients to an average."""
        return [int(rank) for rank in np.unique(self._calls["rank"])]

    @property
    def steps(self) -> int:
        """Number of steps with gradients, recorded or not."""
        return len(np.unique(self._calls["step"]))

    def ranks_of(self, step: int) -> list[int]:
        """Return the ranks with bad gradients in a step."""
        return [int(rank) for rank in np.unique(self._calls["rank"][self.is_bad & (self._calls["step"] == step)])]

    def bad(self, step: int, rank: int) -> list[BadGradient]:
        """Return the bad gradients of a rank in a step, in the order of their averages."""
        calls = self._calls
        found = np.flatnonzero((calls["step"] == step) & (calls["rank"] == rank) & self.is_bad)
        return [self._gradient(at) for at in found[np.argsort(calls["call"][found])].tolist()]

    def finite_before(self, step: int, rank: int) -> int:
        """Return the number of finite gradients that a rank averaged before the first bad one of a step."""
        calls = self._calls
        of_step = (calls["step"] == step) & (calls["rank"] == rank) & calls["is_read"]
        first = calls["call"][of_step & self.is_bad].min()
        return int(np.count_nonzero(of_step & (calls["call"] < first)))

    def looked_at(self) -> str:
        """Describe the recorded gradients.

        Returns:
            Such as "300 gradient buckets in 100 of 100 steps of ranks 0,1 (up to 256 elements of 3,195,904)".
        """
        calls = self._calls
        is_read = calls["is_read"]
        kinds = "gradient buckets" if (calls["bucket"] >= 0).all() else "gradients"
        ranks = list_ranks([int(rank) for rank in np.unique(calls["rank"][is_read])])
        sampled = is_read & (calls["looked_at"] < calls["numel"])
        part = ""
        if sampled.any():
            largest = int(np.argmax(np.where(sampled, calls["numel"], 0)))
            part = f" ({calls['looked_at'][largest]:,} elements of up to {calls['numel'][largest]:,})"
        steps = f"{len(self.looked_at_steps):,} of {self.steps:,} steps"
        return f"{np.count_nonzero(is_read):,} {kinds} in {steps} on {ranks}{part}"

    def _gradient(self, at: int) -> BadGradient:
        one = {name: int(column[at]) for name, column in self._calls.items()}
        text = self._recording.text
        bucket = one["bucket"] if one["bucket"] >= 0 else None
        model = text(one["module"])
        return BadGradient(
            rank=one["rank"],
            step=one["step"],
            bucket=bucket,
            model=model if bucket is None else variable_of_model(self._recording, one["rank"], model),
            parameters=()
            if bucket is None
            else parameters_of_bucket(self._recording, one["rank"], model, bucket, one["numel"]),
            operation=text(one["op"]),
            site=text(one["site"]),
            nans=one["nans"],
            infs=one["infs"],
            looked_at=one["looked_at"],
            numel=one["numel"],
        )


def name_of_bucket(model: str, bucket: int, parameters: Sequence[str]) -> str:
    """Return the name of a bucket with some of its parameters.

    Example:
        >>> name_of_bucket("DDP(Net)", 2, ["c.weight", "c.bias"])
        'bucket 2 of DDP(Net) (c.weight, c.bias)'
    """
    more = len(parameters) - _MOST_NAMES
    names = ", ".join((*parameters[:_MOST_NAMES], *([f"{more} more"] if more > 0 else [])))
    return f"bucket {bucket} of {model}" + f" ({names})" * bool(names)


def parameters_of_bucket(recording: RecordedTables, rank: int, model: str, bucket: int, numel: int) -> tuple[str, ...]:
    """Return the parameters of a bucket: those of the last layout in which it has this number of elements."""
    text = recording.text
    for row in recording.rows("layout")[::-1]:
        if int(row["rank"]) == rank and text(int(row["model"])) == model:
            buckets = recording.store.texts.parsed(int(row["buckets"])) or ()
            if bucket < len(buckets) and buckets[bucket]["nbytes"] in [numel * n for n in (1, 2, 4, 8)]:
                return tuple(buckets[bucket]["parameters"])
    return ()


def variable_of_model(recording: RecordedTables, rank: int, model: str) -> str:
    """Return the variable of a DDP model when its last layout was recorded; its recorded name if it had none."""
    for row in recording.rows("layout")[::-1]:
        if int(row["rank"]) == rank and recording.text(int(row["model"])) == model:
            buckets = recording.store.texts.parsed(int(row["buckets"]))
            return str(buckets[0].get("variable", model)) if buckets else model
    return model


def loaded_samples(recording: RecordedTables, cell: int, rank: int, step: int) -> str:
    """Return the samples that the DataLoaders of a rank gave in a step, as words; "" if they are not known."""
    rows = recording.rows("indices")
    own = rows[(rows["cell"] == cell) & (rows["rank"] == rank) & (rows["step"] == step)]
    found = [samples_in_words(*one) for one in own[["count", "first", "last", "stride"]].tolist()]
    more = f", and {len(found) - _MOST_BATCHES} more batches" if len(found) > _MOST_BATCHES else ""
    return f"rank {rank} loaded {' and '.join(found[:_MOST_BATCHES])}{more} in step {step:,}" if found else ""


def samples_in_words(count: int, first: int, last: int, stride: int) -> str:
    """Format the indices of a batch.

    Example:
        >>> samples_in_words(32, 8704, 8735, 1), samples_in_words(1, 7, 7, 0)
        ('samples 8,704 to 8,735', 'sample 7')
        >>> samples_in_words(32, 1, 63, 2)
        '32 samples from 1 to 63 in steps of 2'
        >>> samples_in_words(32, 9, 4, 0)
        '32 samples with unevenly spaced indices (the first is 9, the last 4)'
        >>> samples_in_words(3, 7, 7, 0)
        '3 samples (the first and the last are 7)'
    """
    if count == 1:
        return f"sample {first:,}"
    if stride == 1:
        return f"samples {first:,} to {last:,}"
    if stride == 0 and first == last:
        return f"{count:,} samples (the first and the last are {first:,})"
    if stride == 0:
        return f"{count:,} samples with unevenly spaced indices (the first is {first:,}, the last {last:,})"
    return f"{count:,} samples from {first:,} to {last:,} in steps of {stride:,}"


def calls_of(recording: RecordedTables) -> dict[str, Column]:
    """Return the columns of the table of calls that describe gradients."""
    names = ("rank", "call", "cell", "step", "bucket", "op", "origin", "reduce_op", "module", "shapes", "site")
    return recording.store.rings["call"].columns(names)


def training_cells(recording: RecordedTables, calls: Mapping[str, Column]) -> list[int]:
    """Return the cells in which optimizers have stepped, gradients were averaged or numbers were logged, in order.

    A cell with backwards and with sums of the user averages gradients, even if it ends before its first optimizer step.

    Args:
        recording: the recorded tables.
        calls: `calls_of(recording)`.
    """
    of_calls = calls["cell"][(calls["bucket"] >= 0) | (calls["origin"] == _FSDP)]
    spans = recording.store.rings["span"].columns(("cell", "kind"))
    metrics = recording.store.rings["metric"].columns(("cell",))["cell"]
    of_user = calls["cell"][(calls["origin"] == _USER) & np.isin(calls["reduce_op"], _SUMS)]
    of_user = np.intersect1d(of_user, spans["cell"][spans["kind"] == _BACKWARD])
    cells = np.concatenate([of_calls, spans["cell"][spans["kind"] == _OPTIMIZER], metrics, of_user])
    return [int(cell) for cell in np.flatnonzero(np.bincount(cells)) if cell not in recording.aside]


def _gradients(recording: RecordedTables, calls: Mapping[str, Column]) -> npt.NDArray[np.bool_]:
    """Return a mask of the calls that average gradients."""
    operations = {int(number): recording.text(int(number)) for number in np.flatnonzero(np.bincount(calls["op"]))}
    reduces = [number for number, name in operations.items() if name.startswith(("all_reduce", "reduce"))]
    is_sum = np.isin(calls["op"], reduces) & np.isin(calls["reduce_op"], _SUMS)
    found: npt.NDArray[np.bool_] = (calls["bucket"] >= 0) | (is_sum & (calls["origin"] == _FSDP))
    return found if found.any() else is_sum & (calls["origin"] == _USER)


def _places(calls: Mapping[str, Column]) -> Column:
    """Return the place of each call of the user among those of its rank and step; 0 for DDP and FSDP.

    Gradients of one shape differ only in their place. In a step with a second backward, places start again after the
    usual number of calls.
    """
    places = np.zeros(len(calls["rank"]), np.int64)
    own = np.flatnonzero((calls["bucket"] < 0) & (calls["origin"] == _USER))
    if len(own):
        own = own[np.lexsort((calls["call"][own], calls["step"][own], calls["rank"][own]))]
        rank, step = calls["rank"][own], calls["step"][own]
        is_first = np.append(True, (rank[1:] != rank[:-1]) | (step[1:] != step[:-1]))
        starts = np.flatnonzero(is_first)
        counts = np.diff(np.append(starts, len(own)))
        places[own] = (np.arange(len(own)) - np.repeat(starts, counts)) % np.argmax(np.bincount(counts))
    return places


def _chosen(columns: Mapping[str, Column], which: npt.NDArray[np.bool_]) -> dict[str, Column]:
    return {name: column[which] for name, column in columns.items()}


def _keys(columns: Mapping[str, Column]) -> npt.NDArray[np.uint64]:
    """Return a number for each call that is unique in the recording."""
    return columns["call"].astype(np.uint64) | (columns["rank"].astype(np.uint64) << np.uint64(44))


def steps_in_words(steps: Sequence[int]) -> str:
    """Format steps.

    Example:
        >>> steps_in_words([4]), steps_in_words([4, 5, 6]), steps_in_words([4, 7])
        ('step 4', 'steps 4 to 6', 'steps 4 and 7')
    """
    if len(steps) == 1:
        return f"step {steps[0]:,}"
    if steps[-1] - steps[0] + 1 == len(steps):
        return f"steps {steps[0]:,} to {steps[-1]:,}" if len(steps) > 2 else f"steps {steps[0]:,} and {steps[1]:,}"
    if len(steps) <= 3:
        return f"steps {', '.join(f'{one:,}' for one in steps[:-1])} and {steps[-1]:,}"
    return f"{len(steps):,} steps from {steps[0]:,} to {steps[-1]:,}"
