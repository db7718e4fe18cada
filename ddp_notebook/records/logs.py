"""Target of `ddp_notebook.log` in this process: the recorder of a rank or of a recorded script."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

_log: Callable[..., None] | None = None


def install(log: Callable[..., None]) -> None:
    """Make `ddp_notebook.log` call this function."""
    global _log
    _log = log


def is_log(value: object) -> bool:
    """Return whether a value is the `log` function that every rank defines for cells."""
    ours = getattr(_log, "__func__", None)
    return ours is not None and isinstance(value, MethodType) and value.__func__ is ours


def current() -> Callable[..., None] | None:
    """Return the function that `ddp_notebook.log` calls; None if this process is not recorded."""
    return _log
