"""How long a session is kept, and how much of what its ranks say while nobody is there."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ddp_notebook.errors import UsageError

HOURS = 24.0
IDLE_HOURS = 12.0
_IDLE = "DDP_NOTEBOOK_KEEP_IDLE_H"
OUTPUT_MB = 64.0
RECORDING_MB = 1000.0
_MOST_MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What was asked for.

    Args:
        alone_s: how long it is kept while no notebook is there, in seconds.
        idle_s: likewise, where no cell runs either.
        output_bytes: kept of each rank's text and displays.
        recording_bytes: of the files with what all ranks have recorded.
    """

    alone_s: float
    idle_s: float
    output_bytes: int
    recording_bytes: int


def idle_s() -> float:
    """How long a session is kept in which nothing runs, in seconds: 12 hours, if the environment says nothing else.

    Raises:
        UsageError: it says no number.
    """
    hours = os.environ.get(_IDLE, "") or str(IDLE_HOURS)
    try:
        if (idle := float(hours) * 3600) > 0:
            return idle
    except ValueError:
        pass
    raise UsageError(f"{_IDLE} must be a positive number of hours, such as 12, got {hours}")


def check(hours: float | None, output_mb: float, recording_mb: float, most_h: float) -> None:
    """Whether a session can be kept like that.

    Raises:
        UsageError: says what to write instead.
    """
    if hours is not None and not (_is_number(hours) and 0 < hours <= most_h):
        raise UsageError(
            f"--keep must be a positive number of hours, at most {most_h:g}, e.g. --keep 12, got {hours} (the number "
            "of ranks comes first)"
        )
    if hours is not None:
        idle_s()
    sizes = (("--keep-output", output_mb, OUTPUT_MB), ("--keep-recording", recording_mb, RECORDING_MB))
    for name, megabytes, usual in sizes:
        if not (_is_number(megabytes) and 0 < megabytes <= _MOST_MB):
            raise UsageError(f"{name} must be a positive number of megabytes, e.g. {name} 64, got {megabytes}")
        if hours is None and megabytes != usual:
            raise UsageError(f"{name} goes with --keep; write that too, e.g. --keep 12 {name} {megabytes:g}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
