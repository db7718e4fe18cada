"""Recording of the last ranks of this notebook, for magics that show it after the ranks have ended."""

from __future__ import annotations

from typing import Any, Protocol


class EndedRecording(Protocol):
    """Recording of an ended session or job, with the methods that the magics call."""

    words: str  # name of its session or job

    @property
    def recording(self) -> Any: ...
    def report(self) -> Any: ...
    def monitor(self, cell: int | None = None) -> None: ...
    def _write_trace(self, path: Any) -> tuple[list[int], list[int]]: ...
    def close(self) -> None: ...


_last: EndedRecording | None = None


def last() -> EndedRecording | None:
    """Return the recording of the last ranks, or None if there is none or ranks are running."""
    return _last


def keep(ended: EndedRecording | None) -> None:
    """Let the magics show this recording until ranks start. Views of the previous one become static images.

    Args:
        ended: the recording; None: ranks are running.
    """
    global _last
    before, _last = _last, ended
    if before is not None:
        before.close()
