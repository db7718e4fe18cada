"""Reject calls on a rank that are only valid in the notebook."""

from __future__ import annotations

import sys

from traitlets.config import Application

from ddp_notebook.errors import UsageError


def refuse_on_rank(call: str) -> None:
    """Raise an error if this process is a rank of a session.

    Args:
        call: the call or magic that is valid only in the notebook, such as "start()".

    Raises:
        UsageError: this process is a rank.

    Example:
        >>> refuse_on_rank("start()")
    """
    engine = sys.modules.get("ddp_notebook.rank.engine")  # only ranks import this module
    if engine is not None and Application.initialized() and isinstance(Application.instance(), engine.RankEngine):
        raise UsageError(
            f"{call} must run in the notebook, but this process is a rank: use a cell that stays in the notebook (with "
            "%ddp_auto on, one with %%local above it)"
        )
