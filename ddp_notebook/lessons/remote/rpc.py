"""A program of calls to other ranks: guess, run it, step through the picture of what was recorded."""

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
    """A program of calls to other ranks, on the running ones.

    It has an `init_rpc` and a `shutdown` of its own. References of a cell that has not called `shutdown` end.

    Args:
        name: of `STORIES`: "calls", "rrefs", "batching" or "backward".
        session: None: the running one.

    Raises:
        UsageError: there is no such program.
        NoSessionError: no ranks are running.

    Example:
        >>> program = lessons.rpc("calls").guess("the rank that calls it").run()
        >>> program.answer, program.is_right
        ('rank 0, who has the agent', False)
    """

    def __init__(self, name: str = "calls", session: Session | None = None) -> None:
        self._runner = LessonRunner(running(session))
        self.choose(name)

    def choose(self, name: str) -> None:
        """Take another program; it has not run yet."""
        if name not in STORIES:
            raise UsageError(f"there is no program {name!r}; there are {', '.join(STORIES)}")
        self.name, self.story = name, STORIES[name]
        self.guessed: str | None = None
        self.value: Any = None
        self.calls: list[RemoteCall] = []
        self.references: list[Reference] = []
        self.contexts: list[AutogradContext] = []
        self._cell: int | None = None

    def guess(self, choice: str | EllipsisType) -> RemoteProgram:
        """Say what the answer to the question will be; the dots of a notebook say nothing.

        Raises:
            UsageError: it is none of the choices.
        """
        self.guessed = guess_of(choice, self.story.choices) or self.guessed
        return self

    def run(self) -> RemoteProgram:
        """Run it on the ranks."""
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
        """What the recording answers; None: it has not run yet."""
        return self.story.answer(self.calls, self.contexts) if self.has_run else None

    @property
    def is_right(self) -> bool | None:
        """Whether the guess was right; None: nothing was guessed, or it has not run yet."""
        return None if self.guessed is None or not self.has_run else self.guessed == self.answer

    @property
    def code(self) -> str:
        """What runs."""
        return _source(self.name)

    @property
    def said(self) -> list[str]:
        """The answer, in sentences."""
        if not self.has_run:
            return []
        verdict = {None: "", True: "You were right: ", False: f"Not {self.guessed!r}: "}[self.is_right]
        words = f"{verdict}{self.answer}; {self.story.why}"
        return [words[0].upper() + words[1:], f"Rank 0 has got {self.value}."]

    def picture(self) -> Figure:
        """Ranks as columns, calls as arrows: a figure that stays in a saved notebook."""
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
        """All that the browser draws."""
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
        """Do what a button asks for: "choose" or "run".

        Raises:
            UsageError: it cannot be done.
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
    """Take a program of calls to other ranks, to guess, to run and to step through; see `RemoteProgram`."""
    return RemoteProgram(name, session)


def _source(name: str) -> str:
    """The functions and classes of a program, as they stand in the file."""
    _, _, after = _PROGRAMS.read_text(encoding="utf-8").partition(f"# ---- {name}\n")
    return _FOR_MYPY.sub("", after.partition("# ----")[0]).strip()
