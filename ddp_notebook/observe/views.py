"""The plain data that questions to a recording are answered with.

All times are nanoseconds of the notebook's monotonic clock: those of the ranks have been corrected by the offset of
their clocks, which may be off by `Recording.clock_error_ns(rank)`. Durations are nanoseconds too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_notebook.records.meaning import meaning
from ddp_notebook.records.names import readable
from ddp_notebook.records.schema import STEP_UNITS
from ddp_notebook.records.words import list_ranks

WARM_UP = 2  # steps at the start of a cell that are not typical: lazy initialisation, and DDP orders its buckets anew


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What was in the tensors of one side of a collective."""

    numel: int
    looked_at: int  # of these elements; fewer than `numel` in large tensors, evenly spread
    low: float  # minimum, of the modulus if complex; NaN if empty
    high: float
    mean: float
    nans: int
    infs: int
    first: npt.NDArray[np.generic]  # (up to 32,) the first elements

    @property
    def is_sample(self) -> bool:
        return self.looked_at < self.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective, send or receive on one rank."""

    rank: int
    call: int  # the rank's own count
    op: str  # "all_reduce"
    api: str  # what the user's code has called: "all_gather_object", "backward"
    group: str  # "default", or how torch or the user describes it
    group_name: str  # torch's own name for it, the same on all ranks
    ranks: tuple[int, ...]  # of the group
    number: int  # in its group, from 1
    reduce_op: str
    peer: int | None  # the root, the source or the destination, as a rank of the session
    tag: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    nbytes_in: int
    nbytes_out: int
    origin: str  # "user", "ddp", "fsdp", ...
    site: str  # "cell line 7"
    module: str  # the model in DDP; the module in FSDP, DTensor and tensor parallel: "blocks.0", "(root)"; what a
    # message of a pipeline carries: "activations of microbatch 3 for stage 2"
    bucket: int | None
    cell: int
    step: int
    issue_ns: int
    start_ns: int
    end_ns: int | None  # None: not known to have ended
    blocked_ns: int  # how long its caller waited for it
    state: str
    is_async: bool
    left_out: bool  # its values, as those of most steps of a fast training: `%ddp_record all` keeps them
    input: Preview | None
    output: Preview | None

    @property
    def is_point_to_point(self) -> bool:
        return self.op in ("send", "recv")

    @property
    def meaning(self) -> str:
        """What a parallel library of torch's has called it for: "gather of parameters"; "" of the user's own calls."""
        return meaning(self.origin, self.op)

    @property
    def nbytes(self) -> int:
        """The larger side: what a message size means in nccl-tests."""
        return max(self.nbytes_in, self.nbytes_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradient of one parameter in one backward on one rank."""

    rank: int
    backward: int  # the rank's own count of spans
    cell: int | None  # None: the span of that backward is not known
    step: int | None
    parameter: str
    local: Preview | None  # before it was synchronised
    synchronised: Preview | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """One bucket of a DDP model."""

    nbytes: int
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How DDP has put a model's parameters into buckets, from `time_ns` on."""

    rank: int
    time_ns: int
    model: str
    buckets: tuple[BucketLayout, ...]  # in the order of their synchronisation
    is_rebuilt: bool  # after the first step, in the order in which gradients became ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric: what each rank has logged under one name."""

    name: str
    ranks: npt.NDArray[np.int32]  # (n,)
    steps: npt.NDArray[np.int64]  # (n,)
    values: npt.NDArray[np.float64]  # (n,)
    times_ns: npt.NDArray[np.int64]  # (n,)
    cells: npt.NDArray[np.uint32]  # (n,)
    is_given: npt.NDArray[np.bool]  # (n,) whether the program gave the step, as in log(loss=..., step=...)
    units: npt.NDArray[np.uint8]  # (n,) what the steps count, indexes of `records.STEP_UNITS`

    def __repr__(self) -> str:
        ranks, count = np.unique(self.ranks).tolist(), len(self.values)
        of_rank = f"of_rank({ranks[0]}) returns steps and values, " if ranks else ""
        of_ranks = f" of {list_ranks(ranks)}" if ranks else ""
        return (
            f"<Metric {readable(self.name)}: {count:,} value{'s' * (count != 1)}{of_ranks}; {of_rank}"
            "to_pandas('metric') a table>"
        )

    def of_rank(self, rank: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The steps and values of one rank."""
        mine = self.ranks == rank
        return self.steps[mine], self.values[mine]

    def unit_of(self, cell: int | None = None) -> str:
        """What its steps count in a cell, or in all of them: "step"; "value" if values were counted; "optimizer step"
        if each step of several optimizers counts."""
        units = self.units if cell is None else self.units[self.cells == cell]
        return STEP_UNITS[int(units.max(initial=0))]

    @property
    def is_continued(self) -> bool:
        """Return whether its cells are one run."""
        return len(self.runs) <= 1

    @property
    def runs(self) -> list[list[int]]:
        """The cells of each run, the oldest first. A run is one cell, or several whose program gave steps that go on
        from one cell to the next. Steps that were counted begin at 0 in each cell."""
        order = np.argsort(self.cells, kind="stable")
        cells, steps = self.cells[order], self.steps[order]
        begins = np.flatnonzero(np.diff(cells.astype(np.int64), prepend=-1))
        if not len(begins):
            return []
        is_given = np.logical_and.reduceat(self.is_given[order], begins)
        firsts, lasts = np.minimum.reduceat(steps, begins), np.maximum.reduceat(steps, begins)
        goes_on = np.zeros(len(begins), bool)
        goes_on[1:] = is_given[1:] & is_given[:-1] & (firsts[1:] > lasts[:-1])
        found: list[list[int]] = []
        for cell, is_continued in zip(cells[begins].tolist(), goes_on.tolist(), strict=True):
            if is_continued:
                found[-1].append(cell)
            else:
                found.append([cell])
        return found


def main_metric(names: Iterable[str]) -> str:
    """The one that looks like a loss, or else the first."""
    names = list(names)
    return next((one for one in names if "loss" in one.lower()), names[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One collective of a group, on all its ranks: when each arrived, and how long the others waited."""

    group: str
    group_name: str
    number: int
    op: str
    nbytes: int
    cell: int
    origin: str
    ranks: tuple[int, ...]  # whose calls were recorded
    arrived_ns: npt.NDArray[np.int64]  # (len(ranks),)
    waited_ns: npt.NDArray[np.int64]  # (len(ranks),) for the last one
    transfer_ns: int  # from the arrival of the last one to the end of the slowest
    last: int  # the rank that came last

    @property
    def spread_ns(self) -> int:
        """From the first arrival to the last."""
        return int(self.arrived_ns.max() - self.arrived_ns.min())


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The synchronisation of one bucket of gradients."""

    bucket: int
    nbytes: int
    parameters: tuple[str, ...]
    issue_ns: int
    end_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step on one rank: what its time went into.

    Input, compute, exposed, waiting, optimizer and rest add up to its duration. `compute` is forward, backward and the
    execution of remote calls, without what is counted elsewhere; `exposed` is communication that the rank waited for
    while data moved; `waiting` is the time that it waited for slower ranks and for answers of remote calls.
    """

    rank: int
    cell: int
    step: int  # from 0 in its cell
    start_ns: int
    end_ns: int
    samples: int | None
    input_ns: int
    workers_ns: int  # part of input_ns: start and shutdown of a loader's workers
    forward_ns: int  # as spans; contains what is exposed or waited for inside
    backward_ns: int
    optimizer_ns: int
    compute_ns: int
    communication_ns: int  # during which any collective was under way
    overlapped_ns: int  # part of communication_ns that overlaps compute
    exposed_ns: int
    waiting_ns: int
    answers_ns: int  # part of waiting_ns: waits for answers of remote calls
    rest_ns: int
    buckets: tuple[Bucket, ...]

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


def settled(steps: Sequence[Step]) -> list[Step]:
    """The steps after the warm-up of their cells; all of them where none is later."""
    return [step for step in steps if step.step >= WARM_UP] or list(steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What one stage of a pipeline did with one microbatch, or would do."""

    rank: int
    stage: int
    microbatch: int
    kind: str  # "forward", "backward", "input gradient" or "weight gradient"
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Pipeline:
    """One `step` of a pipeline's schedule on all its ranks.

    `ideal` has the same actions in the same order on each rank, each as long as the median of its stage and kind, and
    each begun as soon as what it needs is computed: what is left of the bubble then is the schedule's.
    """

    schedule: str  # "Schedule1F1B"; with its ranks, where these are not all
    cell: int
    step: int  # of the schedule, from 0 in its cell
    ranks: tuple[int, ...]
    stages: int
    microbatches: int
    actions: tuple[Action, ...]  # measured, by their start
    ideal: tuple[Action, ...]  # begins at 0
    even_bubble: float  # of the order alone: each forward takes a unit of time, and each backward two

    @property
    def span_ns(self) -> int:
        """From the start of the first action to the end of the last."""
        return _span_ns(self.actions)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in it that no action fills, 0 to 1."""
        return bubble_of(self.actions, len(self.ranks))

    @property
    def ideal_span_ns(self) -> int:
        """The same of `ideal`."""
        return _span_ns(self.ideal)

    @property
    def ideal_bubble(self) -> float:
        """The same of `ideal`: what the schedule leaves empty if messages take no time."""
        return bubble_of(self.ideal, len(self.ranks))

    def __repr__(self) -> str:
        size = f"{self.stages} stages on {len(self.ranks)} ranks, {self.microbatches} microbatches"
        return f"<Pipeline {self.schedule}: {size}, bubble {self.bubble:.2f}, ideal {self.ideal_bubble:.2f}>"


def _span_ns(actions: Sequence[Action]) -> int:
    return max(one.end_ns for one in actions) - min(one.start_ns for one in actions) if actions else 0


def bubble_of(actions: Sequence[Action], ranks: int) -> float:
    """The share of the time of so many ranks that no action fills, 0 to 1."""
    whole = _span_ns(actions) * ranks
    return 1 - sum(one.end_ns - one.start_ns for one in actions) / whole if whole else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that the others wait for."""

    rank: int
    share: float  # of the steps looked at in which it was the last, 0 to 1
    lost_ns: int  # time per step that the others waited for it: mean over them, and over the steps in the run's mean
    phase: str  # where it loses the time: "input", "forward", "backward", "optimizer" or "between"
    own_ns: int  # its time in that phase, median
    theirs_ns: int  # the others' time in it, median
    factor: float  # of these two
    steps: int  # that were looked at
    evidence: str  # a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Bytes per second of one operation at one size."""

    op: str
    group: str
    world_size: int
    nbytes: int
    count: int
    transfer_ns: int  # median
    algorithm_gb_s: float  # 1e9 bytes: size / time
    bus_gb_s: float  # corrected by the operation's factor, so that it compares with the hardware's
