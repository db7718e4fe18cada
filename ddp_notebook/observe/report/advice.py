"""Interpret the numbers of a training cell in one sentence, and suggest changes that the numbers support.

Each suggestion contains the number on which it is based. Suggestions about the longest times come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddp_notebook.observe.report.bubbles import Bubble
from ddp_notebook.observe.report.cores import CoreUse
from ddp_notebook.observe.report.loading import Loader, Started, loading
from ddp_notebook.observe.report.network_waits import NetworkTimes
from ddp_notebook.observe.report.page_faults import FAULT_NS
from ddp_notebook.observe.steps.steps import StepTable
from ddp_notebook.observe.steps.waits import fewest_steps
from ddp_notebook.observe.tables.matching import Numbers, RowSource
from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.observe.views import Straggler
from ddp_notebook.records.schema import ORIGINS, SPANS
from ddp_notebook.records.units import ms, percent, size
from ddp_notebook.records.words import rank_on, ranks_on

_MOST = 3  # number of suggestions
_LARGE = 0.15  # share of a step that is large enough for the verdict
_NOTABLE = 0.1  # share of a step that is worth mentioning
_LARGE_REST = 0.3  # share of a step; some Python code between phases is normal, and so is an optimizer
_MOSTLY = 0.7  # share of a step
_MANY_BUCKETS, _SMALL_BUCKET = 8, 8_000_000  # the DDP default is 25 MiB
_MANY_BYTES = 10_000_000  # bytes of gradients per step
_SHORT_STEP_NS = 20_000_000
_BETWEEN = {"between": "phases", "outside": "steps"}
_LARGEST_FACTOR = 50  # for larger ratios the times are shown in place of the factor
_SELDOM = 0.25  # share of another rank's wait: a rank below this share is the one that the others wait for


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Breakdown of step time: means over steps, which add up. If `rank` is None, also over ranks."""

    rank: int | None
    step_ns: float
    input_ns: float
    workers_ns: float  # part of input_ns: start and shutdown of DataLoader workers
    compute_ns: float
    forward_ns: float  # part of compute_ns
    backward_ns: float  # part of compute_ns
    exposed_ns: float
    waiting_ns: float
    answers_ns: float  # part of waiting_ns: waits for answers of remote calls
    optimizer_ns: float
    rest_ns: float
    communication_ns: float
    overlapped_ns: float
    samples_per_s: float | None  # sum of all ranks if `rank` is None

    def share(self, ns: float) -> float:
        """Return a time as a share of the step, 0 to 1."""
        return ns / self.step_ns if self.step_ns else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientTimes:
    """Times of gradient synchronisation: medians over steps and ranks."""

    buckets: float  # number per step
    nbytes: float  # bytes per step
    dtypes: tuple[str, ...]
    copied_ns: float  # time at the end of a backward pass, after all buckets are complete
    passes: float = 1.0  # backward passes per step that send gradients
    all_passes: float = 1.0  # backward passes per step


