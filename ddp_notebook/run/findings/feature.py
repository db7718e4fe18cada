"""Declaration of the findings about training steps."""

from __future__ import annotations

from typing import Any

from ddp_notebook.run.features import NotebookFeature


def _session() -> type[Any]:
    from ddp_notebook.run.findings.cell_findings import CellFindings

    return CellFindings


FEATURE = NotebookFeature(session=_session)
