"""A program of calls to other ranks: guess, run it, step through its recording."""

from __future__ import annotations

import re
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from ddp_notebook.display import calls_drawn
from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.lesson import guess_of, run_with_guess
from ddp_notebook.lessons.lesson_cells import LessonRunner, running
from ddp_notebook.lessons.lesson_display import DisplayedLesson
from ddp_notebook.lessons.remote.scenes import STORIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ddp_notebook.lessons.lesson import Wish
    from ddp_notebook.observe.remote import AutogradContext, Reference, RemoteCall
    from ddp_notebook.session import Session

_PROGRAMS = Path(__file__).with_name("programs.py")
_FOR_MYPY = re.compile(r"  # type: ignore.*")


class RemoteProgram(DisplayedLesson):
    """A program of calls to other ranks, on the running ranks.

    It has its own `init_rpc` and `shutdown`. References of earlier cells without `shutdown` become invalid.

    Args:
        name: One of `STORIES`: "calls", "rrefs", "batching" or "backward".
        session: Session to use; None for the running one.

    Raises:
        UsageError: There is no such program.
        NoSessionError: No ranks are running.

    Example:
        >>> program = lessons.rpc("calls").guess("the rank that calls it").run()
        >>> program.answer, program.is_right
        ('rank 0, who has the agent', False)
    """

    def __init__(self, name: str = "calls", session: Session | None = None) -> None:
        self._runner = LessonRunner(running(session))
        self.choose(name)

    def choose(self, name: str) -> None:
        """Choose another program, without running it."""
        if name not in STORIES:
            raise UsageError(f"the program must be one of {', '.join(STORIES)}, got {name!r}")
        self.name, self.story = name, STORIES[name]
        self.guessed: str | None = None
        self.value: Any = None
        self.calls: list[RemoteCall] = []
        self.references: list[Reference] = []
        self.contexts: list[AutogradContext] = []
        self._cell: int | None = None

    def guess(self, choice: str | EllipsisType) -> RemoteProgram:
        """Guess the answer to the question. The dots of a notebook mean no guess.

        Raises:
            UsageError: The guess is not among the choices.
        """
        self.guessed = guess_of(choice, self.story.choices) or self.guessed
        return self

    def run(self) -> RemoteProgram:
        """Run the program on the ranks."""
        self._runner.run(f"from ddp_notebook.lessons.remote import programs as _lesson_programs\n"
                         f"_lesson_told = _lesson_programs.play({self.name!r})")  # fmt: skip
        self.value = self._runner.pull("_lesson_told")[0]
        recording = self._runner.session.recording
        self._cell = max(call.cell for call in recording.calls())
        self.calls = recording.calls(cell=self._cell)
        self.references = recording.references(cell=self._cell)
        self.contexts = recording.contexts(cell=self._cell)
        return self

    @property
    def has_run(self) -> bool:
        return self._cell is not None

    @property
    def answer(self) -> str | None:
        """Return the answer according to the recording; None before the run."""
        return self.story.answer(self.calls, self.contexts) if self.has_run else None

    @property
    def is_right(self) -> bool | None:
        """Return whether the guess was right; None without a guess or before the run."""
        return None if self.guessed is None or not self.has_run else self.guessed == self.answer

    @property
    def code(self) -> str:
        """Return the code of the program."""
        return _source(self.name)

    @property
    def said(self) -> list[str]:
        """Return the answer in sentences."""
        if not self.has_run:
            return []
        verdict = {None: "", True: "You were right: ", False: f"Not {self.guessed!r}: "}[self.is_right]
        words = f"{verdict}{self.answer}; {self.story.why}"
        return [words[0].upper() + words[1:], f"Rank 0 has got {self.value}."]

    def picture(self) -> Figure:
        """Return a figure with ranks as columns and calls as arrows. It stays in a saved notebook."""
        if not self.has_run:
            return self._asking()
        from ddp_notebook.display import INK

        figure = self._runner.session.recording.plot.calls(cell=self._cell, most=len(self.calls))
        title = f"{self.story.title}: {figure.get_suptitle()}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
        return figure

    def _asking(self) -> Figure:
        from ddp_notebook.display import INK, picture

        lines = self.code.count("\n") + 1
        figure, (axes,) = picture(self.story.question, 0.75 + 0.19 * (lines + 1))
        axes.set_axis_off()
        axes.text(0, 1, self.code, family="monospace", fontsize=8.5, color=INK, va="top", transform=axes.transAxes)
        axes.text(0, -0.02, " or ".join(map(repr, self.story.choices)), fontsize=9, color=INK, va="top",
                  transform=axes.transAxes)  # fmt: skip
        return figure

    # ---- in the browser

    @property
    def world_size(self) -> int:
        return self._runner.session.world_size

    def state(self) -> dict[str, Any]:
        """Return everything that the browser draws."""
        return {
            "kind": "remote",
            "world_size": self.world_size,
            "name": self.name,
            "stories": [(name, story.title) for name, story in STORIES.items()],
            "lesson": self.story.lesson,
            "code": self.code,
            "question": self.story.question,
            "choices": self.story.choices,
            "guess": self.guessed,
            "answer": self.answer,
            "right": self.is_right,
            "said": self.said,
            "run": self._cell,
            **calls_drawn(self.calls, self.references, self.contexts),
        }

    def act(self, wish: Wish) -> None:
        """Handle a request of the browser: "choose" or "run".

        Raises:
            UsageError: The request is invalid.
        """
        match wish["do"]:
            case "choose":
                self.choose(wish["name"])
            case "run":
                run_with_guess(self, wish)

    def __repr__(self) -> str:
        if not self.has_run:
            return f"<{self.story.title}: {self.story.question} {' or '.join(map(repr, self.story.choices))}>"
        return f"<{self.story.title}: {len(self.calls)} calls. {' '.join(self.said)}>"


def rpc(name: str = "calls", session: Session | None = None) -> RemoteProgram:
    """Choose a program of calls to other ranks; see `RemoteProgram`."""
    return RemoteProgram(name, session)


def _source(name: str) -> str:
    """Return the source of a program's functions and classes."""
    _, _, after = _PROGRAMS.read_text(encoding="utf-8").partition(f"# ---- {name}\n")
    return _FOR_MYPY.sub("", after.partition("# ----")[0]).strip()
