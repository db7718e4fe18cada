"""The recording of the last ranks that this notebook had, for magics that show it after their end."""

from __future__ import annotations

from typing import Any, Protocol


class EndedRecording(Protocol):
    """The recording of an ended session or job, with the methods that the magics call."""

    words: str  # says whose it is

    @property
    def recording(self) -> Any: ...
    def report(self) -> Any: ...
    def monitor(self, cell: int | None = None) -> None: ...
    def _write_trace(self, path: Any) -> tuple[list[int], list[int]]: ...
    def close(self) -> None: ...


_last: EndedRecording | None = None


def last() -> EndedRecording | None:
    """Return the recording of the last ranks, until there are ranks again; None if there is none."""
    return _last


def keep(ended: EndedRecording | None) -> None:
    """Let the magics show this recording until ranks start. Views of the earlier recording become pictures.

    Args:
        ended: None: there are ranks.
    """
    global _last
    before, _last = _last, ended
    if before is not None:
        before.close()
