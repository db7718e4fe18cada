"""The sentence under a cell that `%ddp_nan --catch` has stopped, from the facts of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddp_notebook.observe.nan.gradient_inputs import (
    loaded_samples,
    name_of_bucket,
    parameters_of_bucket,
    variable_of_model,
)
from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.records.words import bad_elements, list_ranks
from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.session_hooks import SessionFeature

_FACT = "caught-nan"  # see `rank.record.nan.catcher`


class CaughtNan(SessionFeature):
    """Shows the rank, the gradients and the module under a cell that was stopped."""

    def cell_ended(self, run: CellRun, code: str) -> Sequence[str]:
        facts = {
            rank: (step, details)
            for rank, one in sorted(run.result.by_rank.items())
            for name, step, details in one.findings
            if name == _FACT
        }
        if not facts:
            return ()
        recordings = self.parts.hooks.features.get("recording")
        recording = None if recordings is None else recordings.now
        lines = sentences(facts, recording, run.number)
        if recording is not None:
            recording.findings[run.number] = (*recording.findings.get(run.number, ()), *lines)
        return lines


def sentences(
    facts: Mapping[int, tuple[int, Mapping[str, Any]]], recording: RecordedTables | None, cell: int
) -> list[str]:
    """Return one sentence for each rank that had bad gradients.

    Args:
        facts: step and details by rank.
        recording: has the parameters of DDP's buckets and the loaded samples; None: they are not known.
        cell: number of the cell.
    """
    bad = {rank: fact for rank, fact in facts.items() if not fact[1].get("is_clean")}
    lines = []
    for rank, (step, details) in bad.items():
        lines.append(f"rank {rank}, step {step:,}: {_gradients(rank, details, recording)}")
        if words := _origin(details):
            lines.append(f"rank {rank}: {words}")
        if recording is not None and (words := loaded_samples(recording, cell, rank, step)):
            lines.append(words)
    clean = [rank for rank in facts if rank not in bad]
    if lines and clean:
        lines.append(f"the gradients of {list_ranks(clean)} were finite before the average")
    return lines or [f"{list_ranks(clean)}: averaged gradients were not finite; the rank that sent them has not ended"]


def _origin(details: Mapping[str, Any]) -> str:
    """Return the words about the place that made the first bad value; "" if there are none."""
    place, name, kind, words = details["origin"]
    model = details["model"] or "the model"
    title = f"{name} ({kind})" if name and kind else name or kind
    of = f" of {model}" if title and details["model"] else ""
    if place == "input":
        return f"the input of {model} was not finite: {words}"
    if place == "parameters":
        return f"parameters were not finite before the forward{of}: {name}"
    if place == "loss":
        return (
            f"the output of {model} was finite, and the gradient of this output was not: look at the code after {model}"
        )
    if place:
        return f"the {place} of {title or model}{of} made the first {details['kind']}: {words}"
    if words:
        return f"the module is not known: {words}"
    return (
        ""
        if details["has_forward"]
        else "the module is not known: no forward with gradients has run since the last step"
    )


def _gradients(rank: int, details: Mapping[str, Any], recording: RecordedTables | None) -> str:
    if not details["gradients"]:
        return f"gradients had {details['kind']} before the optimizer step"
    (one,) = details["gradients"]
    counts = bad_elements(one["nans"], one["infs"], one["numel"])
    if not one["nans"] + one["infs"]:  # on a GPU they are not counted
        counts = f"{details['kind']} among {one['numel']:,} elements"
    more, before = details["count"] - 1, details["finite_before"]
    also = f", and {more} later {'one was' if more == 1 else 'ones were'} not finite either" if more else ""
    also += f"; {before} earlier average{'s' * (before > 1)} of this backward had finite gradients" if before else ""
    if one["bucket"] >= 0:
        names = (
            ()
            if recording is None
            else parameters_of_bucket(recording, rank, one["model"], one["bucket"], one["numel"])
        )
        model = one["model"] if recording is None else variable_of_model(recording, rank, one["model"])
        return f"{name_of_bucket(model, one['bucket'], names)} had {counts} before the average{also}"
    of = f" of module {one['model']}" if one["model"] else ""
    what = f"the gradients{of}" if of and not one["is_of_user"] else f"the tensor of {one['operation']}"
    return f"{what} had {counts} before the average{also}"