def verdict(
    parts: StepParts,
    ranks: Sequence[StepParts],
    slow: Straggler | None,
    steps: int,
    hosts: Sequence[str] = (),
    network: NetworkTimes | None = None,
    bubble: Bubble | None = None,
    page_faults: float = 0.0,
    taken: CoreUse | None = None,
    *,
    started: Started,
    world_size: int,
) -> str:
    """Return a sentence about the largest loss of time.

    If other processes use the cores, the sentence is about them, because the other numbers are not meaningful then.

    Args:
        parts: breakdown for all ranks.
        ranks: breakdown for each rank.
        slow: the straggler, if there is one.
        steps: number of inspected steps.
        hosts: machine of each rank; (): all ranks are on one machine.
        network: times between machines, if data moved between them.
        bubble: bubble of the pipeline whose stages the ranks are. No rank counts as slow then.
        page_faults: page faults per step, mean of the ranks.
        taken: time that ranks waited for a core; None: unknown.
        started: starts and ends of DataLoader workers in all steps of the cell.
        world_size: number of ranks of the session.
    """
    if taken is not None and taken.is_large and taken.by_others:
        return taken.words(parts.step_ns, len(ranks))
    losses = [_waiting(parts, ranks, slow, steps, hosts) if bubble is None else bubble.loss(parts.step_ns)]
    exposed_ns = parts.exposed_ns if bubble is None else 0.0  # part of the bubble
    communication = "is communication that no compute hides"
    if world_size == 1:
        communication = "is communication of rank 0 with itself"
    elif network is not None:
        communication = network.words()
    for ns, least, text in (
        (exposed_ns, _LARGE, communication),
        (parts.answers_ns, _LARGE, "waits for answers of remote calls"),
        (parts.input_ns - parts.workers_ns, _LARGE, "waits for the data loader"),
        (parts.optimizer_ns, _LARGE_REST, "is the optimizer"),
        (parts.rest_ns, _LARGE_REST, "belongs to no phase: Python code between the phases"),
        (page_faults * FAULT_NS, _LARGE, "is page faults: the ranks get memory from the system again in each step"),
    ):
        if (share := parts.share(ns)) >= least:
            losses.append((share, f"{percent(share)} of the step {text}"))
    if started.share >= _LARGE:  # separate, because there may be too few for the mean of the steps
        text = f"is the start and the end of the data loader's workers, in {started.count} of {started.steps:,} steps"
        losses.append((started.share, f"{percent(started.share)} of the time of all steps {text}"))
    if taken is not None and taken.is_large:
        losses.append((taken.share, taken.words(parts.step_ns, len(ranks))))
    if max(losses)[0]:
        return max(losses)[1]
    computes = parts.share(parts.compute_ns)
    return f"Nothing {'is wrong' if computes >= _MOSTLY else 'stands out'}: {percent(computes)} of the step computes"


def _waiting(
    parts: StepParts, ranks: Sequence[StepParts], slow: Straggler | None, steps: int, hosts: Sequence[str]
) -> tuple[float, str]:
    """Return the share of the step that ranks lose by waiting, and a sentence about the rank that they wait for.

    The share is 0 if it is not worth mentioning. The mean is over the waiting ranks: if one of two ranks always waits,
    a mean over both would hide half of it.
    """
    if slow is not None:
        # The step of a rank that loses its time outside of its steps is shorter than those of the waiting ranks.
        steps_ns = [one.step_ns for one in ranks if one.rank != slow.rank]
        lost = slow.lost_ns * len(steps_ns) / sum(steps_ns) if sum(steps_ns) else 0.0
        return lost, f"{percent(lost)} of the step waits for {rank_on(slow.rank, hosts)}, {_because(slow)}"
    most = max(ranks, key=_waits)
    lost = _waits(most)
    if lost < _LARGE:
        return 0.0, ""
    if len(ranks) == 1:  # the other ranks have no optimizer
        return lost, f"{percent(lost)} of the step waits for other ranks"
    if steps < fewest_steps(len(ranks)):
        least = min(ranks, key=_waits)
        return lost, (
            f"Too few steps to name a slow rank: {steps}, of which rank {most.rank} waits {percent(lost)} and "
            f"rank {least.rank} {percent(_waits(least))}; it takes at least {fewest_steps(len(ranks))}"
        )
    late = waited_for(ranks)
    if not late:
        waiting = _waits(parts)
        lost = waiting * len(ranks) / (len(ranks) - 1)  # the last rank in a step does not wait
        return lost, f"{percent(waiting)} of the step the ranks wait for each other: no single rank is late"
    lost = _mean_waiting([one for one in ranks if one not in late])
    return lost, (
        f"{percent(lost)} of the step waits for {_named(late, hosts)}, but not in every step, or too little in all to "
        "call it slow"
    )


