"""Reject calls on a rank that are only valid in the notebook."""

from __future__ import annotations

import sys

from traitlets.config import Application

from ddp_notebook.errors import UsageError


def refuse_on_rank(what: str) -> None:
    """Raise an error if this process is a rank of a session.

    Args:
        what: the action that is invalid on a rank, and the call for the notebook: "ranks start no ranks: call start".

    Raises:
        UsageError: this process is a rank.

    Example:
        >>> refuse_on_rank("ranks start no ranks: call start")
    """
    engine = sys.modules.get("ddp_notebook.rank.engine")  # only ranks import this module
    if engine is not None and Application.initialized() and isinstance(Application.instance(), engine.RankEngine):
        raise UsageError(
            f"this process is a rank, and {what} in a cell that stays in the notebook (with %ddp_auto on, one with "
            "%%local above it)"
        )
