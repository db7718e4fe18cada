"""Runs the cells of a lesson in the session, without output, and reads their results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_notebook import RecordOptions
from ddp_notebook.errors import DDPNotebookError, NoSessionError

if TYPE_CHECKING:
    from ddp_notebook.observe.views import Collective
    from ddp_notebook.session import Session

RUN_S = 30.0  # longer than any step of a lesson


def running(session: Session | None = None) -> Session:
    """Return the session for a lesson.

    Raises:
        NoSessionError: No ranks are running.
    """
    from ddp_notebook.session import current

    found = session or current()
    if found is None:
        raise NoSessionError()
    if found.world_size < 2:
        raise DDPNotebookError(f"a lesson needs at least 2 ranks, got {found.world_size}: %ddp_resize 4 adds ranks")
    return found


class LessonRunner:
    """Runs the cells of one lesson, and reads their recorded calls.

    Args:
        session: Session to run in.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._seen = 0  # number of recorded calls that `calls` ignores

    def ask(self, code: str, timeout_s: float = RUN_S, level: str = "all") -> dict[int, Any]:
        """Run code that sets `_lesson_told`, and return its value by rank."""
        self.run(f"_lesson_told = None\n{code}", timeout_s, level)
        return self.pull("_lesson_told")

    def pull(self, name: str) -> dict[int, Any]:
        """Return the value of a variable by rank."""
        return dict(self.session[name])

    def run(self, code: str, timeout_s: float = RUN_S, level: str = "all", *, quiet: bool = True) -> None:
        """Run code.

        Args:
            level: Recording level, which overrides that of the session because lessons count calls.
            quiet: Show no output.
        """
        self.session.run(code, timeout_s=timeout_s, quiet=quiet, record=RecordOptions(level=level))

    def mark(self) -> None:
        """Make `calls` ignore all calls so far."""
        _, self._seen, _ = self.session.recording.follow("call", self._seen)

    def calls(self, op: str | None = None) -> list[Collective]:
        """Return the recorded calls of all ranks since the mark, of one operation or of all (None)."""
        return list(self.session.recording.collectives(op=op, since=self._seen))