def waited_for(ranks: Sequence[StepParts]) -> list[StepParts]:
    """Return the ranks that wait far less than others. Return [] if all ranks wait in turn."""
    most = max(map(_waits, ranks))
    return [one for one in ranks if _waits(one) < _SELDOM * most]


def _waits(parts: StepParts) -> float:
    """Return the share of the step in which a rank waits for other ranks.

    Waits for answers of remote calls do not count, because no rank is late in that case.
    """
    return parts.share(parts.waiting_ns - parts.answers_ns)


def _mean_waiting(ranks: Sequence[StepParts]) -> float:
    return sum(map(_waits, ranks)) / len(ranks)


def _named(ranks: Sequence[StepParts], hosts: Sequence[str]) -> str:
    return ranks_on([one.rank for one in ranks if one.rank is not None], hosts)


def _because(slow: Straggler) -> str:
    if slow.phase in _BETWEEN:
        return f"which takes {ms(slow.own_ns)} between its {_BETWEEN[slow.phase]}, the others {ms(slow.theirs_ns)}"
    if slow.factor > _LARGEST_FACTOR or slow.factor < 1.05:
        return f"whose {slow.phase} takes {ms(slow.own_ns)}, the others' {ms(slow.theirs_ns)}"
    return f"whose {slow.phase} takes {slow.factor:.1f} times the others'"


def suggestions(
    parts: StepParts,
    ranks: Sequence[StepParts],
    slow: Straggler | None,
    gradients: GradientTimes | None,
    *,
    steps: int,
    started: Started,
    has_gpu: bool,
    is_sharded: bool = False,
    bubble: Bubble | None = None,
    page_faults: float = 0.0,
    loader: Loader | None = None,
    taken: CoreUse | None = None,
    loads_usually: bool = True,
    is_too_short: bool = False,
) -> tuple[str, ...]:
    """Return up to three suggestions.

    Args:
        parts: breakdown for all ranks.
        ranks: breakdown for each rank.
        slow: the straggler, if there is one.
        gradients: times of gradient synchronisation; None: DDP did not synchronise.
        steps: number of inspected steps.
        started: starts and ends of DataLoader workers in all steps of the cell.
        has_gpu: the ranks use GPUs.
        is_sharded: see the function of this name.
        bubble: bubble of the pipeline whose stages the ranks are.
        page_faults: page faults per step, mean of the ranks.
        loader: the DataLoader that the steps wait for; None: its settings are unknown.
        taken: time that ranks waited for a core; None: unknown.
        loads_usually: the median step waits for the loader too, not only some steps.
        is_too_short: the steps took less time than it takes to count how long ranks wait for a core. Other processes
            may have slowed down communication, so there is no advice about it.
    """
    # Leave out a rank with a slow loader, because its loading time is not typical.
    others = [one for one in ranks if slow is None or one.rank != slow.rank or slow.phase != "input"]
    input_ns, workers_ns = (
        float(np.median([getattr(one, name) for one in others])) if others else 0.0
        for name in ("input_ns", "workers_ns")
    )
    found: list[tuple[float, str]] = []
    cores_are_taken = taken is not None and taken.is_large and taken.by_others
    if cores_are_taken and taken is not None:
        found.append(
            (
                parts.step_ns,
                "measure again when the other processes have ended, or on another host. They use the cores, so the "
                "times of this report are too long",
            )
        )
    else:
        found += _for_waiting(parts, len(ranks), slow, bubble, steps)
    found += loading(
        loader,
        parts.step_ns,
        input_ns,
        workers_ns,
        started=started,
        has_gpu=has_gpu,
        cores_are_taken=taken is not None and taken.is_large,
        is_usual=loads_usually,
    )
    if parts.share(faults_ns := page_faults * FAULT_NS) >= _NOTABLE:
        found.append(
            (
                faults_ns,
                "ranks that keep the memory of tensors below 32 MB when it is freed: start them with "
                "--env MALLOC_TRIM_THRESHOLD_=268435456 --env MALLOC_MMAP_THRESHOLD_=33554432. Each step gets memory "
                f"from the system again: {page_faults:,.0f} page faults or about {ms(faults_ns)}",
            )
        )
    if len(ranks) > 1 and bubble is None and not cores_are_taken and not is_too_short:
        found += [(ns, text) for ns, text in _for_communication(parts, gradients, is_sharded) if ns]
    found.sort(key=lambda one: -one[0])
    return tuple(text for _, text in found[:_MOST])


