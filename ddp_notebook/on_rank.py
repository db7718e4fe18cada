"""Refuse calls that only the notebook may make on a rank."""

from __future__ import annotations

import sys

from traitlets.config import Application

from ddp_notebook.errors import UsageError


def refuse_on_rank(what: str) -> None:
    """Raise an error if this process is a rank of a session.

    Args:
        what: what a rank does not do, and the call that a cell of the notebook may make: "ranks start no ranks: call
            start".

    Raises:
        UsageError: this process is a rank.

    Example:
        >>> refuse_on_rank("ranks start no ranks: call start")
    """
    engine = sys.modules.get("ddp_notebook.rank.engine")  # the notebook does not import what only ranks have
    if engine is not None and Application.initialized() and isinstance(Application.instance(), engine.RankEngine):
        raise UsageError(
            f"this process is a rank, and {what} in a cell that stays in the notebook (with %ddp_auto on, one with "
            "%%local above it)"
        )
