"""Features that a test has disabled. For tests only; users have no such setting."""

from __future__ import annotations

from ddp_notebook.stdlib import os

VARIABLE = "DDP_NOTEBOOK_TEST_WITHOUT"


def without() -> frozenset[str]:
    """Return the names of the disabled features.

    Example:
        >>> without()
        frozenset()
    """
    return frozenset(filter(None, os.environ.get(VARIABLE, "").split(",")))