def _for_waiting(
    parts: StepParts, world_size: int, slow: Straggler | None, bubble: Bubble | None, steps: int
) -> list[tuple[float, str]]:
    """Return the time per step that ranks lose by waiting for each other, with suggestions. Arguments as for
    `suggestions`.
    """
    if slow is not None:
        return [(slow.lost_ns, _balance(slow))]
    if bubble is not None:
        return [(bubble.loss(parts.step_ns)[0] * parts.step_ns, text) for text in bubble.suggestions()]
    if _waits(parts) >= _LARGE and world_size > 1 and steps >= fewest_steps(world_size):
        waiting_ns = parts.waiting_ns - parts.answers_ns
        text = "give all ranks batches of equal work, and each rank its own CPU core: "
        return [(waiting_ns, f"{text}they wait {ms(waiting_ns)} of each step, mean of the ranks")]
    return []


def _balance(slow: Straggler) -> str:
    lost = f"it costs the others {ms(slow.lost_ns)} of each step (mean)"
    if slow.phase == "input":
        return f"check the data that rank {slow.rank} loads, and its source: {lost}"
    where = {
        "between": "its code between forward, backward and optimizer",
        "outside": "its code between two steps",
    }.get(slow.phase, f"its {slow.phase}")
    return f"give rank {slow.rank} less work, or find out what slows down {where}: {lost}"


def _for_communication(parts: StepParts, gradients: GradientTimes | None, is_sharded: bool) -> list[tuple[float, str]]:
    """Return suggestions, each with the time in ns that it concerns."""
    exposed, found = parts.exposed_ns, []
    is_small = parts.step_ns < _SHORT_STEP_NS and parts.share(parts.compute_ns) < 0.5
    if is_small and parts.share(exposed) >= _NOTABLE:
        found.append(
            (
                0.9 * exposed,
                f"a larger batch: forward and backward are {ms(parts.compute_ns)} of a step of {ms(parts.step_ns)}, "
                "the rest is overhead that does not grow with it",
            )
        )
    if gradients is None:
        moved_ns = parts.communication_ns - parts.waiting_ns + parts.answers_ns
        if not is_sharded and parts.share(exposed) >= _NOTABLE and parts.overlapped_ns < 0.1 * moved_ns:
            hidden = percent(parts.overlapped_ns / moved_ns)
            found.append(
                (
                    exposed,
                    "DistributedDataParallel, or async_op=True and a later wait(): "
                    f"{ms(moved_ns)} of communication, of which {hidden} is hidden behind compute",
                )
            )
        return found
    if gradients.copied_ns >= max(0.03 * parts.step_ns, 500_000):
        found.append(
            (
                gradients.copied_ns,
                f"gradient_as_bucket_view=True: {ms(gradients.copied_ns)} of each backward come after the last bucket, "
                "when gradients are copied out of their buckets",
            )
        )
    if parts.share(exposed) < _NOTABLE:
        return found
    each = gradients.nbytes / gradients.buckets
    if gradients.buckets >= _MANY_BUCKETS * gradients.passes and each < _SMALL_BUCKET:
        found.append(
            (
                exposed,
                f"a larger bucket_cap_mb: {gradients.buckets:.0f} buckets of {size(each)} in each step, "
                f"and {ms(exposed)} of their communication is not hidden",
            )
        )
    elif gradients.nbytes >= _MANY_BYTES and "float32" in gradients.dtypes:
        found.append(
            (
                exposed,
                "a comm hook that sends half the bytes (default_hooks.fp16_compress_hook): "
                f"{size(gradients.nbytes)} of float32 gradients in each step",
            )
        )
    if exposed > 0.25 * parts.compute_ns:
        found.append(
            (
                0.95 * exposed,
                f"{_how_to_accumulate(gradients)}{ms(exposed)} of communication in each step are not hidden behind "
                f"{ms(parts.compute_ns)} of compute",
            )
        )
    return found


