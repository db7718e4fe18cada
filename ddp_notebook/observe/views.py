"""Plain data that queries of a recording return.

All times are nanoseconds of the notebook's monotonic clock. Times of ranks are corrected by their clock offsets, with
an error up to `Recording.clock_error_ns(rank)`. Durations are nanoseconds, too.
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

WARM_UP = 2  # first steps of a cell, which are not typical: lazy initialisation, and DDP rebuilds its buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """Contents of the tensors on one side of a collective."""

    numel: int
    looked_at: int  # number of sampled elements; fewer than `numel` in large tensors, evenly spread
    low: float  # minimum, of the absolute value if complex; NaN if empty
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
    call: int  # call count of the rank
    op: str  # "all_reduce"
    api: str  # the function that the user's code has called: "all_gather_object", "backward"
    group: str  # "default", or the description by torch or the user
    group_name: str  # name in torch, equal on all ranks
    ranks: tuple[int, ...]  # members of the group
    number: int  # sequence number in its group, from 1
    reduce_op: str
    peer: int | None  # the root, the source or the destination, as a rank of the session
    tag: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    nbytes_in: int
    nbytes_out: int
    origin: str  # "user", "ddp", "fsdp", ...
    site: str  # "cell line 7"
    # the DDP model; the module for FSDP, DTensor and tensor parallel: "blocks.0", "(root)"; contents of a pipeline
    # message: "activations of microbatch 3 for stage 2"
    module: str
    bucket: int | None
    cell: int
    step: int
    issue_ns: int
    start_ns: int
    end_ns: int | None  # None: no end is known
    blocked_ns: int  # time that the caller was blocked
    state: str
    is_async: bool
    left_out: bool  # its values were left out, as for most steps of fast training; `%ddp_record all` keeps them
    input: Preview | None
    output: Preview | None

    @property
    def is_point_to_point(self) -> bool:
        return self.op in ("send", "recv")

    @property
    def meaning(self) -> str:
        """Return the purpose of a call by a parallel library of torch: "all-gather of parameters"; "" for calls by the
        user.
        """
        return meaning(self.origin, self.op)

    @property
    def nbytes(self) -> int:
        """Return the size of the larger side, the message size as defined by nccl-tests."""
        return max(self.nbytes_in, self.nbytes_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """Gradient of one parameter in one backward pass on one rank."""

    rank: int
    backward: int  # span count of the rank
    cell: int | None  # None: the span of that backward pass is not known
    step: int | None
    parameter: str
    local: Preview | None  # before synchronisation
    synchronised: Preview | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """One bucket of a DDP model."""

    nbytes: int
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Assignment of a DDP model's parameters to buckets, valid from `time_ns` on."""

    rank: int
    time_ns: int
    model: str
    buckets: tuple[BucketLayout, ...]  # in the order of synchronisation
    is_rebuilt: bool  # rebuilt after the first step, in the order in which gradients became ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric: the values that each rank has logged under one name."""

    name: str
    ranks: npt.NDArray[np.int32]  # (n,)
    steps: npt.NDArray[np.int64]  # (n,)
    values: npt.NDArray[np.float64]  # (n,)
    times_ns: npt.NDArray[np.int64]  # (n,)
    cells: npt.NDArray[np.uint32]  # (n,)
    is_given: npt.NDArray[np.bool]  # (n,) whether the program passed the step, as in log(loss=..., step=...)
    units: npt.NDArray[np.uint8]  # (n,) unit of the steps, an index into `records.STEP_UNITS`

    def __repr__(self) -> str:
        ranks, count = np.unique(self.ranks).tolist(), len(self.values)
        of_rank = f"of_rank({ranks[0]}) returns steps and values, " if ranks else ""
        of_ranks = f" of {list_ranks(ranks)}" if ranks else ""
        return (
            f"<Metric {readable(self.name)}: {count:,} value{'s' * (count != 1)}{of_ranks}; {of_rank}"
            "to_pandas('metric') a table>"
        )

    def of_rank(self, rank: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the steps and values of one rank."""
        mine = self.ranks == rank
        return self.steps[mine], self.values[mine]

    def unit_of(self, cell: int | None = None) -> str:
        """Return the unit of its steps in a cell, or in all cells.

        "step" is the default. "value" means that values were counted. "optimizer step" means that each step of several
        optimizers counts.
        """
        units = self.units if cell is None else self.units[self.cells == cell]
        return STEP_UNITS[int(units.max(initial=0))]

    @property
    def is_continued(self) -> bool:
        """Return whether its cells are one run."""
        return len(self.runs) <= 1

    @property
    def runs(self) -> list[list[int]]:
        """Return the cells of each run, the oldest first.

        A run is one cell, or several cells in which the program passed steps that continue. Counted steps start at 0 in
        each cell.
        """
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
    """Return the first name that looks like a loss, or else the first name."""
    names = list(names)
    return next((one for one in names if "loss" in one.lower()), names[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One collective of a group on all its ranks: arrival times, and how long each rank waited."""

    group: str
    group_name: str
    number: int
    op: str
    nbytes: int
    cell: int
    origin: str
    ranks: tuple[int, ...]  # ranks with recorded calls
    arrived_ns: npt.NDArray[np.int64]  # (len(ranks),)
    waited_ns: npt.NDArray[np.int64]  # (len(ranks),) wait for the last rank
    transfer_ns: int  # from the arrival of the last rank to the end of the slowest
    last: int  # the rank that arrived last

    @property
    def spread_ns(self) -> int:
        """Return the time from the first arrival to the last."""
        return int(self.arrived_ns.max() - self.arrived_ns.min())


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Synchronisation of one gradient bucket."""

    bucket: int
    nbytes: int
    parameters: tuple[str, ...]
    issue_ns: int
    end_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step on one rank, with a breakdown of its time.

    Input, compute, exposed, waiting, optimizer and rest add up to the duration. `compute` is forward, backward and the
    execution of remote calls, without time that is counted elsewhere. `exposed` is communication during which the rank
    waited while data moved. `waiting` is the time that it waited for slower ranks and for answers of remote calls.
    """

    rank: int
    cell: int
    step: int  # number in its cell, from 0
    start_ns: int
    end_ns: int
    samples: int | None
    input_ns: int
    workers_ns: int  # part of input_ns: start and shutdown of DataLoader workers
    forward_ns: int  # duration of the span, including exposed and waiting time inside it
    backward_ns: int
    optimizer_ns: int
    compute_ns: int
    communication_ns: int  # time with at least one pending collective
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
    """Return the steps after the warm-up of their cells, or all steps if all belong to it."""
    return [step for step in steps if step.step >= WARM_UP] or list(steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Work of one pipeline stage on one microbatch, measured or ideal."""

    rank: int
    stage: int
    microbatch: int
    kind: str  # "forward", "backward", "input gradient" or "weight gradient"
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Pipeline:
    """One `step` of a pipeline schedule on all its ranks.

    `ideal` contains the same actions in the same order on each rank. Each has the median duration of its stage and
    kind, and starts as soon as its inputs are computed. The remaining bubble is caused by the schedule.
    """

    schedule: str  # "Schedule1F1B"; with its ranks, if these are not all ranks
    cell: int
    step: int  # number of the schedule's step in its cell, from 0
    ranks: tuple[int, ...]
    stages: int
    microbatches: int
    actions: tuple[Action, ...]  # measured, ordered by start
    ideal: tuple[Action, ...]  # starts at 0
    even_bubble: float  # bubble of the order alone: each forward takes one unit of time, each backward two

    @property
    def span_ns(self) -> int:
        """Return the time from the start of the first action to the end of the last."""
        return _span_ns(self.actions)

    @property
    def bubble(self) -> float:
        """Return the idle share of the ranks' time, 0 to 1."""
        return bubble_of(self.actions, len(self.ranks))

    @property
    def ideal_span_ns(self) -> int:
        """Return the span of `ideal`."""
        return _span_ns(self.ideal)

    @property
    def ideal_bubble(self) -> float:
        """Return the idle share of `ideal`: the bubble of the schedule if messages take no time."""
        return bubble_of(self.ideal, len(self.ranks))

    def __repr__(self) -> str:
        size = f"{self.stages} stages on {len(self.ranks)} ranks, {self.microbatches} microbatches"
        return f"<Pipeline {self.schedule}: {size}, bubble {self.bubble:.2f}, ideal {self.ideal_bubble:.2f}>"


def _span_ns(actions: Sequence[Action]) -> int:
    return max(one.end_ns for one in actions) - min(one.start_ns for one in actions) if actions else 0


def bubble_of(actions: Sequence[Action], ranks: int) -> float:
    """Return the idle share of the time of this number of ranks, 0 to 1."""
    whole = _span_ns(actions) * ranks
    return 1 - sum(one.end_ns - one.start_ns for one in actions) / whole if whole else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that the others wait for."""

    rank: int
    share: float  # share of the inspected steps in which it was the last, 0 to 1
    # time per step that the others waited for it: mean over these ranks and over the steps in the run's mean
    lost_ns: int
    # phase in which it loses the time: "input", "forward", "backward", "optimizer", "between" phases or "outside" steps
    phase: str
    own_ns: int  # its median time in that phase
    theirs_ns: int  # median time of the others in that phase
    factor: float  # ratio of the two medians
    steps: int  # number of inspected steps
    evidence: str  # one sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Bytes per second of one operation at one size."""

    op: str
    group: str
    world_size: int
    nbytes: int
    count: int
    transfer_ns: int  # median
    algorithm_gb_s: float  # size / time, in 1e9 bytes per second
    bus_gb_s: float  # multiplied by the operation's factor, to be comparable with the hardware bandwidth
