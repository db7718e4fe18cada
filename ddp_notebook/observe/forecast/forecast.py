"""Step times of data parallel training on other numbers of ranks, networks, buckets and batches.

The recorded ranks take the recorded steps again, with other transfers. A collective starts when its last rank has come
and the previous one has ended:

    own time    |forward |backward  .b0   .b1 |optimizer|
    2 ranks     |forward |backward  .b0   .b1 |=|optimizer|
    64 ranks    |forward |backward  .b0   .b1 |=======|optimizer|

First this must predict the recording itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.forecast.network import Fit, Link, Network, fit
from ddp_notebook.observe.forecast.timeline import (
    Floats,
    RecordedSteps,
    StepEvents,
    recorded_steps,
    transfers,
    with_buckets,
)
from ddp_notebook.observe.report.cores import lacks
from ddp_notebook.observe.steps.run import run_of
from ddp_notebook.observe.tables.matching import RowSource, in_cell, label_of
from ddp_notebook.observe.tables.parts import Bounded, CellPart
from ddp_notebook.records.schema import ORIGINS, SPANS
from ddp_notebook.records.units import at_most_three_figures, ms, percent

if TYPE_CHECKING:
    from ddp_notebook.observe.figures.drawing import Picture

_MOST_OFF = 0.1  # largest difference between the predicted and the measured step of the recording, relative
_FEWEST_STEPS = 5
_MOST_STEPS = 40  # evenly spread over the cell
_MOST_RANKS = 1 << 20
_PAYS = 1.5  # doubling the ranks pays if samples/s grow by at least this factor: half of the ideal gain
_DOUBLINGS = 16
_FEW_TRANSFERS = 10
_LITTLE_TRANSFER = 0.02  # share of a step
_BUSY = 0.05  # share of a step without a core that a note reports
_SHARDED = [ORIGINS.index(origin) for origin in ("fsdp", "dtensor", "pipeline")]
_PIPELINE, _OPTIMIZER = SPANS.index("pipeline"), SPANS.index("optimizer")
_MB = 1 << 20  # unit of `bucket_cap_mb` in DDP


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted step on a number of ranks."""

    ranks: int
    step_ns: float
    exposed_ns: float  # communication that no compute hides; a part of the step
    samples_per_s: float | None  # sum over the ranks; None: the batch size was not recorded
    efficiency: float  # samples/s relative to the same number of single ranks, 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Forecast:
    """Predicted step times. As text it is the table that `%ddp_forecast` shows; `plot` draws it."""

    label: str  # displayed name of the cell
    ranks: int  # number of recorded ranks
    measured_ns: float  # mean step of the recording
    compared: int  # number of recorded steps in `measured_ns`
    report_ns: float  # mean step of `%ddp_report`, which averages other steps
    predicted_ns: float  # the same step, predicted
    predictions: tuple[Prediction, ...]  # (): the prediction of the recording is off by more than 10 %
    measured: Prediction | None  # the recorded step itself, with its predicted share of exposed communication
    network: Network | None  # network of the predictions; None: the recording has one rank and no network was given
    verdict: str  # one sentence
    notes: tuple[str, ...]  # sentences about more ranks, the network and the limits of the model

    @property
    def error(self) -> float:
        """Difference between the predicted and the measured step of the recording, relative to the measured one."""
        return self.predicted_ns / self.measured_ns - 1

    def __repr__(self) -> str:
        return f"Forecast({self.verdict})"

    def __str__(self) -> str:
        lines = [f"{self.verdict}."]
        if self.predictions:
            lines += ["", *_table(self), "", *(f"{note}." for note in self.notes)]
        return "\n".join(lines)

    def plot(self) -> Picture:
        """Draw the measured and the predicted steps.

        Raises:
            UsageError: nothing was predicted.
        """
        from ddp_notebook.observe.figures import scaling

        return scaling.draw(self)


