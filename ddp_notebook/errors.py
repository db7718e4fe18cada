"""What can go wrong, as a tree.

    DDPNotebookError
    ├── UsageError              an option or argument that cannot be: says which, and what to write instead
    ├── NoSessionError          no ranks are running
    ├── SessionExistsError      ranks are running already
    ├── StartError              the ranks did not come up: which stage, which rank, its last words
    │   └── StartTimeoutError   ... because it took longer than `--timeout`
    ├── HostError               a host server, which starts and signals ranks, is gone or does not answer
    ├── SessionBrokenError      a rank is gone or still busy, so a cell for all ranks cannot run
    ├── RankError               a cell failed on at least one rank
    │   └── RankDiedError       ... because the rank's process ended
    ├── CellTimeoutError        a cell took longer than `--timeout` and was stopped
    ├── JobCancelledError       a cell in the background was cancelled
    ├── CellFailedHereError     a cell failed in the notebook itself
    ├── JobFailedError          a job of torchrun's that was started here has failed
    ├── RecordingError          a file holds no recording that can be read
    ├── CannotWriteError        a file that the user named cannot be written: says why, such as a full disk
    ├── MissingPackageError     something optional was asked for whose package is not installed: says which
    ├── MissingBuildError       the monitor's JavaScript was not built: says how
    └── ClientError             ipyparallel's controller cannot be reached or started again

Every message says what happened, where, the value that was wrong, and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ddp_notebook.records.names import printable_lines
from ddp_notebook.records.words import group_by_value, name_ranks

if TYPE_CHECKING:
    from ddp_notebook.run.cells.result import CellResult

__all__ = [
    "CannotWriteError",
    "CellFailedHereError",
    "CellTimeoutError",
    "ClientError",
    "DDPNotebookError",
    "HostError",
    "JobCancelledError",
    "JobFailedError",
    "MissingBuildError",
    "MissingPackageError",
    "NoSessionError",
    "RankDiedError",
    "RankError",
    "RecordingError",
    "SessionBrokenError",
    "SessionExistsError",
    "StartError",
    "StartTimeoutError",
    "UsageError",
]


_MOST_SHOWN = 4  # different errors of one cell
COLORS = re.compile(r"\x1b\[[0-9;]*m")  # in the ranks' tracebacks
_LONG = 100  # a line that is not repeated for the sake of a number
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
_CAUSE = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)(:|$)")  # the line of a traceback that names the error


class DDPNotebookError(Exception):
    """Base of every error that this package raises on purpose.

    In a notebook the message alone is shown: the frames inside this package would not help its reader. A message may
    quote what a user chose, so control characters in it are escaped.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable_lines(one) if isinstance(one, str) else one for one in args))

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class UsageError(DDPNotebookError, ValueError):
    """An option or argument that cannot be."""


class NoSessionError(DDPNotebookError):
    """No ranks are running."""

    def __init__(self, message: str = "no ranks are running; start them with %ddp_start 4") -> None:
        super().__init__(message)


class SessionExistsError(DDPNotebookError):
    """Ranks are running already."""


class StartError(DDPNotebookError):
    """The ranks did not come up."""


class StartTimeoutError(StartError, TimeoutError):
    """The ranks did not come up in time."""


class HostError(DDPNotebookError):
    """A host server, which starts and signals the ranks of its host, is gone or does not answer."""


class SessionBrokenError(DDPNotebookError):
    """A rank is gone, or still busy with an earlier cell."""


class RecordingError(DDPNotebookError, ValueError):
    """A file holds no recording that can be read."""


class CannotWriteError(DDPNotebookError, OSError):
    """A file that the user named cannot be written."""


class MissingPackageError(DDPNotebookError, ImportError):
    """Something optional was asked for whose package is not installed."""


class MissingBuildError(DDPNotebookError):
    """The monitor's JavaScript was not built, as in a checkout that was never installed."""


class ClientError(DDPNotebookError):
    """ipyparallel's controller cannot be reached or started again."""


def _in_a_line(summary: str) -> str:
    """`"ValueError: message"`: of a long message its first line, or where that is empty the next one too; and the error
    of a traceback in it, such as a DataLoader's worker sends."""
    if "\\nTraceback (most recent call last):" in summary:  # as a KeyError shows a text
        summary = summary.replace("\\n", "\n").replace("\\'", "'")
    first, *more = [line.strip() for line in summary.splitlines() if line.strip()] or [""]
    if any("Traceback (most recent call last):" in line for line in more):
        for line in reversed(more):
            if _CAUSE.match(line):
                return f"{first} {line}"
    if more and first.endswith(":"):
        first, *more = f"{first} {more[0]}", *more[1:]
    return f"{first} ..." if more else first


