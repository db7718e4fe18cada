"""Settings of the DataLoaders of a training run, and suggestions for faster loading."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.steps.steps import StepTable
from ddp_notebook.observe.tables.matching import RowSource
from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.records.schema import SPANS, Rows
from ddp_notebook.records.units import ms

_NOTABLE = 0.1  # share of a step that the report mentions
_LEAST_NS = 1e6  # a batch of a worker may take this time if cores are busy
_NUMBER = re.compile(r" \d+$")  # suffix for one of several loaders of a class; the program does not have this name
_INPUT, _WORKERS = map(SPANS.index, ("input", "workers"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """The DataLoader that the steps wait for most."""

    kind: str  # name of its class
    workers: int
    is_persistent: bool
    batches: int  # batches per epoch; -1: unknown
    epochs: int  # epochs in the cell, on the rank with the most
    started_ns: float  # total time for the start and end of its workers in the cell, mean of the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Starts and ends of DataLoader workers in all steps of a cell, mean of the ranks."""

    count: int  # number of steps with a start or end, on the rank with the most
    steps: int  # number of steps of the cell
    workers_ns: float
    steps_ns: float  # duration of all steps
    cell_ns: float | None  # duration of the cell; None: unknown

    @property
    def share(self) -> float:
        """Share of the time of all steps."""
        return self.workers_ns / self.steps_ns if self.steps_ns else 0.0


def started_in(steps: StepTable, cell_ns: float | None) -> Started:
    """Return the starts and ends of workers in these steps, at least one step."""
    workers, ranks = steps.parts["workers"], len(steps.ranks)
    return Started(
        count=int(np.bincount(steps.rank[workers > 0]).max(initial=0)),
        steps=int(steps.number.max()) + 1,
        workers_ns=int(workers.sum()) / ranks,
        steps_ns=int(steps.duration_ns.sum()) / ranks,
        cell_ns=cell_ns,
    )


def loader_of(recording: RowSource, steps: StepTable) -> Loader | None:
    """Return the DataLoader that these steps wait for most; None if its settings are unknown.

    Args:
        recording: rows of the cell alone.
        steps: at least one.
    """
    settings, spans = recording.rows("loader"), recording.rows("span")
    spans = select(spans, np.isin(spans["kind"], (_INPUT, _WORKERS)) & (spans["end_ns"] >= 0))
    spans = select(spans, np.isin(spans["name"], settings["name"]))
    waited = select(spans, _is_in_a_step(spans, steps))  # without waits of an evaluation
    if not len(waited):
        return None
    names, of = np.unique(waited["name"], return_inverse=True)
    name = names[np.bincount(of, waited["end_ns"] - waited["start_ns"]).argmax()]
    row = settings[settings["name"] == name][-1]
    started = spans[(spans["name"] == name) & (spans["kind"] == _WORKERS)]
    starts = started[started["samples"] >= 0]
    return Loader(
        kind=_NUMBER.sub("", recording.text(int(name))),
        workers=int(row["workers"]),
        is_persistent=bool(row["is_persistent"]),
        batches=int(row["batches"]),
        epochs=int(np.unique(starts["rank"], return_counts=True)[1].max(initial=0)),
        started_ns=int((started["end_ns"] - started["start_ns"]).sum()) / len(steps.ranks),
    )


def _is_in_a_step(spans: Rows, steps: StepTable) -> npt.NDArray[np.bool_]:
    """Return a mask (n,) of the spans that begin in a step of their rank."""
    inside = np.zeros(len(spans), bool)
    for rank in steps.ranks:
        own, mine = steps[steps.rank == rank], spans["rank"] == rank
        order = np.argsort(own.start_ns, kind="stable")
        at = np.searchsorted(own.start_ns[order], spans["start_ns"][mine], "right") - 1
        inside[mine] = (at >= 0) & (spans["start_ns"][mine] < own.end_ns[order][np.maximum(at, 0)])
    return inside


def loads_usually(steps: StepTable) -> bool:
    """Return whether the median step waits for a notable time for the loader."""
    waits = steps.parts["input"] - steps.parts["workers"]
    return bool(np.median(waits) >= _NOTABLE * np.median(steps.duration_ns))


def loading(
    loader: Loader | None,
    step_ns: float,
    input_ns: float,
    workers_ns: float,
    *,
    started: Started,
    has_gpu: bool,
    cores_are_taken: bool,
    is_usual: bool = True,
) -> list[tuple[float, str]]:
    """Return suggestions, each with the time per step in ns that it concerns.

    Args:
        loader: the DataLoader that the steps wait for; None: its settings are unknown.
        step_ns: duration of a step.
        input_ns: part of `step_ns`: wait for the loader.
        workers_ns: part of `input_ns`: start and end of workers.
        started: starts and ends of workers in all steps of the cell.
        has_gpu: the ranks use GPUs.
        cores_are_taken: ranks wait for a core, so more workers would not help.
        is_usual: the median step waits for the loader too.
    """
    found = []
    waits_ns = input_ns - workers_ns
    starts_again = loader is not None and loader.workers and not loader.is_persistent and loader.epochs > 1
    if loader is not None and starts_again and started.share >= _NOTABLE:
        each = f" of {loader.batches} batches" if loader.batches > 0 else ""
        whole = "" if started.cell_ns is None else f" of the cell's {ms(started.cell_ns)}"
        found.append(
            (
                loader.started_ns / started.steps,
                f"persistent_workers=True in {loader.kind}(num_workers={loader.workers}): its workers start again "
                f"and end, in each of {loader.epochs} epochs{each}, which takes {ms(loader.started_ns)}{whole}",
            )
        )
    if waits_ns < _NOTABLE * step_ns or waits_ns <= _LEAST_NS:
        return found
    if loader is not None and loader.workers:
        if not cores_are_taken:
            found.append(
                (
                    waits_ns,
                    f"more workers than num_workers={loader.workers} where cores are free, or less work for each "
                    f"sample: each step still waits {ms(waits_ns)} for {loader.kind}",
                )
            )
        return found
    if cores_are_taken or not is_usual:  # in a few steps the rank was paused rather than busy with loading
        return found
    pinned = ", pin_memory=True" if has_gpu else ""
    which = "the loader" if loader is None else f"{loader.kind} has num_workers=0 and"
    found.append(
        (
            waits_ns,
            f"load in the background (DataLoader with num_workers{pinned}, prefetch_factor), where cores are free: "
            f"{which} takes {ms(waits_ns)} of each step",
        )
    )
    return found
