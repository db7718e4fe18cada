"""Interface of lessons with a view, and conversion of browser requests to arguments. Only plain data is exchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Protocol

from ddp_notebook.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ddp_notebook.lessons.lesson_cells import LessonRunner

Wish = Mapping[str, Any]  # request of a button, such as `{"do": "step"}`, with its arguments


class Lesson(Protocol):
    """A lesson that a browser can draw: `Explorer`, `Stepper`, `Scene`, `RemoteProgram`, `Product`, `MeshTraining`."""

    _runner: LessonRunner

    def state(self) -> dict[str, Any]:
        """Return everything that the browser draws, as plain data. "kind" selects the view."""
        ...

    def act(self, wish: Wish) -> None:
        """Handle a request of a button. Unknown requests are ignored.

        Raises:
            UsageError: The request is invalid.
        """
        ...

    def picture(self) -> Figure:
        """Return the figure that stays in a saved notebook."""
        ...


class Guessed(Protocol):
    """A lesson that asks for a guess before it runs."""

    guessed: str | None

    def guess(self, choice: str | EllipsisType, /) -> object: ...
    def run(self) -> object: ...


def run_with_guess(lesson: Guessed, wish: Wish) -> None:
    """Run a lesson with the guess in a request, if there is one.

    Raises:
        UsageError: The guess is not among the choices.
    """
    lesson.guessed = None
    if wish.get("guess"):
        lesson.guess(wish["guess"])
    lesson.run()


def options(wish: Wish) -> dict[str, Any]:
    """Return the keyword arguments in a request for `configure`."""
    found = dict(wish.get("options") or {})
    if found.get("inputs") is not None:
        found["inputs"] = by_rank(found["inputs"])
    return found


def by_rank(values: Mapping[str, Any]) -> dict[int, Any]:
    """Convert the keys of values by rank, which are strings in JSON, to numbers.

    Example:
        >>> by_rank({"0": [1, 2], "3": [4]})
        {0: [1, 2], 3: [4]}
    """
    return {int(rank): given for rank, given in values.items()}


def guess_of(guess: str | EllipsisType, choices: Sequence[str]) -> str | None:
    """Return the choice that matches a guess; None for the dots of a notebook, which mean no guess.

    Raises:
        UsageError: The guess is not among the choices.

    Example:
        >>> guess_of("all_reduce ", ["all_gather", "all_reduce"])
        'all_reduce'
    """
    if isinstance(guess, EllipsisType):
        return None
    if (found := next((one for one in choices if one.lower() == str(guess).strip().lower()), None)) is None:
        raise UsageError(f"the guess must be one of {', '.join(map(repr, choices))}, got {guess!r}")
    return found
