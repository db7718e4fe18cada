"""Features that a test has disabled. For tests only; users have no such setting."""

from __future__ import annotations

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import os

VARIABLE = "DDP_NOTEBOOK_TEST_WITHOUT"
# A feature that follows or reads the recorded steps is off without them.
NEEDS = {"findings": "recording", "nan": "recording"}


def without() -> frozenset[str]:
    """Return the names of the disabled features.

    Example:
        >>> without()
        frozenset()
    """
    off = frozenset(filter(None, os.environ.get(VARIABLE, "").split(",")))
    return off | {name for name, needed in NEEDS.items() if needed in off}
