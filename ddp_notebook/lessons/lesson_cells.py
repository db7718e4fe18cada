"""How the lessons use the running session: cells that show nothing, and what they leave behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_notebook import RecordOptions
from ddp_notebook.errors import DDPNotebookError, NoSessionError

if TYPE_CHECKING:
    from ddp_notebook.observe.views import Collective
    from ddp_notebook.session import Session

RUN_S = 30.0  # longer than any step of a lesson takes


def running(session: Session | None = None) -> Session:
    """The session that a lesson runs on.

    Raises:
        NoSessionError: no ranks are running.
    """
    from ddp_notebook.session import current

    found = session or current()
    if found is None:
        raise NoSessionError()
    if found.world_size < 2:
        raise DDPNotebookError("a lesson needs at least 2 ranks: %ddp_start 4")
    return found


class LessonRunner:
    """Runs the cells of one lesson, and follows what is recorded of them.

    Args:
        session: where they run.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._seen = 0  # calls in the recording that `calls` leaves out

    def ask(self, code: str, timeout_s: float = RUN_S, level: str = "all") -> dict[int, Any]:
        """Run code that sets `_lesson_told`, and return its value by rank."""
        self.run(f"_lesson_told = None\n{code}", timeout_s, level)
        return self.pull("_lesson_told")

    def pull(self, name: str) -> dict[int, Any]:
        """The value of a variable by rank."""
        return dict(self.session[name])

    def run(self, code: str, timeout_s: float = RUN_S, level: str = "all", *, quiet: bool = True) -> None:
        """Run code.

        Args:
            level: how much is recorded, whatever the session records otherwise: the lessons count by it.
            quiet: show nothing.
        """
        self.session.run(code, timeout_s=timeout_s, quiet=quiet, record=RecordOptions(level=level))

    def mark(self) -> None:
        """Let `calls` begin here."""
        _, self._seen, _ = self.session.recording.follow("call", self._seen)

    def calls(self, op: str | None = None) -> list[Collective]:
        """The calls of all ranks since the mark, as the session recorded them; op: None: all operations."""
        return list(self.session.recording.collectives(op=op, since=self._seen))