def _how_to_accumulate(gradients: GradientTimes) -> str:
    if gradients.passes >= 2:
        return (
            f"{gradients.passes:.0f} backward passes of each step send gradients. If they accumulate, put all but "
            "the last one under model.no_sync(): "
        )
    if gradients.all_passes >= 2:  # the step accumulates already
        return (
            f"accumulate gradients over more passes (model.no_sync()): 1 of the {gradients.all_passes:.0f} backward "
            "passes of each step sends gradients, and "
        )
    return "accumulate gradients over several passes (model.no_sync()): "


def is_sharded(recording: RowSource, found: StepTable) -> bool:
    """Return whether FSDP, DTensor or a pipeline communicates in these steps. DDP is not suitable for such a model."""
    calls = recording.rows("call")
    origins = calls["origin"][(calls["issue_ns"] >= found.start_ns.min()) & (calls["issue_ns"] < found.end_ns.max())]
    return bool(np.isin(origins, [ORIGINS.index(name) for name in ("fsdp", "dtensor", "pipeline")]).any())


def gradients_of(recording: RowSource, found: StepTable) -> GradientTimes | None:
    """Return the gradient synchronisation times of these steps; None if DDP did not synchronise."""
    begin, end = found.start_ns.min(), found.end_ns.max()
    calls, spans = recording.rows("call"), recording.rows("span")
    calls = select(calls, (calls["bucket"] >= 0) & (calls["issue_ns"] >= begin) & (calls["issue_ns"] < end))
    if not len(calls):
        return None
    in_steps = (spans["start_ns"] >= begin) & (spans["end_ns"] <= end)
    spans = select(spans, (spans["kind"] == SPANS.index("backward")) & in_steps)
    steps, of_step, counts = np.unique(_keys(calls["rank"], calls["step"]), return_inverse=True, return_counts=True)
    # End of the last bucket of each backward pass, compared with the end of the backward pass.
    keys, of_backward = np.unique(_keys(calls["rank"], calls["backward"]), return_inverse=True)
    passes = np.bincount(of_step[np.unique(of_backward, return_index=True)[1]], minlength=len(steps))
    last_end = np.full(len(keys), -1, np.int64)
    np.maximum.at(last_end, of_backward, calls["end_ns"])
    own, own_step = _keys(spans["rank"], spans["span"]), _keys(spans["rank"], spans["step"])
    at = np.minimum(np.searchsorted(keys, own), len(keys) - 1)
    is_known = (keys[at] == own) & (last_end[at] >= 0)
    tails = (spans["end_ns"] - last_end[at])[is_known]
    return GradientTimes(
        buckets=float(np.median(counts)),
        nbytes=float(np.median(np.bincount(of_step, calls["nbytes_in"]))),
        dtypes=tuple(recording.text(number) for number in np.unique(calls["dtype"]).tolist()),
        copied_ns=max(float(np.median(tails)), 0.0) if len(tails) else 0.0,
        passes=max(float(np.median(passes)), 1.0),
        all_passes=max(float(np.median(np.unique(own_step, return_counts=True)[1])), 1.0) if len(own_step) else 1.0,
    )


def _keys(ranks: Numbers, numbers: Numbers) -> Numbers:
    """Return one number (n,) for each pair."""
    return ranks.astype(np.int64) << 40 | numbers.astype(np.int64)
