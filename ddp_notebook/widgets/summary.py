"""What stays of a view when its cell has ended: a text and a picture."""

from __future__ import annotations

import io

from ddp_notebook.observe.recording import Recording


def text(recording: Recording, cell: int | None) -> str:
    """The result of a cell in one line; None: of all."""
    ranks = f"{recording.world_size} rank{'s' * (recording.world_size != 1)}"
    return f"{ranks}, {len({step.step for step in recording.steps(cell)})} steps"


def picture(recording: Recording, cell: int | None) -> bytes:
    """The same as a picture (PNG)."""
    buffer = io.BytesIO()
    figure = recording.plot_loss(cell=cell) if recording.metrics else recording.plot_steps(cell)
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()