def _table(found: Forecast) -> list[str]:
    rows = [["ranks", "step ms", "exposed ms", "samples/s", "efficiency"]]
    shown = [("", one) for one in found.predictions]
    shown += [(" measured", found.measured)] if found.measured is not None else []
    for name, one in sorted(shown, key=lambda both: (both[1].ranks, both[0] == "")):
        samples = "" if one.samples_per_s is None else f"{one.samples_per_s:,.0f}"
        step, exposed = f"{one.step_ns / 1e6:.1f}", f"{one.exposed_ns / 1e6:.1f}"
        rows.append([f"{one.ranks:,}{name}", step, exposed, samples, percent(one.efficiency)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


def forecast(
    recording: Bounded,
    ranks: Sequence[int],
    *,
    cell: int | None = None,
    gpus_per_node: int | None = None,
    network: float | Sequence[float] | None = None,
    latency_us: float | Sequence[float] | None = None,
    bucket_mb: float | None = None,
    batch: float = 1.0,
    micro_steps: int | None = None,
) -> Forecast:
    """Predict the step time of DDP, see `Recording.forecast`."""
    asked = _Asked(
        ranks=_checked_ranks(ranks),
        per_node=_positive_integer("gpus_per_node", gpus_per_node),
        rates=_pair("network", network, "GB/s"),
        latencies=_pair("latency_us", latency_us, "microseconds"),
        bucket_nbytes=None if bucket_mb is None else max(1, round(_positive("bucket_mb", bucket_mb) * _MB)),
        batch=_positive("batch", batch),
        micro_steps=_positive_integer("micro_steps", micro_steps),
    )
    for name, two in (("network", asked.rates), ("latency_us", asked.latencies)):
        if two is not None and len(two) == 2 and asked.per_node is None:
            raise UsageError(f"{name} with a value between nodes needs gpus_per_node (--gpus-per-node 8)")
    own, label, recorded = _recorded(recording, cell)
    steps, world = recorded.steps, len(recorded.ranks)
    run = run_of(own, int(own.rows("span")["cell"][0]))
    found = _fitted(label, recorded, asked)
    measured_ns, samples = recorded.measured_ns, recorded.samples
    itself = _Model(steps, world, network=_as_recorded(found))
    predicted_ns = itself.step_ns(world)
    trees = _has_gpu(own) or asked.rates is not None
    model = _Model(steps, world, network=_network(asked, found, trees), asked=asked)
    result = Forecast(
        label=label,
        ranks=world,
        measured_ns=measured_ns,
        compared=len(steps),
        report_ns=measured_ns if run is None else run.step_ns,
        predicted_ns=predicted_ns,
        predictions=(),
        measured=None,
        network=None,
        verdict="",
        notes=(),
    )
    if abs(result.error) > _MOST_OFF:
        return replace(result, verdict=_refused(result))
    factor = asked.batch * (1 if asked.micro_steps is None else asked.micro_steps / max(1, steps[0].passes))
    predictions = tuple(model.predict(count, samples, factor) for count in asked.ranks)
    measured = replace(itself.predict(world, samples, 1.0), step_ns=measured_ns)
    measured = replace(
        measured,
        samples_per_s=None if samples is None else samples * world / measured_ns * 1e9,
        efficiency=itself.step_ns(1) / measured_ns,
    )
    return replace(
        result,
        predictions=predictions,
        measured=measured,
        network=model.network,
        verdict=_verdict(predictions),
        notes=(
            _of_itself(result),
            *_pays(model),
            *_of_network(asked, found, model.network),
            *_thin(found, steps, measured_ns, asked),
            *_assumed(asked),
            *_busy(recording, own, measured_ns),
            "Left out: more ranks that share processors, memory or disks, input that loads slower, and ranks that are "
            "slower than those of this run",
        ),
    )


# ---- arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    ranks: tuple[int, ...] = ()
    per_node: int | None = None
    rates: tuple[float, ...] | None = None  # GB/s inside, and between nodes
    latencies: tuple[float, ...] | None = None  # microseconds
    bucket_nbytes: int | None = None
    batch: float = 1.0
    micro_steps: int | None = None


def _checked_ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    for one in ranks:
        if isinstance(one, bool) or not isinstance(one, int | np.integer) or not 1 <= one <= _MOST_RANKS:
            raise UsageError(f"ranks must be integers from 1 to {_MOST_RANKS:,}, got {one!r}")
    if not ranks:
        raise UsageError("ranks must contain at least one number of ranks, such as [8, 64]")
    return tuple(sorted({int(one) for one in ranks}))


def _positive(name: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise UsageError(f"{name} must be a positive number, got {value:g}")
    return float(value)


def _positive_integer(name: str, value: int | None) -> int | None:
    if value is not None and (value < 1 or value != int(value)):
        raise UsageError(f"{name} must be a positive integer, got {value!r}")
    return value


def _pair(name: str, value: float | Sequence[float] | None, unit: str) -> tuple[float, ...] | None:
    if value is None:
        return None
    values = (value,) if isinstance(value, int | float) else tuple(value)
    if len(values) not in (1, 2):
        raise UsageError(f"{name} must be one value or two, inside and between nodes, got {len(values)}")
    least = 0 if unit == "microseconds" else np.nextafter(0, 1)
    if not all(least <= one < float("inf") for one in values):
        kind = "number, 0 or more," if least == 0 else "positive number"
        raise UsageError(f"{name} must be a {kind} of {unit}, got {', '.join(f'{one:g}' for one in values)}")
    return tuple(float(one) for one in values)


# ---- recording


def _recorded(recording: Bounded, cell: int | None) -> tuple[CellPart, str, RecordedSteps]:
    """Return the rows of a cell, its displayed name, and its steps.

    Raises:
        UsageError: the cell has not trained with DDP on all ranks, or too few steps.
    """
    cell = _last_cell_with_steps(recording) if cell is None else cell
    own = CellPart(recording, -1 if cell is None else cell)
    recorded = recorded_steps(own, _MOST_STEPS)
    if cell is None or not recorded.ranks:
        raise UsageError(
            f"no forecast: no optimizer step was recorded{in_cell(recording, cell)}; train some steps first"
        )
    label = label_of(recording, cell)
    _refuse_others(own, recorded.ranks, label)
    if len(recorded.steps) < _FEWEST_STEPS:
        some = f"{len(recorded.steps)} comparable step{'s' * (len(recorded.steps) != 1)}"
        raise UsageError(
            f"no forecast: {label} has {some} after the first two, and "
            f"{_FEWEST_STEPS} are needed; train more steps, each with the same collectives on all ranks"
        )
    return own, label, recorded


def _fitted(label: str, recorded: RecordedSteps, asked: _Asked) -> Fit | None:
    """Return the network of the recording; None for a single rank.

    Raises:
        UsageError: the network of the forecast is unknown.
    """
    world = len(recorded.ranks)
    found = fit(transfers(recorded.steps), world)
    if found is None and world > 1:
        raise UsageError(f"no forecast: {label} has no all_reduce of all {world} ranks whose time is known")
    if found is None and asked.rates is None and max(asked.ranks) > 1:
        raise UsageError(f"{label} ran on one rank, so no network was measured: give its rate (--network 25)")
    return found


def _last_cell_with_steps(recording: RowSource) -> int | None:
    spans = recording.rows("span")
    cells = spans["cell"][(spans["kind"] == _OPTIMIZER) & (spans["end_ns"] >= 0)]
    return int(cells.max()) if len(cells) else None


def _refuse_others(own: RowSource, ranks: Sequence[int], label: str) -> None:
    """Raise if the cell did not train with data parallelism of all ranks."""
    calls = own.rows("call")
    if (own.rows("span")["kind"] == _PIPELINE).any() or np.isin(calls["origin"], _SHARDED).any():
        raise UsageError(
            f"no forecast: the ranks of {label} hold parts of a model (FSDP, tensor or pipeline parallel); a forecast "
            "is for DDP, or for gradients that the program averages itself"
        )
    buckets = calls[calls["bucket"] >= 0]
    groups = [sorted(own.group_of(one)["ranks"]) for one in np.unique(buckets["group"]).tolist()]
    if any(group != list(ranks) for group in groups):
        raise UsageError(f"no forecast: DDP in {label} averages gradients in groups, not over all ranks that train")


def _has_gpu(own: RowSource) -> bool:
    return bool((own.rows("resource")["gpu_allocated_bytes"] >= 0).any())


def _as_recorded(found: Fit | None) -> Network | None:
    if found is None:
        return None
    return Network(inside=found.link, between=found.link, per_node=None, has_trees=False)


def _network(asked: _Asked, found: Fit | None, has_trees: bool) -> Network | None:
    """Return the network of the forecast: given rates and latencies, and the fitted ones for the rest."""
    fitted = Link(latency_ns=0.0, ns_per_byte=0.0) if found is None else found.link
    if found is None and asked.rates is None:
        return None
    rates = [fitted.ns_per_byte] * 2 if asked.rates is None else [1 / one for one in asked.rates]
    latencies = [fitted.latency_ns] * 2 if asked.latencies is None else [1e3 * one for one in asked.latencies]
    links = [Link(latency_ns=latencies[at], ns_per_byte=rates[at]) for at in (0, -1)]
    return Network(inside=links[0], between=links[1], per_node=asked.per_node, has_trees=has_trees)


# ---- the model


class _Model:
    """Takes the recorded steps again on another number of ranks.

    Args:
        steps: recorded steps of R ranks.
        world: R.
        network: None if there is none; then only one rank can be predicted.
        asked: changes to the buckets and the batch.
    """

    def __init__(
        self, steps: Sequence[StepEvents], world: int, *, network: Network | None, asked: _Asked | None = None
    ) -> None:
        asked = asked or _Asked()
        if asked.bucket_nbytes is not None:
            steps = [with_buckets(step, asked.bucket_nbytes) for step in steps]
        self._world = world
        self.network = network
        self._steps = [_Scaled.of(step, asked.batch, asked.micro_steps) for step in steps]

    def step_ns(self, ranks: int, *, is_free: bool = False) -> float:
        """Return the mean duration of a step.

        Args:
            is_free: transfers take no time, so that ranks only wait for each other.
        """
        if ranks == 1:
            return float(np.mean([step.end.mean() for step in self._steps]))
        network = self.network
        costs: dict[tuple[str, int], float] = {}
        now: Floats = np.zeros(self._world)
        for step in self._steps:
            free_ns, done = -np.inf, [0.0] * len(step.calls)
            for at, is_wait, own in step.actions:
                if is_wait:
                    now = now + np.maximum(0.0, done[at] - (now + own))
                    continue
                kind = step.calls[at]
                if kind not in costs:
                    costs[kind] = 0.0 if is_free or network is None else network.cost_ns(kind[0], ranks, kind[1])
                free_ns = done[at] = max(free_ns, float((now + own).max())) + costs[kind]
            now = now + step.end
        return float(now.mean()) / len(self._steps)

    def predict(self, ranks: int, samples: float | None, factor: float) -> Prediction:
        """Return the step on this number of ranks.

        Args:
            samples: samples of a recorded rank in a step.
            factor: the predicted samples, relative to these.
        """
        step_ns = self.step_ns(ranks)
        return Prediction(
            ranks=ranks,
            step_ns=step_ns,
            exposed_ns=max(0.0, step_ns - self.step_ns(ranks, is_free=True)),
            samples_per_s=None if samples is None else samples * factor * ranks / step_ns * 1e9,
            efficiency=self.step_ns(1) / step_ns,
        )


@dataclass(frozen=True, slots=True)
class _Scaled:
    """One step with its own times in ns."""

    calls: list[tuple[str, int]]  # operation and bytes
    actions: list[tuple[int, bool, Floats]]  # call, whether the program waits for it, own times (R,), in order
    end: Floats  # (R,)

    @staticmethod
    def of(step: StepEvents, batch: float, micro_steps: int | None) -> _Scaled:
        """Return a step with a longer or shorter input, forward and backward, and more or fewer micro-steps."""
        passes = max(1, step.passes)
        more = 0 if micro_steps is None else micro_steps - passes
        if more and any(event.backward and event.backward < step.passes for event in step.events):
            raise UsageError(
                f"micro-steps cannot be changed: all {passes} backward passes of a recorded step synchronise gradients"
            )
        later = more / passes * batch * step.end[:, 1]  # own time of the added micro-steps, before all events

        def own(times: Floats) -> Floats:
            return times[:, 0] + batch * times[:, 1] + later

        actions = []
        for at, event in enumerate(step.events):
            actions.append((at, False, own(event.ready)))
            if event.wait is not None:
                actions.append((at, True, own(event.wait)))
        actions.sort(key=lambda one: (float(one[2].mean()), one[1]))
        return _Scaled([(event.op, event.nbytes) for event in step.events], actions, own(step.end))


# ---- sentences


def _of_itself(found: Forecast) -> str:
    """Return the comparison of the recorded run with its own forecast, as a sentence without its full stop."""
    rank = f"{found.ranks} rank{'s' * (found.ranks != 1)}"
    off = f"{percent(abs(found.error))} {'more' if found.error > 0 else 'less'}"
    mean = f"mean of {found.compared} step{'s' * (found.compared != 1)}"
    if ms(found.measured_ns) != ms(found.report_ns):
        mean += f"; the mean of %ddp_report has other steps: {ms(found.report_ns)}"
    return (
        f"For {found.label} itself on {rank}, the forecast is {ms(found.predicted_ns)}/step, {off} than the measured "
        f"{ms(found.measured_ns)} ({mean})"
    )


def _refused(found: Forecast) -> str:
    """Return the reason for a missing forecast, as sentences without the last full stop."""
    return (
        f"No forecast, because the forecast of the recorded run is wrong by more than {percent(_MOST_OFF)}. "
        f"{_of_itself(found)}. The cause is not known. %ddp_report shows the largest times of a step, and whether "
        "other processes used the cores. Record more steps, and forecast again"
    )


def _verdict(predictions: Sequence[Prediction]) -> str:
    """Return a sentence about the fewest and the most ranks."""
    first, *others = [
        f"{ms(one.step_ns)} on {one.ranks:,} rank{'s' * (one.ranks != 1)} (efficiency {percent(one.efficiency)})"
        for one in predictions
    ]
    return f"A step takes {first}" + (f", and {others[-1]}" if others else "")


def _pays(model: _Model) -> tuple[str, ...]:
    """Return from which number of ranks on doubling it does not pay."""
    if model.network is None:
        return ()
    counts = [1 << power for power in range(_DOUBLINGS + 1)]
    steps = [model.step_ns(count) for count in counts]
    gains = [2 * before / after for before, after in itertools.pairwise(steps)]
    last = max((at for at, gain in enumerate(gains) if gain >= _PAYS), default=-1)
    meant = "half of the ideal gain in samples/s"
    if last + 1 < len(gains):
        return (f"From {counts[last + 1]:,} ranks on more do not pay: doubling them adds less than {meant}",)
    if bad := [at for at, gain in enumerate(gains) if gain < _PAYS]:
        at = bad[0]
        return (
            f"More ranks pay up to {counts[-1]:,}, but not from {counts[at]:,} to {counts[at + 1]:,}: that adds less "
            f"than {meant}",
        )
    return (f"More ranks pay up to {counts[-1]:,}: each doubling adds at least {meant}",)


def _of_network(asked: _Asked, found: Fit | None, network: Network | None) -> tuple[str, ...]:
    if network is None:
        return ()

    def told(values: Sequence[float], unit: str) -> str:
        return " and ".join(f"{at_most_three_figures(one)} {unit}" for one in values)

    two = (network.inside, network.between)
    links = two if two[0] != two[1] else two[:1]
    levels = " inside and between nodes" if len(links) == 2 else ""
    fitted = "" if found is None else f"fitted to {found.count:,} transfers of this run"
    rate = told([link.gb_s for link in links], "GB/s") + levels + (" (given)" if asked.rates else f" ({fitted})")
    latency = "unknown, counted as 0 (--latency gives it)"
    if asked.latencies is not None:
        latency = told([link.latency_ns / 1e3 for link in links], "µs") + " (given)"
    elif found is not None and found.has_latency:
        latency = told([found.link.latency_ns / 1e3], "µs") + f" ({fitted})"
    shape = "ring or tree, the shorter one" if network.has_trees else "ring, as gloo"
    notes = [f"Network: each rank sends {rate}; latency of a message: {latency}; all_reduce: {shape}"]
    if asked.per_node is not None and asked.rates is None:
        notes.append("The rate between nodes counts as equal to that of this run; --network 300,25 gives both")
    return tuple(notes)


def _thin(found: Fit | None, steps: Sequence[StepEvents], step_ns: float, asked: _Asked) -> tuple[str, ...]:
    """Return what makes the fitted network uncertain."""
    if found is None or asked.rates is not None:
        return ()
    transferred = sum(one.ns for one in transfers(steps)) / len(steps)
    if found.count < _FEW_TRANSFERS:
        return (f"The network is fitted to {found.count} transfers only; record more steps",)
    if transferred < _LITTLE_TRANSFER * step_ns:
        return (
            f"Transfers take {percent(transferred / step_ns)} of a step of this run, so the fitted network is "
            "uncertain; --network gives the rate",
        )
    return ()


def _busy(recording: RowSource, own: RowSource, step_ns: float) -> tuple[str, ...]:
    """Return a note if other programs used the cores, so that messages waited for one too."""
    spans = own.rows("span")
    steps = spans[(spans["kind"] == _OPTIMIZER) & (spans["end_ns"] >= 0)]
    periods = {}
    for rank in np.unique(steps["rank"]).tolist():
        ends = steps["end_ns"][steps["rank"] == rank]
        periods[rank] = int(spans["start_ns"][spans["rank"] == rank].min()), int(ends.max()), len(ends)
    found = lacks(recording, periods)
    if found is None or not found[1].by_others or max(found[0].values()) < _BUSY * step_ns:
        return ()
    rank, lack_ns = max(found[0].items(), key=lambda one: one[1])
    return (
        f"Other processes used the cores: rank {rank} had no free core for up to {ms(lack_ns)} of a step. The fitted "
        "network contains such waits, so a run on other ranks differs if the load does",
    )


def _assumed(asked: _Asked) -> tuple[str, ...]:
    notes = []
    if asked.batch != 1:
        notes.append(
            f"Input, forward and backward count as {asked.batch:g} times as long with {asked.batch:g} times the batch"
        )
    if asked.bucket_nbytes is not None:
        notes.append(
            "Gradients of a recorded bucket count as ready at an even rate, because the sizes of parameters are not "
            "recorded"
        )
    return tuple(notes)
