"""Declaration of the sentence about where the paths of ranks diverged."""

from __future__ import annotations

from typing import Any

from ddp_notebook.run.features import NotebookFeature


def _session() -> type[Any]:
    from ddp_notebook.run.divergence.diverged_cells import DivergedCells

    return DivergedCells


FEATURE = NotebookFeature(session=_session)