def _alike(texts: Mapping[int, str], longer_than: int = 0) -> list[list[int]]:
    """Sets of ranks that have the same text, or a longer one that differs in numbers only."""
    return [*group_by_value({r: _NUMBER.sub("0", t) if len(t) > longer_than else t for r, t in texts.items()}).values()]


class RankError(DDPNotebookError):
    """A cell failed on at least one rank.

    Args:
        tracebacks: rank -> the traceback as shown on that rank (lines, with ANSI colours).
        summaries: rank -> `"ValueError: message"`.
        result: what the cell left behind on every rank, the ones that succeeded included.
        hint: what to do, for the last line.
        others: what the other ranks did, a line for each set of them.

    The same traceback from several ranks is shown once, under the set of its ranks.
    """

    def __init__(
        self,
        tracebacks: Mapping[int, Sequence[str]],
        summaries: Mapping[int, str],
        result: CellResult | None = None,
        hint: str = "",
        others: Sequence[str] = (),
    ) -> None:
        self.others = list(others)
        self.tracebacks = dict(tracebacks)
        self.summaries = dict(summaries)
        self.result = result
        super().__init__("\n".join(filter(None, [self._message(), hint])))
        self.add_note(COLORS.sub("", "\n".join(self._of_ranks())))  # what Python itself shows in a script, or a log

    def _message(self) -> str:
        first_lines = {rank: _in_a_line(summary) for rank, summary in self.summaries.items()}
        alike = _alike(first_lines, _LONG)
        parts = []
        for ranks in alike[:_MOST_SHOWN]:
            text = first_lines[ranks[0]]
            own = [rank for rank in ranks if first_lines[rank] == text]
            others = [rank for rank in ranks if rank not in own]
            also = f"; with other numbers on {name_ranks(others)}" if others else ""
            parts.append(f"{text} ({name_ranks(own)}{also})")
        if more := [rank for ranks in alike[_MOST_SHOWN:] for rank in ranks]:
            parts.append(f"other errors ({name_ranks(more)})")
        others = [] if self.result is None else [r for r in self.result.ranks if r not in self.summaries]
        states = {rank: self.result[rank].status for rank in others} if self.result is not None else {}
        words = {"ok": "succeeded", "running": "not ended yet"}
        for status, ranks in group_by_value(states).items():
            parts.append(f"{words.get(status, status)}: {name_ranks(ranks)}")
        return "; ".join(parts)

    def _of_ranks(self) -> list[str]:
        lines: list[str] = []
        texts = {rank: "\n".join(tb) for rank, tb in self.tracebacks.items()}
        # Messages name ranks and processes: what each of them says is in `summaries` and `tracebacks`.
        alike = _alike({rank: text for rank, text in texts.items() if text.strip()})  # a wrong magic has none
        for ranks in alike[:_MOST_SHOWN]:
            text = texts[ranks[0]]
            is_same = all(texts[rank] == text for rank in ranks)
            whose = "" if is_same else f": that of rank {ranks[0]}, from which the others differ in numbers only"
            lines += [f"--- {name_ranks(ranks)}{whose} ---", *text.split("\n"), ""]
        if more := [rank for ranks in alike[_MOST_SHOWN:] for rank in ranks]:
            lines += [f"--- {name_ranks(more)}: other tracebacks, in the error's tracebacks[rank] ---", ""]
        return [*lines, *self.others]

    def _render_traceback_(self) -> list[str]:
        return [*self._of_ranks(), f"{type(self).__name__}: {self}"]


class RankDiedError(RankError):
    """A rank's process ended while it ran a cell."""


class CellFailedHereError(DDPNotebookError):
    """A cell failed in the notebook itself, whose traceback IPython has shown."""


class JobFailedError(DDPNotebookError):
    """A job of torchrun's that was started here has failed."""


class CellTimeoutError(DDPNotebookError, TimeoutError):
    """A cell took longer than its limit and was stopped. `result` holds what it left behind."""

    def __init__(self, message: str, result: CellResult | None = None) -> None:
        self.result = result
        super().__init__(message)


class JobCancelledError(DDPNotebookError):
    """A cell in the background was cancelled: by `%ddp_cancel`, `%ddp_interrupt` or the end of the session."""
