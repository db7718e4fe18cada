"""Settings of the loaders of a training run, and suggestions for faster loading."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.steps.steps import StepTable
from ddp_notebook.observe.tables.matching import RowSource
from ddp_notebook.records.schema import SPANS, Rows
from ddp_notebook.records.units import ms, percent

_NOTABLE = 0.1  # share of a step from which the report mentions it
_LEAST_NS = 1e6  # a batch of a worker takes about as long where cores are busy
_INPUT, _WORKERS = map(SPANS.index, ("input", "workers"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """The loader that the steps wait for most."""

    name: str
    workers: int
    is_persistent: bool
    batches: int  # per epoch; -1: unknown
    epochs: int  # epochs in the cell, on the rank that has the most


def loader_of(recording: RowSource, steps: StepTable) -> Loader | None:
    """Return the loader that these steps wait for most; None where its settings are not known.

    Args:
        recording: rows of the cell alone.
        steps: at least one.
    """
    settings, spans = recording.rows("loader"), recording.rows("span")
    spans = spans[np.isin(spans["kind"], (_INPUT, _WORKERS)) & (spans["end_ns"] >= 0)]
    spans = spans[np.isin(spans["name"], settings["name"])]
    waited = spans[_is_in_a_step(spans, steps)]  # without waits of an evaluation
    if not len(waited):
        return None
    names, of = np.unique(waited["name"], return_inverse=True)
    name = names[np.bincount(of, waited["end_ns"] - waited["start_ns"]).argmax()]
    row = settings[settings["name"] == name][-1]
    starts = spans[(spans["name"] == name) & (spans["kind"] == _WORKERS) & (spans["samples"] >= 0)]
    return Loader(
        name=recording.text(int(name)),
        workers=int(row["workers"]),
        is_persistent=bool(row["is_persistent"]),
        batches=int(row["batches"]),
        epochs=int(np.unique(starts["rank"], return_counts=True)[1].max(initial=0)),
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


def loading(
    loader: Loader | None, step_ns: float, input_ns: float, workers_ns: float, *, has_gpu: bool, cores_are_taken: bool
) -> list[tuple[float, str]]:
    """Return things to try, each with the time per step in ns that it concerns.

    Args:
        loader: the loader that the steps wait for; None: its settings are not known.
        step_ns: how long a step takes.
        input_ns: part of `step_ns`: wait for the loader.
        workers_ns: part of `input_ns`: start and end of workers.
        has_gpu: the ranks use GPUs.
        cores_are_taken: other processes use the cores, so more workers would not run.
    """
    found = []
    waits_ns = input_ns - workers_ns
    if loader is not None and loader.workers and not loader.is_persistent and workers_ns >= _NOTABLE * step_ns:
        epochs = f", in each of {loader.epochs} epochs" if loader.epochs > 1 else ""
        each = f" of {loader.batches} batches" if epochs and loader.batches > 0 else ""
        found.append(
            (
                workers_ns,
                f"persistent_workers=True in {loader.name}(num_workers={loader.workers}): its workers start again and "
                f"end{epochs}{each}, which takes {ms(workers_ns)} of a step, {percent(workers_ns / step_ns)}",
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
                    f"sample: each step still waits {ms(waits_ns)} for {loader.name}",
                )
            )
        return found
    pinned = ", pin_memory=True" if has_gpu else ""
    which = "the loader" if loader is None else f"{loader.name} has num_workers=0 and"
    found.append(
        (
            waits_ns,
            f"load in the background (DataLoader with num_workers{pinned}, prefetch_factor), where cores are free: "
            f"{which} takes {ms(waits_ns)} of each step",
        )
    )
    return found
