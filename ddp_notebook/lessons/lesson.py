"""What every lesson with a view has, and how wishes of its view become arguments. Both ways travel plain data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Protocol

from ddp_notebook.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ddp_notebook.lessons.lesson_cells import LessonRunner

Wish = Mapping[str, Any]  # what a button asks for: `{"do": "step"}`, and what that needs


class Lesson(Protocol):
    """A lesson that a browser can draw: `Explorer`, `Stepper`, `Scene`, `RemoteProgram`, `Product`, `MeshTraining`."""

    _runner: LessonRunner

    def state(self) -> dict[str, Any]:
        """All that the browser draws, as plain data; "kind" says which of its views draws it."""
        ...

    def act(self, wish: Wish) -> None:
        """Do what a button asks for; what this lesson does not know is ignored.

        Raises:
            UsageError: it cannot be done.
        """
        ...

    def picture(self) -> Figure:
        """The figure that stays in a saved notebook."""
        ...


class Guessed(Protocol):
    """A lesson that asks for a guess before it runs."""

    guessed: str | None

    def guess(self, choice: str | EllipsisType, /) -> object: ...
    def run(self) -> object: ...


def run_with_guess(lesson: Guessed, wish: Wish) -> None:
    """Run it with the guess that a wish has, if it has one.

    Raises:
        UsageError: it is none of the choices.
    """
    lesson.guessed = None
    if wish.get("guess"):
        lesson.guess(wish["guess"])
    lesson.run()


def options(wish: Wish) -> dict[str, Any]:
    """The keyword arguments that a wish has for `configure`."""
    found = dict(wish.get("options") or {})
    if found.get("inputs") is not None:
        found["inputs"] = by_rank(found["inputs"])
    return found


def by_rank(values: Mapping[str, Any]) -> dict[int, Any]:
    """Values by rank, whose numbers are text in JSON.

    Example:
        >>> by_rank({"0": [1, 2], "3": [4]})
        {0: [1, 2], 3: [4]}
    """
    return {int(rank): given for rank, given in values.items()}


def guess_of(guess: str | EllipsisType, choices: Sequence[str]) -> str | None:
    """The choice that a guess is; None: it is the dots of a notebook, which say nothing.

    Raises:
        UsageError: it is none of the choices.

    Example:
        >>> guess_of("all_reduce ", ["all_gather", "all_reduce"])
        'all_reduce'
    """
    if isinstance(guess, EllipsisType):
        return None
    if (found := next((one for one in choices if one.lower() == str(guess).strip().lower()), None)) is None:
        raise UsageError(f"{guess!r} is none of the choices: {', '.join(map(repr, choices))}")
    return found
