"""Recordings saved by earlier versions can still be read."""

from __future__ import annotations

from pathlib import Path

import ddp_notebook

DATA = Path(__file__).parents[1] / "data"


def test_a_recording_of_a_notebook():
    """Saved by version 0.1.0 before the modules moved: two ranks, six steps of DDP, a message and an all_reduce."""
    recording = ddp_notebook.load(DATA / "recording_version_1.npz")

    assert (recording.world_size, recording.baseline, recording.dropped) == (2, None, {})
    calls = recording.collectives()
    assert {call.op for call in calls} == {"all_gather", "broadcast", "all_reduce", "send", "recv"}
    assert [len(recording.steps(rank=rank)) for rank in (0, 1)] == [6, 6]
    loss = recording.metrics["loss"]
    assert loss.steps.tolist() == [1, 2, 3, 4, 5, 6] * 2
    assert (loss.values[0], loss.values[-1]) != (0, 0)
    assert loss.unit_of() == "step"
    assert recording.store.left_out == 0 and not any(call.left_out for call in calls)


def test_the_files_of_a_scripts_ranks():
    recording = ddp_notebook.load(DATA / "ranks_version_1")

    assert recording.world_size == 2
    assert len(recording.steps()) == 8
    assert len(recording.collectives()) and recording.store.left_out == 0
    assert recording.metrics["loss"].steps.tolist() == [1, 2, 3, 4] * 2
