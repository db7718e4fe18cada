"""Declaration of the part of `ddp_notebook.survive` in a session."""

from __future__ import annotations

from typing import Any

from ddp_notebook.run.features import NotebookFeature


def _session() -> type[Any]:
    from ddp_notebook.run.survive.survived_cells import CellSurvival

    return CellSurvival


FEATURE = NotebookFeature(session=_session)
