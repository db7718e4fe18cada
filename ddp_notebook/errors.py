"""Exceptions of this package, as a tree.

    DDPNotebookError
    ├── UsageError              an option or argument is invalid: which one, and a valid one
    ├── NoSessionError          no ranks are running
    ├── SessionExistsError      ranks are running already
    ├── StartError              the ranks did not start: the stage, the rank, its last output
    │   └── StartTimeoutError   ... because the start took longer than `--timeout`
    ├── HostError               a host server, which starts and signals ranks, has ended or does not answer
    ├── SessionBrokenError      a rank is dead or still busy, so a cell for all ranks cannot run
    ├── RankError               a cell failed on at least one rank
    │   └── RankDiedError       ... because the rank's process ended
    ├── CellTimeoutError        a cell took longer than `--timeout` and was stopped
    ├── JobCancelledError       a cell in the background was cancelled
    ├── CellFailedHereError     a cell failed in the notebook itself
    ├── JobFailedError          a torchrun job that was started in this notebook has failed
    ├── RecordingError          a file contains no readable recording
    │   └── MissingRecordingError   ... because it does not exist
    ├── CannotWriteError        a file of the user cannot be written: the reason, such as a full disk
    ├── MissingPackageError     an optional package is not installed: which one
    ├── MissingBuildError       the monitor's JavaScript was not built: how to build it
    └── ClientError             the ipyparallel controller cannot be reached or started again

Every message contains the event, the place, the wrong value and the remedy.
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
    "MissingRecordingError",
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


_MOST_SHOWN = 4  # different errors shown for one cell
COLORS = re.compile(r"\x1b\[[0-9;]*m")  # ANSI colours in tracebacks of ranks
_LONG = 100  # longer lines that differ only in numbers are shown once
# A number, or the name of a parameter with its number, such as `layers.0.weight`.
_NUMBER = re.compile(r"(?<![\w./-])((?:[A-Za-z_]\w*\.)*\d+\.[A-Za-z_*][\w.*]*)|0x[0-9a-f]+|\d+")
_LONGEST = 700  # characters of an error's line; the middle of a longer one is left out
_CAUSE = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)(:|$)")  # the traceback line that names the error


class DDPNotebookError(Exception):
    """Base class of all errors that this package raises on purpose.

    A notebook shows only the message, because frames of this package do not help the user. A message may quote user
    input, so control characters in it are escaped.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable_lines(one) if isinstance(one, str) else one for one in args))

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class UsageError(DDPNotebookError, ValueError):
    """An option or argument is invalid."""


class NoSessionError(DDPNotebookError):
    """No ranks are running."""

    def __init__(self, message: str = "no ranks are running; start them with %ddp_start 4") -> None:
        super().__init__(message)


class SessionExistsError(DDPNotebookError):
    """Ranks are running already."""


class StartError(DDPNotebookError):
    """The ranks did not start."""


class StartTimeoutError(StartError, TimeoutError):
    """The ranks did not start in time."""


class HostError(DDPNotebookError):
    """A host server, which starts and signals the ranks of its host, has ended or does not answer."""


class SessionBrokenError(DDPNotebookError):
    """A rank is dead, or still busy with an earlier cell."""


class RecordingError(DDPNotebookError, ValueError):
    """A file contains no readable recording."""


class MissingRecordingError(RecordingError, FileNotFoundError):
    """The file of a recording does not exist."""


class CannotWriteError(DDPNotebookError, OSError):
    """A file of the user cannot be written."""


class MissingPackageError(DDPNotebookError, ImportError):
    """The package of an optional feature is not installed."""


class MissingBuildError(DDPNotebookError):
    """The monitor's JavaScript was not built, for example in a checkout that was never installed."""


class ClientError(DDPNotebookError):
    """The ipyparallel controller cannot be reached or started again."""


def _in_a_line(summary: str) -> str:
    """Return a summary `"ValueError: message"` as one line.

    Only the first line of a message is kept, or the first two if the first ends with a colon. If the message contains a
    traceback, as from a DataLoader worker, the error of that traceback is added.
    """
    if "\\nTraceback (most recent call last):" in summary:  # a KeyError shows its text escaped
        summary = summary.replace("\\n", "\n").replace("\\'", "'")
    first, *more = [line.strip() for line in summary.splitlines() if line.strip()] or [""]
    if any("Traceback (most recent call last):" in line for line in more):
        for line in reversed(more):
            if _CAUSE.match(line):
                return f"{first} {line}"
    if more and first.endswith(":"):
        first, *more = f"{first} {more[0]}", *more[1:]
    if len(first) > _LONGEST:
        first = f"{first[: _LONGEST // 7]} ... {first[-_LONGEST * 6 // 7 :]}"
    return f"{first} ..." if more else first


def _alike(texts: Mapping[int, str], longer_than: int = 0) -> list[list[int]]:
    """Group ranks with equal texts. Texts longer than `longer_than` may differ in numbers, but not in names with
    numbers."""

    def shown(text: str) -> str:
        return _NUMBER.sub(lambda found: found[1] or "0", text) if len(text) > longer_than else text

    return [*group_by_value({rank: shown(text) for rank, text in texts.items()}).values()]


class RankError(DDPNotebookError):
    """A cell failed on at least one rank.

    Args:
        tracebacks: by rank, the traceback lines as shown on that rank, with ANSI colours.
        summaries: by rank, `"ValueError: message"`.
        result: the result of the cell on all ranks, including the successful ones.
        hint: a remedy, as the last line.
        others: for each set of other ranks, a line with their state.

    Equal tracebacks of several ranks are shown once, under their rank numbers.
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
        self.add_note(COLORS.sub("", "\n".join(self._of_ranks())))  # Python prints it in scripts and logs

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
        # Messages contain rank numbers and pids. `summaries` and `tracebacks` have the texts of each rank.
        # an unknown magic has no traceback
        alike = _alike({rank: text for rank, text in texts.items() if text.strip()})
        for ranks in alike[:_MOST_SHOWN]:
            text = texts[ranks[0]]
            is_same = all(texts[rank] == text for rank in ranks)
            whose = "" if is_same else f": traceback of rank {ranks[0]}; the others differ only in numbers"
            lines += [f"--- {name_ranks(ranks)}{whose} ---", *text.split("\n"), ""]
        if more := [rank for ranks in alike[_MOST_SHOWN:] for rank in ranks]:
            lines += [f"--- {name_ranks(more)}: other tracebacks, in the error's tracebacks[rank] ---", ""]
        return [*lines, *self.others]

    def _render_traceback_(self) -> list[str]:
        return [*self._of_ranks(), f"{type(self).__name__}: {self}"]


class RankDiedError(RankError):
    """A rank's process ended during a cell."""


class CellFailedHereError(DDPNotebookError):
    """A cell failed in the notebook itself; IPython has shown the traceback."""


class JobFailedError(DDPNotebookError):
    """A torchrun job that was started in this notebook has failed."""


class CellTimeoutError(DDPNotebookError, TimeoutError):
    """A cell took longer than its limit and was stopped. `result` is its partial result."""

    def __init__(self, message: str, result: CellResult | None = None) -> None:
        self.result = result
        super().__init__(message)


class JobCancelledError(DDPNotebookError):
    """A background cell was cancelled by `%ddp_cancel`, `%ddp_interrupt` or the end of the session."""
