"""Where `ddp_notebook.log` of this process goes: a rank's recording, or that of a script that is recorded."""

from __future__ import annotations

from collections.abc import Callable

_log: Callable[..., None] | None = None


def install(log: Callable[..., None]) -> None:
    """From now on `ddp_notebook.log` calls this."""
    global _log
    _log = log


def is_log(value: object) -> bool:
    """Return whether a value is the `log` that every rank has."""
    ours = getattr(_log, "__func__", None)
    return ours is not None and getattr(value, "__func__", None) is ours


def current() -> Callable[..., None] | None:
    """What `ddp_notebook.log` calls; None: nothing is recorded in this process."""
    return _log
