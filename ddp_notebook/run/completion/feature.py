"""Declaration of completion and help in cells of ranks."""

from __future__ import annotations

from typing import Any

from ddp_notebook.run.features import NotebookFeature


def _session() -> type[Any]:
    from ddp_notebook.run.completion.kernel_requests import Completion

    return Completion


FEATURE = NotebookFeature(session=_session)
